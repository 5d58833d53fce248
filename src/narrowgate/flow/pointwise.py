"""Rules for operations that treat every position alone: activations, arithmetic, casts."""

from __future__ import annotations

import contextlib
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from narrowgate.flow.analysis import Flow, wall_rule
from narrowgate.flow.borders import carries, through
from narrowgate.flow.state import Labels, Mask, State, Values, labelled, rounded, unlabelled
from narrowgate.flow.trace import is_in_place, op_name

POINTWISE = frozenset(
    """
    relu relu6 leaky_relu elu selu celu gelu silu mish hardtanh hardswish hardsigmoid hardshrink softshrink tanhshrink
    sigmoid tanh softplus softsign logsigmoid log_sigmoid threshold rrelu_with_noise
    add sub rsub mul div true_divide floor_divide remainder pow maximum minimum fmax fmin atan2 lerp addcmul addcdiv
    neg abs sign exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal sin cos tan asin acos atan sinh cosh
    asinh acosh atanh fmod hypot logaddexp logit sinc xlogy heaviside copysign float_power sgn
    erf erfc erfinv floor ceil round trunc frac clamp clamp_min clamp_max clip nan_to_num where masked_fill
    eq ne lt le gt ge logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor
    isnan isinf isfinite to _to_copy type_as clone contiguous detach alias lift_fresh_copy lift_fresh positive
    __and__ __or__ __xor__
    """.split()
)


def pointwise(flow: Flow, node: Node) -> None:
    """Channels keep their places; operands that carry channels along the same axis are coupled."""
    value = node.meta["val"]
    if not isinstance(value, Tensor):
        wall_rule(flow, node)
        return
    shape = tuple(value.shape)
    sources = {source: flow.reads(node, source) for source in node.all_input_nodes}
    states = {source: flow.state(read) for source, read in sources.items()}
    axes = {axis for state in states.values() if (axis := _axis_in(state, shape)) is not None}
    if len(axes) > 1:
        wall_rule(flow, node, "its operands carry channels along different axes")
        return
    axis = axes.pop() if axes else None
    size = 1 if axis is None else shape[axis]
    known = {source: _values_along(state, shape, axis) for source, state in states.items()}
    values = evaluate(node, known, size, flow.closed is None)
    if op_name(node).rstrip("_") == "div" and _is_positive(flow, node, node.args[1]):
        values = np.where(known[cast(Node, node.args[0])] == 0, 0.0, values)
    if len(sources) == 1 and carries(op_name(node).rstrip("_")):
        ((source, read),) = sources.items()
        values = through(flow, node, read, values, lambda table: _evaluate_table(node, source, table))
    if axis is None:
        state = unlabelled(shape, float(values[0]))
    else:
        state = labelled(shape, axis, _couple(flow, node, list(states.values()), shape, axis), values)

    def backward(live: Mask) -> None:
        needed = live & state.varies
        for source, read in sources.items():
            aligned = len(states[source].labels) == len(needed)
            flow.mark(read, needed if aligned else bool(needed.any()))

    flow.put(node, state, backward)


def _is_positive(flow: Flow, node: Node, source: Any) -> bool:
    """Whether what an operation reads has a floor above 0, as the length has by which F.normalize divides."""
    if not isinstance(source, Node):
        return False
    made = flow.reads(node, source)
    name = op_name(made).rstrip("_") if made.op == "call_function" else ""
    if name in ("expand", "expand_as"):
        return _is_positive(flow, made, made.args[0])
    if name not in ("clamp_min", "clamp") or len(made.args) != 2 or not isinstance(made.args[1], (int, float)):
        return False
    return bool(rounded(np.array([float(made.args[1])]), made.meta["val"].dtype)[0] > 0)


def _axis_in(state: State, shape: tuple[int, ...]) -> int | None:
    """Where an operand's channels are in the result, or None where they are broadcast or there are none."""
    if state.axis is None:
        return None
    axis = state.axis + len(shape) - len(state.shape)
    return axis if axis >= 0 and state.shape[state.axis] == shape[axis] else None


def _values_along(state: State, shape: tuple[int, ...], axis: int | None) -> Values:
    if _axis_in(state, shape) == axis and axis is not None:
        return state.values
    if state.axis is None or len(state.values) == 1:
        return state.values
    return np.array([np.nan])


def _couple(flow: Flow, node: Node, states: list[State], shape: tuple[int, ...], axis: int) -> Labels:
    """Tie the operands' labels; one that covers the axis without labels holds the others in place."""
    carriers = [state for state in states if _axis_in(state, shape) == axis]
    labels = carriers[0].labels
    for state in carriers[1:]:
        flow.tie(labels, state.labels)
    for state in states:
        own = axis - (len(shape) - len(state.shape))
        if own >= 0 and state.shape[own] == shape[axis] != 1 and _axis_in(state, shape) != axis:
            flow.wall(node, list(map(flow.resolve, node.all_input_nodes)), "an operand has fixed width")
            break
    return labels


def evaluate(node: Node, known: dict[Node, Values], size: int, final: bool = True) -> Values:
    """The operation on the known constants; NaN, varying, wherever any operand varies.

    ``final`` says whether numbers in the user's code stay what they are; in training a factor of 0 may grow.
    The mask is laid over the result by force, so an operation that swallows NaN (where, clamp, comparisons) is safe.
    """
    varying = np.zeros(size, bool)
    for values in known.values():
        varying = varying | np.isnan(values)
    result = np.full(size, np.nan)
    if not varying.all():
        # An operation that does not take float64 vectors, or gives complex ones, counts as varying.
        with contextlib.suppress(RuntimeError, TypeError, NotImplementedError):
            result[:] = _run(node, known)
        result[varying] = np.nan
    if op_name(node) in ("mul", "mul_"):  # 0 x anything finite is 0: a closed squeeze-excite input or layer scale
        for values in known.values():
            result[varying & (values == 0)] = 0.0
        if final and any(isinstance(arg, (int, float)) and arg == 0 for arg in node.args):
            result[varying] = 0.0
    return result


def _evaluate_table(node: Node, source: Node, table: Values) -> Values:
    return evaluate(node, {source: table.reshape(-1)}, table.size).reshape(table.shape)


def _run(node: Node, known: dict[Node, Values]) -> Values:
    def as_tensor(source: Node) -> Any:
        tensor = torch.from_numpy(np.ascontiguousarray(known[source]))
        val = source.meta.get("val")
        if not isinstance(val, Tensor):
            return tensor
        # A tensor without axes follows the precision of the others.
        return (tensor if val.dim() else tensor.reshape(())).to(val.dtype)

    args: Any = [_for_vectors(one) for one in map_arg(node.args, as_tensor)]
    kwargs: Any = map_arg({k: v for k, v in node.kwargs.items() if k not in ("device", "pin_memory")}, as_tensor)
    kwargs = {key: _for_vectors(one) for key, one in kwargs.items()}
    target: Any = node.target
    if is_in_place(node):
        args = (args[0].clone(), *args[1:])
    out = target(*args, **kwargs)
    if out.is_complex():
        raise TypeError("a complex number is no constant here")
    return np.asarray(out.double().cpu().numpy(), dtype=np.float64)


def _for_vectors(argument: Any) -> Any:
    """An argument as a vector can take it: channels_last is for images, and changes no number."""
    return torch.contiguous_format if isinstance(argument, torch.memory_format) else argument


RULES = dict.fromkeys(POINTWISE, pointwise)
