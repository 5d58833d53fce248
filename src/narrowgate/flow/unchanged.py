"""Which results in a graph are provably others: sums with zeros, activations of what was activated before."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import Node

from narrowgate.flow.analysis import Flow
from narrowgate.flow.movement import arg, shape_of
from narrowgate.flow.state import State
from narrowgate.flow.trace import is_in_place, op_name

_DROPOUTS = frozenset("dropout feature_dropout alpha_dropout".split())
_SAME_VALUE = frozenset("clone contiguous alias lift_fresh".split())
_RESHAPES = frozenset("view reshape flatten unflatten squeeze unsqueeze _unsafe_view".split())
_NEVER_NEGATIVE = frozenset("relu relu6 sigmoid hardsigmoid softmax _softmax abs".split())
_KEEP_SIGN = frozenset("max_pool2d max_pool1d max_pool3d avg_pool2d adaptive_avg_pool2d mean".split())
# A module of these alone gives what is as large as what it gets at every size, if it does at one.
_ANY_SIZE = frozenset(
    """linear addmm matmul bmm mm scaled_dot_product_attention softmax _softmax add mul div sub neg
    relu relu6 gelu silu hardswish sigmoid tanh leaky_relu mish softplus hardtanh elu hardsigmoid
    layer_norm batch_norm group_norm rms_norm _native_batch_norm_legit_no_training dropout
    view reshape permute transpose t contiguous clone flatten unflatten unsqueeze squeeze unbind select chunk split
    slice expand getitem alias detach to _to_copy type_as""".split()
)


def alike(one: Node, other: Node) -> bool:
    """Whether two results have one shape and precision."""
    first, second = one.meta.get("val"), other.meta.get("val")
    return isinstance(first, Tensor) and isinstance(second, Tensor) and _looks(first) == _looks(second)


def _looks(value: Tensor) -> tuple[Any, ...]:
    return tuple(value.shape), value.dtype


def is_zero(flow: Flow, node: Node) -> bool:
    state = flow.states.get(node)
    return isinstance(state, State) and bool((state.values == 0).all())


def keeps_size(node: Node) -> bool:
    """Whether what an operation gives is as large as what it gets whatever that is, if it is so once."""
    name = _name(node)
    if name not in ("conv1d", "conv2d", "conv3d"):
        return name in _ANY_SIZE
    weight = node.args[1]
    assert isinstance(weight, Node)
    kernel = shape_of(weight)[2:]
    steps, paddings, gaps = (
        _each(arg(node, i, key, default), kernel)
        for i, key, default in ((3, "stride", 1), (4, "padding", 0), (5, "dilation", 1))
    )
    return all(s == 1 and 2 * p == g * (k - 1) for k, s, p, g in zip(kernel, steps, paddings, gaps, strict=True))


def _each(numbers: Any, kernel: tuple[int, ...]) -> list[Any]:
    """A convolution's numbers, one for each axis of its kernel."""
    several = [numbers] if isinstance(numbers, (int, str)) else list(numbers)
    return several * len(kernel) if len(several) == 1 else several


def _name(node: Node) -> str:
    return op_name(node).rstrip("_") if is_in_place(node) else op_name(node)


def origin(flow: Flow, node: Node) -> Node:
    """The first result on the way to this one that holds the same elements in the same order, in any shape."""
    while (before := _same_as(flow, node)) is not None:
        node = before
    return node


def _same_as(flow: Flow, node: Node) -> Node | None:
    """What an operation was given, if it provably gives the same elements in the same order."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return None
    name, first = _name(node), flow.reads(node, node.args[0])
    if name in ("add", "sub"):
        return _but_for_zeros(flow, node, first, name)
    if name in _DROPOUTS:  # in eval mode; one that does something in training would be missed there
        return first if float(arg(node, 1, "p", 1.0)) == 0 else None
    if name in _SAME_VALUE:
        return first if alike(first, node) else None
    if name in _RESHAPES:
        return first
    if name in ("relu", "relu6", "hardtanh"):
        source = origin(flow, first)
        return source if _has_no_effect(flow, node, source) else None
    return None


def _but_for_zeros(flow: Flow, node: Node, first: Node, name: str) -> Node | None:
    if len(node.args) < 2 or not isinstance(node.args[1], Node):
        return None
    second, alpha = flow.reads(node, node.args[1]), arg(node, 2, "alpha", 1)
    if is_zero(flow, second) and alike(first, node):
        return first
    return second if name == "add" and alpha == 1 and is_zero(flow, first) and alike(second, node) else None


def _has_no_effect(flow: Flow, node: Node, source: Node) -> bool:
    """Whether an activation changes nothing of what was activated before."""
    if _name(node) == "relu":
        return _is_never_negative(flow, source)
    if source.op != "call_function" or _name(source) != _name(node):
        return False
    return all(arg(node, i, key) == arg(source, i, key) for i, key in ((1, "min_val"), (2, "max_val")))


def _is_never_negative(flow: Flow, node: Node) -> bool:
    if node.op != "call_function":
        return False
    name = _name(node)
    if name in _NEVER_NEGATIVE:
        return True
    if name == "hardtanh":
        return float(arg(node, 1, "min_val", -1)) >= 0
    if name in _KEEP_SIGN | _SAME_VALUE | _RESHAPES | _DROPOUTS:
        divided = name == "avg_pool2d" and arg(node, 6, "divisor_override") is not None
        return not divided and _is_never_negative(flow, flow.reads(node, node.args[0]))
    terms: list[Any] = list(node.args[0]) if name == "cat" else list(node.args[:2])  # type: ignore[arg-type]
    if name not in ("add", "cat") or node.kwargs.get("alpha", 1) != 1:
        return False
    return all(
        _is_never_negative(flow, flow.reads(node, term)) if isinstance(term, Node) else float(term) >= 0
        for term in terms
    )
