"""narrowgate makes PyTorch networks narrow while they train: learn which channels matter, then remove the others."""

from typing import TYPE_CHECKING

from narrowgate._version import __version__

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
    "coupled",
    "gates_of",
    "gathered",
    "load",
    "merge_gates_",
    "norms",
    "plain_state_dict",
    "plan",
    "save",
    "schedules",
    "shrink_sharded_",
    "summarize",
    "verify",
]

# A name is imported when it is first used: torch takes a second, which `narrowgate --help` need not wait for.
_HOMES = {
    "narrowgate.attach": ("Gates", "attach_gates_", "gates_of", "merge_gates_", "plain_state_dict"),
    "narrowgate.coupling": ("coupled",),
    "narrowgate.flow": ("CollapseError", "PlanError", "ReplayError", "TraceError", "compact", "compact_"),
    "narrowgate.flow.plan": ("Plan", "plan"),
    "narrowgate.flow.verify": ("Verification", "VerificationError", "verify"),
    "narrowgate.measure": ("Summary", "summarize"),
    "narrowgate.penalties": ("Penalty",),
    "narrowgate.sharded": ("gathered", "shrink_sharded_"),
    "narrowgate.storage": ("StorageError", "load", "save"),
    "narrowgate.train.budget": ("Budget",),
    "narrowgate.train.shrink": ("ShrinkWarning", "Shrinker"),
}

if TYPE_CHECKING:
    from narrowgate import norms, schedules
    from narrowgate.attach import Gates, attach_gates_, gates_of, merge_gates_, plain_state_dict
    from narrowgate.coupling import coupled
    from narrowgate.flow import CollapseError, PlanError, ReplayError, TraceError, compact, compact_

    # From where they are, and not from narrowgate.flow: mypy takes plan and verify there for the modules.
    from narrowgate.flow.plan import Plan, plan
    from narrowgate.flow.verify import Verification, VerificationError, verify
    from narrowgate.measure import Summary, summarize
    from narrowgate.penalties import Penalty
    from narrowgate.sharded import gathered, shrink_sharded_
    from narrowgate.storage import StorageError, load, save
    from narrowgate.train.budget import Budget
    from narrowgate.train.shrink import Shrinker, ShrinkWarning
else:  # type checkers shall see the names above and no others

    def __getattr__(name):
        """A public name, from its module."""
        from importlib import import_module

        if name in ("norms", "schedules"):
            return import_module(f"narrowgate.{name}")
        for module, names in _HOMES.items():
            if name in names:
                return globals().setdefault(name, getattr(import_module(module), name))
        raise AttributeError(f"module 'narrowgate' has no attribute {name!r}")

    def __dir__():
        return sorted({*globals(), *__all__})
