"""The table of all rules: one row an operation, one short function a rule; an operation without a row is a wall."""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Node

from narrowgate.flow import mixing, movement, normalising, pointwise
from narrowgate.flow.analysis import Flow

RULES: dict[str, Callable[[Flow, Node], None]] = {
    **pointwise.RULES,
    **movement.RULES,
    **mixing.RULES,
    **normalising.RULES,
}
