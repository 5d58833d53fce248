"""Which layers share their channels: what goes from one of them only if it goes from all, found by running the model.

A channel of a residual stream is written by every block of its stage, so that one gate has to rule over all of them if
the stream is to get narrower. Which layers those are is what the remover finds out anyway. Of layers one behind the
other, as an expansion and the depthwise layer behind it, one is enough: layers are left out one by one as long as as
many channels go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from narrowgate.flow.analysis import ClosedGates, Flow
from narrowgate.flow.copies import copy_structure
from narrowgate.flow.decide import CollapseError, Decision, components, decide
from narrowgate.flow.plan import plan_traced
from narrowgate.flow.rules import swept_by_head
from narrowgate.flow.state import PINNED, Labels
from narrowgate.flow.trace import ExampleInputs, Graph, Tracer, without_gc
from narrowgate.flow.training import pin_training_only
from narrowgate.flow.ungated import share_copy, ungated
from narrowgate.flow.unknown import Numbers, has_numbers, lacks_numbers
from narrowgate.flow.unproven import fill_vectors_, known_numbers
from narrowgate.groups import Bundle, Coupled
from narrowgate.sites import layers_of, refusals
from narrowgate.swap import has_gated_class, is_turned

_OUTPUT = "for the model's output"
_NOT_RUN = "the example inputs do not lead through it, or it can't be followed"
_WHOLE = "all of its channels go together, or none"


def coupled(model: nn.Module, example_inputs: ExampleInputs) -> Coupled:
    """A choice of gates for ``attach_gates_(model, groups=...)``: one for each channel that can go, whoever writes it.

    A layer whose channels are its own has a gate for each of them, as with ``groups="channels"``. Layers that write to
    one stream share theirs. Layers whose channels can't go, those of the model's outputs among them, have none. The
    model is not changed.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"coupled needs a model, an nn.Module that was built, got {model!r}")
    with without_gc():
        return _Search(*known_numbers(model, None), example_inputs).found()


def _with_shifts(plain: nn.Module, shift: float) -> nn.Module:
    """A copy with nothing to add in its layers, and this in its norms.

    With 0 a closed channel is zero, as with gates behind norms; with 1 it is a constant, as with gates before them.
    """
    copied = share_copy(plain)
    norms = [module for module in copied.modules() if isinstance(module, _NormBase)]
    for module, number in (*((layer, 0.0) for _, layer in layers_of(copied)), *((norm, shift) for norm in norms)):
        if (bias := module._parameters.get("bias")) is not None:
            module._parameters["bias"] = nn.Parameter(_filled(bias, number), bias.requires_grad)
        if (mean := module._buffers.get("running_mean")) is not None:
            module._buffers["running_mean"] = _filled(mean, 0.0)
    return copied


def _filled(like: torch.Tensor, number: float) -> torch.Tensor:
    device = like.device if has_numbers(like) else "cpu"
    return torch.full(like.shape, number, dtype=like.dtype, device=device)


@dataclass
class _Members:
    """Layers that share channels, and for each of them which one each of its outputs is: -1 for one that stays."""

    numbers: dict[str, tuple[int, ...]]

    @property
    def size(self) -> int:
        return max(max(numbers) for numbers in self.numbers.values()) + 1

    @property
    def alone(self) -> bool:
        """Whether this is one layer, each of whose channels goes by itself."""
        return len(self.numbers) == 1 and all(numbers == tuple(range(self.size)) for numbers in self.numbers.values())


class _Search:
    def __init__(self, model: nn.Module, numbers: Numbers | None, example_inputs: ExampleInputs) -> None:
        plain = _with_shifts(ungated(model), 0.0)
        self.numbers, self.example_inputs, self.tracer = numbers, example_inputs, Tracer()
        self.graph: Graph = self.tracer(plain, example_inputs)
        fill_vectors_(plain, numbers, self.graph, "drop")
        self.plain, self.shifted = plain, _with_shifts(plain, 1.0)
        self.first = {id(module): name for name, module in reversed(list(plain.named_modules()))}
        self.layers = dict(layers_of(plain))
        self.held: dict[str, str] = {}
        self.weights: dict[str, str] = {}
        flow = self._sweep({}, plain)
        norms = {self._name(flow, layer) for layer in flow.across}
        outputs = {name: labels for name, labels in self._outputs(flow).items() if name in self.layers or name in norms}
        self.layers |= {name: plain.get_submodule(name) for name in norms}
        self.refused = refusals(plain)
        self.held.update({name: self.refused.get(name, _NOT_RUN) for name in self.layers.keys() - outputs.keys()})
        self.all = self._bundled(flow, outputs)

    def found(self) -> Coupled:
        """The smallest sets of layers that take as many channels along as all would."""
        left = {}
        for key, members in enumerate(self.all):
            can = {name: n for name, n in members.numbers.items() if self._can(name)}
            if members.size < 2 or not can:
                self._hold(members, _WHOLE if can else "no layer that writes these channels can have a gate")
            else:
                left[key] = _Members(can)
        goal = self._gone(left, self.plain)
        held = {key: left.pop(key) for key in list(left) if not goal[key]}
        because = self._closed_on(held, self.plain) if held else (None, {})
        for key in held:
            self._hold(self.all[key], f"these channels stay: {self._why(*because, key)}")
        goals = {model: self._gone(left, model) for model in (self.plain, self.shifted)}
        for turn in range(max((len(members.numbers) for members in left.values()), default=0)):
            left = self._without(turn, left, goals)
        self._check(left)
        for key, members in left.items():
            for name in self.all[key].numbers.keys() - members.numbers.keys():
                self.held[name] = f"its channels go with {', '.join(members.numbers)}"
        alone = [next(iter(members.numbers)) for members in left.values() if members.alone]
        bundles = [Bundle(members.size, dict(members.numbers)) for members in left.values() if not members.alone]
        order = {name: i for i, name in enumerate(self.layers)}
        return Coupled(
            tuple(sorted(bundles, key=lambda bundle: order[bundle.label])),
            tuple(sorted(alone, key=order.__getitem__)),
            {name: self.held[name] for name in self.layers if name in self.held},
        )

    def _sweep(self, closed: ClosedGates, plain: nn.Module) -> Flow:
        """The sweeps as in training, where only closed gates count; constants are dropped, as gates may come later."""
        flow = swept_by_head(self.graph, plain, "drop", closed, self.numbers, narrow_norms=True)
        pin_training_only(flow, plain, self.example_inputs, self.tracer)
        return flow

    def _name(self, flow: Flow, layer: str) -> str:
        """A layer's first name, where it has several."""
        return self.first.get(id(self.plain.get_submodule(layer)), layer) if layer in flow.modules else layer

    def _outputs(self, flow: Flow) -> dict[str, Labels]:
        """What is known of the outputs of each layer, and of each norm that may be narrowed, as they run."""
        places = [(flow.order[mixer.node], mixer.layer, mixer.weight, mixer.output.labels) for mixer in flow.mixers]
        places += [(flow.order[norm.node], layer, norm.weight, norm.labels) for layer, norm in flow.across.items()]
        found = {}
        for _, layer, weight, labels in sorted(places, key=lambda place: place[0]):
            name = self._name(flow, layer)
            found[name], self.weights[name] = labels, weight
        return found

    def _bundled(self, flow: Flow, outputs: dict[str, Labels]) -> list[_Members]:
        """Layers that share classes of channels, together."""
        root = components(flow.label_count, flow.edges)
        reasons = {int(root[PINNED]): "for fixed places"}
        for labels, why in flow.pinned:
            for one in np.unique(root[labels]).tolist():
                reasons[one] = why if reasons.get(one) != _OUTPUT else _OUTPUT
        bundles: list[tuple[set[int], list[str]]] = []
        for name, labels in outputs.items():
            classes = set(root[labels].tolist()) - reasons.keys()
            if not classes:
                self.held[name] = _said(reasons, root[labels])
                continue
            apart, together = [], [name]
            for others, members in bundles:
                if classes & others:
                    classes, together = classes | others, [*members, *together]
                else:
                    apart.append((others, members))
            bundles = [*apart, (classes, together)]
        found, order = [], {name: i for i, name in enumerate(outputs)}
        for _, members in bundles:
            number: dict[int, int] = {}
            members.sort(key=order.__getitem__)
            found.append(_Members({name: _numbered(root[outputs[name]], reasons, number) for name in members}))
        return found

    def _can(self, name: str) -> bool:
        return name not in self.refused and has_gated_class(self.layers[name])

    def _as_row(self, name: str) -> str:
        """What a plan calls a layer: by its weight."""
        return self.weights[name].removesuffix(".weight")

    def _hold(self, members: _Members, why: str) -> None:
        self.held.update(dict.fromkeys(members.numbers, why))

    def _gone(self, left: dict[int, _Members], model: nn.Module) -> dict[int, int]:
        """How many outputs of their layers go if every second channel of each bundle is closed on these."""
        decision, outputs = self._closed_on(left, model)
        if decision is None:
            return dict.fromkeys(left, 0)
        gone = {name: int((~decision.kept[labels]).sum()) for name, labels in outputs.items()}
        return {key: sum(gone[name] for name in self.all[key].numbers) for key in left}

    def _closed_on(self, left: dict[int, _Members], model: nn.Module) -> tuple[Decision | None, dict[str, Labels]]:
        """What would stay, and what is known of the layers' outputs; nothing is decided where all would collapse."""
        flow = self._sweep(self._closed(left.values()), model)
        try:
            return decide(flow), self._outputs(flow)
        except CollapseError:
            return None, self._outputs(flow)

    def _closed(self, several: Iterable[_Members]) -> ClosedGates:
        closed: ClosedGates = {}
        for members in several:
            for name, numbers in members.numbers.items():
                rows = np.array([number % 2 == 1 and number >= 0 for number in numbers])
                closed[self.weights[name]] = (None, rows) if is_turned(self.layers[name]) else (rows, None)
        return closed

    def _why(self, decision: Decision | None, outputs: dict[str, Labels], key: int) -> str:
        """What keeps the channels of a bundle for the most part."""
        labels = [outputs[name] for name in self.all[key].numbers]
        whys = [] if decision is None else [str(why) for each in labels for why in decision.why[each] if why != "used"]
        return Counter(whys).most_common(1)[0][0] if whys else "what writes them is more than these layers"

    def _without(
        self, turn: int, left: dict[int, _Members], goals: dict[nn.Module, dict[int, int]]
    ) -> dict[int, _Members]:
        """Leave out one layer of each bundle, where as many channels go all the same, with shifts and without."""
        tried = {}
        for key, members in left.items():
            names = list(self.all[key].numbers)
            name = names[turn] if turn < len(names) else ""
            fewer = {n: numbers for n, numbers in members.numbers.items() if n != name}
            if fewer and len(fewer) < len(members.numbers) and _Members(fewer).size == members.size:
                tried[key] = _Members(fewer)
        if not tried:
            return left
        for model, goal in goals.items():
            gone = self._gone({**left, **tried}, model)
            tried = {key: members for key, members in tried.items() if gone[key] >= goal[key]}
        return {**left, **tried}

    @torch.no_grad()
    def _check(self, left: dict[int, _Members]) -> None:
        """Drop what a plan keeps for reasons that only show when channels really go, such as sizes in the code."""
        if lacks_numbers(self.plain) or not left:
            return
        zeroed = copy_structure(self.plain, {})
        for members in left.values():
            for name, numbers in members.numbers.items():
                layer = zeroed.get_submodule(name)
                where = [i for i, number in enumerate(numbers) if number % 2 == 1 and number >= 0]
                for kind, axis in (("weight", int(is_turned(layer))), ("bias", 0)):
                    if (tensor := layer._parameters.get(kind)) is not None:
                        tensor.index_fill_(axis, torch.tensor(where, dtype=torch.long, device=tensor.device), 0.0)
        try:
            made = plan_traced(zeroed, self.example_inputs, self.tracer, "scatter", "drop", 1, False)
        except CollapseError:
            return
        rows_of = {row.layer: row for row in made.rows}
        for key in list(left):
            found = [rows_of[name] for name in map(self._as_row, self.all[key].numbers) if name in rows_of]
            if all(row.kept == row.total for row in found):
                why = next((row.why.partition(" ")[2] for row in found if row.why), "the code counts on them")
                self._hold(self.all[key], f"these channels stay: {why}")
                del left[key]


def _numbered(roots: Labels, reasons: dict[int, str], number: dict[int, int]) -> tuple[int, ...]:
    """Which of its bundle's channels each output of a layer is; -1 for one that stays."""
    return tuple(-1 if one in reasons else number.setdefault(one, len(number)) for one in roots.tolist())


def _said(reasons: dict[int, str], roots: Labels) -> str:
    why = Counter(reasons[one] for one in roots.tolist()).most_common(1)[0][0]
    return "its outputs are the model's" if why == _OUTPUT else f"its channels stay: {why}"
