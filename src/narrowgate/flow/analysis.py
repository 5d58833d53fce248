"""Two sweeps over a graph: constants forward, liveness backward, and who is coupled with whom on the way."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.nn.modules.batchnorm import _NormBase

from narrowgate.flow.couplings import Couplings
from narrowgate.flow.state import PINNED, Labels, Mask, Spread, State, Values, labelled, unlabelled
from narrowgate.flow.trace import Graph, in_mode, is_in_place, layer_of, op_name
from narrowgate.flow.unknown import Numbers, open_parts, slim
from narrowgate.gates import Gate

Sums = dict[int, tuple[dict[int, float], float]]
"""Channels that are sums of others: how much of which, and a constant."""

Backward = Callable[[Mask], None]
ClosedGates = dict[str, tuple[Mask | None, Mask | None]]
"""While training: by weight, which of its outputs and inputs a closed gate holds at zero. Other zeros may yet learn."""


@dataclass(frozen=True)
class Wall:
    """An operation that keeps its inputs at full width: where, which, and why."""

    layer: str
    op: str
    why: str


@dataclass
class Mixer:
    """A convolution or linear layer: the operations whose weights are cut along two axes.

    ``foldable`` says whether a constant input channel acts like a bias (no padding); ``needed_rows`` are the output
    channels that vary and matter, ``live_columns`` the input channels those read with a non-zero weight, ``zero_rows``
    the output channels whose weight is zero already. ``stand_in`` is what an output channel that is not needed has to
    be, wherever it stays: its constant, or of what varies towards the border only the number inside; else NaN.
    ``merged`` are input channels that it reads as sums of others.
    """

    node: Node
    layer: str
    weight: str
    bias: str | None
    groups: int
    out_axis: int
    inputs: State
    output: State
    foldable: bool
    shared: bool
    zero_rows: Mask
    stand_in: Values
    needed_rows: Mask = field(default_factory=lambda: np.zeros(0, bool))
    live_columns: Mask = field(default_factory=lambda: np.zeros(0, bool))
    merged: Sums = field(default_factory=dict)


@dataclass(frozen=True)
class Across:
    """A LayerNorm or GroupNorm that can do with fewer channels if it counts those that are gone.

    ``axis`` is where its module has the channels, in ``groups`` groups; ``values`` are the constants among its inputs.
    """

    node: Node
    weight: str
    labels: Labels
    values: Values
    axis: int
    groups: int


@dataclass
class Heads:
    """One use of attention: the views that made its heads, by axis; how wide they are; which of them are read."""

    node: Node
    views: dict[Node, int]
    labels: Labels | None
    size: int
    needed: Mask


class Flow(Couplings):
    """Everything the sweeps learn about one graph."""

    def __init__(
        self,
        graph: Graph,
        model: nn.Module,
        constants: str = "exact",
        closed: ClosedGates | None = None,
        by_head: dict[Node, int] | None = None,
        numbers: Numbers | None = None,
        narrow_norms: bool = False,
    ) -> None:
        super().__init__(model)
        self.graph = graph
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.by_head = by_head or {}  # views whose channels go along this axis, not along the innermost
        self.closed = closed
        self.frozen_norms = set() if closed is None else norms_left_in_eval_mode(model)
        self.numbers = numbers or Numbers(model)
        self.numbers.missing.update(graph.written.values())  # they are others in the next forward pass
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.constants = constants
        self.uses = graph.uses()
        self.states: dict[Node, State | list[State]] = {}
        self.spreads: dict[Node, Spread] = {}
        self.borders: dict[Node, Values] = {}  # channels that depend on the place only; see borders.py
        self.live: dict[Node, Any] = {}
        self.mixers: list[Mixer] = []
        self.walls: list[Wall] = []
        self.splits: list[tuple[Node, State]] = []  # views that take the channel axis apart
        self.parts: list[tuple[Node, Labels, int]] = []  # equal parts of a channel axis: which channels, how many each
        self.heads: list[Heads] = []
        self.whole: set[str] = set()  # layers that the scatter layout must leave whole
        self.narrow_norms = narrow_norms  # whether norms across channels may lose some
        self.across: dict[str, Across] = {}  # those that may, by layer
        self.bare_norms: dict[str, Labels] = {}  # norms without parameters, by layer
        self.idle: set[str] = set()  # modules that are gone from what is replayed
        self.seen_in_training = True  # whether training mode, as far as it matters, does what this graph does
        self.replayed: tuple[dict[bool, list[Any]], str] | None = None
        self._backward: dict[Node, Backward] = {}
        self._replaced: dict[Node, Node] = {}
        self._read_as: dict[Node, dict[Node, Node]] = {}

    # -- walls and zeros ---------------------------------------------------------------------------------------------
    def wall(self, node: Node, inputs: list[Node], why: str) -> None:
        """Keep every input of an operation at full width, and say so if that costs anything."""
        op, layer = op_name(node), layer_of(node)
        costs = False
        for source in inputs:
            for state in self._all_states(source):
                if state.axis is not None and (state.labels != PINNED).any():
                    self.pin(state.labels, f"for {op} in {layer}")
                    costs = True
        if costs:
            self.walls.append(Wall(layer, op, why))

    def nonzero(self, weight: str) -> Mask:
        """Which parts (first axis, second axis) of a weight can be other than 0; in training, all but closed ones."""
        tensor = self.tensors[weight].detach()
        if self.closed is None and weight not in self.numbers.missing:
            rows, columns, *kernel = tensor.shape
            pattern: Mask = (tensor != 0).reshape(rows, columns, math.prod(kernel)).any(2).cpu().numpy()
            return slim(pattern) if weight in self.numbers.found else pattern
        closed = self.numbers.zeros(weight) if self.closed is None else self.closed.get(weight, (None, None))
        return open_parts(tuple(tensor.shape[:2]), *closed)

    def can_be_zero(self, name: str) -> bool:
        """Whether zeros of a scale are final: after training, or where a linear gate says so."""
        return self.closed is None or name in self.closed

    # -- states ------------------------------------------------------------------------------------------------------
    def resolve(self, node: Node) -> Node:
        """The operation that last wrote this tensor."""
        while node in self._replaced:
            node = self._replaced[node]
        return node

    def state(self, node: Node) -> State:
        """What is known of a tensor."""
        state = self._look_up(self.resolve(node))
        assert isinstance(state, State), f"{node} is a tuple"
        return state

    def _look_up(self, node: Node) -> State | list[State]:
        if node not in self.states:
            name = self.graph.tensors[node]
            with self.numbers.lent({name}, self.tensors, self.modules[""]):
                self.states[node] = self._raw(name)
        return self.states[node]

    def _all_states(self, node: Node) -> list[State]:
        state = self._look_up(node)
        return state if isinstance(state, list) else [state]

    def put(self, node: Node, state: State | list[State], backward: Backward) -> None:
        """Record an operation's result and how liveness goes back through it."""
        self.states[node] = state
        self._backward[node] = backward

    def mark(self, node: Node, mask: Mask | bool) -> None:
        """Say that positions of a tensor are read by something that matters."""
        if node not in self.states:
            return
        live, state = self.live[node], self.states[node]
        for one, one_state in zip(live, state, strict=True) if isinstance(state, list) else [(live, state)]:
            one |= mask if np.ndim(mask) == 0 or len(one) == len(mask) else np.any(mask)  # type: ignore[arg-type]
            assert len(one) == len(one_state.labels)
        if node in self.spreads and isinstance(state, State):
            fits = np.ndim(mask) == 0 or len(state.labels) == len(mask)  # type: ignore[arg-type]
            self.spreads[node].mark(self.spreads[node].touched(state.axis, mask if fits else bool(np.any(mask))))

    # -- the sweeps --------------------------------------------------------------------------------------------------
    def run(self, rules: dict[str, Callable[[Flow, Node], None]]) -> Flow:
        """Sweep forward through all operations, then backward from the outputs."""
        order = [node for node in self.graph.nodes if node.op != "output"]
        for node in order:
            if node.op == "call_function":
                self._step(node, rules)
            else:
                self._start(node)
        for node in self.graph.outputs:
            last = self.resolve(node)
            for state in self._all_states(last):
                self.pin(state.labels, "for the model's output")
        for node, name in self.graph.written.items():
            self._couple_with_buffer(self.state(node), name)
        self.live = {
            node: [np.zeros(len(s.labels), bool) for s in state]
            if isinstance(state, list)
            else np.zeros(len(state.labels), bool)
            for node, state in self.states.items()
        }
        for node in (*self.graph.outputs, *self.graph.written):
            self.mark(self.resolve(node), True)
        for node in reversed(order):
            if node in self._backward:
                self._backward[node](self.live[node])
        return self

    def _step(self, node: Node, rules: dict[str, Callable[[Flow, Node], None]]) -> None:
        # Arguments are resolved now: a later in-place operation must not change what this one read.
        self._read_as[node] = {source: self.resolve(source) for source in node.all_input_nodes}
        name = op_name(node).rstrip("_") if is_in_place(node) else op_name(node)
        rule = rules.get(name)
        if rule is None:
            wall_rule(self, node)
        else:
            names = {self.graph.tensors[source] for source in node.all_input_nodes if source in self.graph.tensors}
            with self.numbers.lent(names, self.tensors, self.modules[""]):
                rule(self, node)
        if is_in_place(node) and isinstance(node.args[0], Node):
            self._replaced[self.resolve(node.args[0])] = node

    def _couple_with_buffer(self, state: State, name: str) -> None:
        """What is written to a buffer is as wide as the buffer."""
        for axis in range(self.tensors[name].dim()):
            if axis == state.axis:
                self.tie(state.labels, self.labels_of(name, axis))
            else:
                self.pin(self.labels_of(name, axis), f"for what is written to {name}")

    def reads(self, node: Node, source: Any) -> Node:
        """The tensor an operation really read when it named this argument."""
        assert isinstance(source, Node)
        return self._read_as[node][source]

    def _start(self, node: Node) -> None:
        if node not in self.graph.tensors:  # parameters are looked at when something reads them as tensors
            value = node.meta.get("val")
            self.states[node] = unlabelled(tuple(value.shape) if isinstance(value, Tensor) else ())

    def _raw(self, name: str) -> State:
        """A parameter read as an ordinary tensor: labelled along its one long axis, else where channels usually are."""
        tensor = self.tensors[name].detach()
        shape = tuple(tensor.shape)
        long = [axis for axis, size in enumerate(shape) if size > 1]
        if not long or not tensor.numel():
            known = tensor.numel() == 1 and self._is_final(name)
            return unlabelled(shape, float(tensor.reshape(-1)[0]) if known else float("nan"))
        axis = long[0] if len(long) == 1 else (1 if len(shape) == 4 else len(shape) - 1)
        for other in long:
            if other != axis:
                self.pin(self.labels_of(name, other), f"for a direct use of {name}")
        if not self._is_final(name):
            return labelled(shape, axis, self.labels_of(name, axis), np.full(shape[axis], np.nan))
        rows = tensor.movedim(axis, 0).reshape(shape[axis], -1).double()
        same = (rows == rows[:, :1]).all(1)
        values = torch.where(same, rows[:, 0], torch.full_like(rows[:, 0], float("nan"))).cpu().numpy()
        return labelled(shape, axis, self.labels_of(name, axis), values)

    def _is_final(self, name: str) -> bool:
        """Whether the numbers of a tensor are known and stay.

        In training a parameter learns, and any loop may set a buffer, such as the factor of a branch that it fades in.
        """
        tensor = self.tensors[name]
        if name in self.numbers.missing or tensor.is_complex():
            return False
        return self.closed is None or isinstance(self.modules[name.rpartition(".")[0]], Gate)


def norms_left_in_eval_mode(model: nn.Module) -> set[str]:
    """Norms that keep their running statistics while the model trains: set so by hand, or by its own ``train``."""
    norms = {
        name: module for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, _NormBase)
    }
    frozen = {name for name, norm in norms.items() if model.training and not norm.training}
    with in_mode(model, True):
        return frozen | {name for name, norm in norms.items() if not norm.training}


def wall_rule(flow: Flow, node: Node, why: str = "no rule for this operation") -> None:
    """The rule of every operation without one: full width before and after, everything varies, everything matters."""
    sources = [flow.reads(node, source) for source in node.all_input_nodes]
    flow.wall(node, sources, why)
    value = node.meta.get("val")
    state: State | list[State]
    if isinstance(value, (tuple, list)):
        state = [unlabelled(tuple(v.shape)) if isinstance(v, Tensor) else unlabelled(()) for v in value]
    else:
        state = unlabelled(tuple(value.shape) if isinstance(value, Tensor) else ())

    def backward(live: Any) -> None:
        if any(np.any(one) for one in live):
            for source in sources:
                flow.mark(source, True)

    flow.put(node, state, backward)
