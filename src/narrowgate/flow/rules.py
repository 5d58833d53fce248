"""The table of all rules: one row an operation, one short function a rule; an operation without a row is a wall."""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Node

from narrowgate.flow import attention, mixing, movement, normalising, pointwise, pooling, products, splits
from narrowgate.flow.analysis import Flow
from narrowgate.flow.following import following

RULES: dict[str, Callable[[Flow, Node], None]] = {
    **following({**pointwise.RULES, **movement.RULES, **splits.RULES, **pooling.RULES, **normalising.RULES}),
    **mixing.RULES,
    **products.RULES,
    **attention.RULES,
}
