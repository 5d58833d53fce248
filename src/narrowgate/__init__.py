"""narrowgate makes PyTorch networks narrow while they train: learn which channels matter, then remove the others."""

from narrowgate import norms, schedules
from narrowgate._version import __version__
from narrowgate.attach import Gates, attach_gates_, gates_of, merge_gates_, plain_state_dict
from narrowgate.flow import (
    CollapseError,
    Plan,
    PlanError,
    ReplayError,
    TraceError,
    Verification,
    VerificationError,
    compact,
    compact_,
    plan,
    verify,
)
from narrowgate.measure import Summary, summarize
from narrowgate.penalties import Penalty
from narrowgate.storage import StorageError, load, save
from narrowgate.train.budget import Budget
from narrowgate.train.shrink import Shrinker, ShrinkWarning

__all__ = [
    "Budget",
    "CollapseError",
    "Gates",
    "Penalty",
    "Plan",
    "PlanError",
    "ReplayError",
    "ShrinkWarning",
    "Shrinker",
    "StorageError",
    "Summary",
    "TraceError",
    "Verification",
    "VerificationError",
    "__version__",
    "attach_gates_",
    "compact",
    "compact_",
    "gates_of",
    "load",
    "merge_gates_",
    "norms",
    "plain_state_dict",
    "plan",
    "save",
    "schedules",
    "summarize",
    "verify",
]
