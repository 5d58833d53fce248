"""Remove: channel-level constant propagation and dead-code elimination on any model, gated or not."""

from narrowgate.flow.decide import CollapseError
from narrowgate.flow.inplace import compact_
from narrowgate.flow.plan import Plan, plan
from narrowgate.flow.replay import ReplayError
from narrowgate.flow.surgery import PlanError, compact
from narrowgate.flow.trace import TraceError
from narrowgate.flow.verify import Verification, VerificationError, verify

__all__ = [
    "CollapseError",
    "Plan",
    "PlanError",
    "ReplayError",
    "TraceError",
    "Verification",
    "VerificationError",
    "compact",
    "compact_",
    "plan",
    "verify",
]
