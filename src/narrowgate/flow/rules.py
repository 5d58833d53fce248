"""The table of all rules: one row an operation, one short function a rule; an operation without a row is a wall."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.fx import Node

from narrowgate.flow import attention, mixing, movement, normalising, pointwise, pooling, products, splits, turned
from narrowgate.flow.analysis import ClosedGates, Flow
from narrowgate.flow.following import following
from narrowgate.flow.trace import Graph
from narrowgate.flow.unknown import Numbers

RULES: dict[str, Callable[[Flow, Node], None]] = {
    **following({**pointwise.RULES, **movement.RULES, **splits.RULES, **pooling.RULES, **normalising.RULES}),
    **mixing.RULES,
    **turned.RULES,
    **products.RULES,
    **attention.RULES,
}


def swept_by_head(
    graph: Graph, model: nn.Module, constants: str, closed: ClosedGates, numbers: Numbers | None, narrow_norms: bool
) -> Flow:
    """The same for who is coupled with whom: all attention loses whole heads, as if some of them were dead."""
    flow = Flow(graph, model, constants, closed, None, numbers, narrow_norms).run(RULES)
    if not flow.heads:
        return flow
    by_head = {view: axis for heads in flow.heads for view, axis in heads.views.items()}
    return Flow(graph, model, constants, closed, by_head, numbers, narrow_norms).run(RULES)


def swept(
    graph: Graph,
    model: nn.Module,
    constants: str,
    closed: ClosedGates | None,
    numbers: Numbers | None,
    narrow_norms: bool = False,
) -> Flow:
    """Everything the rules tell about a graph; a second time where attention turns out to lose whole heads."""
    flow = Flow(graph, model, constants, closed, None, numbers, narrow_norms).run(RULES)
    by_head = attention.views_by_head(flow)
    if not by_head:
        return flow
    return Flow(graph, model, constants, closed, by_head, numbers, narrow_norms).run(RULES)
