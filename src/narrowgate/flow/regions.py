"""``with`` blocks in a forward (autocast off, gradients on or off), whose operations torch.export puts in graphs apart.

A block with autocast on stays one operation without a rule: it rounds to fewer digits than the rest of the model has,
so that no check could tell rounding from another function.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from torch import fx
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree


def inlined(module: GraphModule) -> fx.Graph:
    """A graph with the operations of such blocks in line, as they run; the same graph if there are none."""
    if not any(_is_region(node) for node in module.graph.nodes):
        return module.graph
    graph = fx.Graph()
    graph.output(_copy(graph, module, None))
    return graph


def _copy(graph: fx.Graph, module: GraphModule, inputs: Iterator[Any] | None) -> Any:
    """Add a module's operations to a graph; the results, in terms of that graph."""
    made: dict[Node, Any] = {}
    for node in module.graph.nodes:
        if node.op == "output":
            return map_arg(node.args[0], made.__getitem__)
        if node.op == "placeholder" and inputs is not None:
            made[node] = next(inputs)
        elif _is_region(node):
            inner, operands = _parts(module, node)
            made[node] = _copy(graph, inner, iter([made[operand] for operand in operands]))
        elif node.target is operator.getitem and not isinstance(made[node.args[0]], Node):
            made[node] = made[node.args[0]][node.args[1]]
        elif node.op != "get_attr" or not all(_is_region(user) for user in node.users):
            made[node] = graph.node_copy(node, made.__getitem__)
    return ()


def readers(module: GraphModule, node: Node) -> Iterator[Node]:
    """The operations that read a tensor, those in graphs apart included."""
    for user in node.users:
        sources = [source for source in pytree.tree_leaves((user.args, user.kwargs)) if isinstance(source, Node)]
        graphs = [graph for source in sources if (graph := _graph_of(module, source)) is not None]
        operands = [source for source in sources if _graph_of(module, source) is None]
        for graph in graphs:
            places = [place for place in graph.graph.nodes if place.op == "placeholder"]
            for place, operand in zip(reversed(places), reversed(operands), strict=False):
                if operand is node:
                    yield from readers(graph, place)
        if not graphs:
            yield user


def _graph_of(module: GraphModule, node: Node) -> GraphModule | None:
    graph = getattr(module, str(node.target), None) if node.op == "get_attr" else None
    return graph if isinstance(graph, GraphModule) else None


def _parts(module: GraphModule, node: Node) -> tuple[GraphModule, list[Any]]:
    """A block's operations, and what it reads."""
    at = next(i for i, source in enumerate(node.args) if isinstance(source, Node) and source.op == "get_attr")
    body: Any = node.args[at]
    inner = _graph_of(module, body)
    assert inner is not None
    return inner, list(node.args[at + 1 :])


def _is_region(node: Node) -> bool:
    name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
    if name == "wrap_with_autocast":
        _, _, enabled, *_ = node.args
        return not enabled
    return name == "wrap_with_set_grad_enabled"
