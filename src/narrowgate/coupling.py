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
from narrowgate.flow.rules import RULES
from narrowgate.flow.state import PINNED, Labels
from narrowgate.flow.trace import ExampleInputs, Graph, Tracer, without_gc
from narrowgate.flow.training import pin_training_only
from narrowgate.flow.ungated import ungated
from narrowgate.flow.unknown import lacks_numbers
from narrowgate.groups import Bundle, Coupled
from narrowgate.sites import layers_of, refusals
from narrowgate.swap import has_gated_class, is_conv1d

_OUTPUT = "for the model's output"
_NOT_RUN = "the example inputs do not lead through it"
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
        return _Search(_without_shifts(ungated(model)), example_inputs).found()


def _without_shifts(plain: nn.Module) -> nn.Module:
    """The same with nothing to add anywhere, so that a closed channel is zero, wherever its gate will be."""
    layers = [layer for _, layer in layers_of(plain)]
    for module in (*layers, *(norm for norm in plain.modules() if isinstance(norm, _NormBase))):
        if (bias := module._parameters.get("bias")) is not None:
            module._parameters["bias"] = nn.Parameter(torch.zeros_like(bias), bias.requires_grad)
        if (mean := module._buffers.get("running_mean")) is not None:
            module._buffers["running_mean"] = torch.zeros_like(mean)
    return plain


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
    def __init__(self, plain: nn.Module, example_inputs: ExampleInputs) -> None:
        self.plain, self.example_inputs, self.tracer = plain, example_inputs, Tracer()
        self.graph: Graph = self.tracer(plain, example_inputs)
        self.layers = dict(layers_of(plain))
        self.held: dict[str, str] = {}
        flow = self._sweep({})
        outputs = {
            name: labels for name, labels in _outputs(flow).items() if name in self.layers or name in flow.across
        }
        self.layers |= {name: plain.get_submodule(name) for name in flow.across}
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
        goal = self._gone(left)
        held = {key: left.pop(key) for key in list(left) if not goal[key]}
        because = self._closed_on(held) if held else (None, {})
        for key in held:
            self._hold(self.all[key], f"these channels stay: {self._why(*because, key)}")
        for turn in range(max((len(members.numbers) for members in left.values()), default=0)):
            left = self._without(turn, left, goal)
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

    def _sweep(self, closed: ClosedGates) -> Flow:
        """The sweeps as in training, where only closed gates count; constants are dropped, as gates may come later."""
        flow = Flow(self.graph, self.plain, "drop", closed, narrow_norms=True).run(RULES)
        if flow.heads:  # attention loses whole heads or nothing; the first sweep can't know that some would be dead
            by_head = {view: axis for heads in flow.heads for view, axis in heads.views.items()}
            flow = Flow(self.graph, self.plain, "drop", closed, by_head, narrow_norms=True).run(RULES)
        pin_training_only(flow, self.plain, self.example_inputs, self.tracer)
        return flow

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

    def _hold(self, members: _Members, why: str) -> None:
        self.held.update(dict.fromkeys(members.numbers, why))

    def _gone(self, left: dict[int, _Members]) -> dict[int, int]:
        """How many outputs of their layers go if every second channel of each bundle is closed on these."""
        decision, outputs = self._closed_on(left)
        if decision is None:
            return dict.fromkeys(left, 0)
        gone = {name: int((~decision.kept[labels]).sum()) for name, labels in outputs.items()}
        return {key: sum(gone[name] for name in self.all[key].numbers) for key in left}

    def _closed_on(self, left: dict[int, _Members]) -> tuple[Decision | None, dict[str, Labels]]:
        """What would stay, and what is known of the layers' outputs; nothing is decided where all would collapse."""
        flow = self._sweep(self._closed(left.values()))
        try:
            return decide(flow), _outputs(flow)
        except CollapseError:
            return None, _outputs(flow)

    def _closed(self, several: Iterable[_Members]) -> ClosedGates:
        closed: ClosedGates = {}
        for members in several:
            for name, numbers in members.numbers.items():
                rows = np.array([number % 2 == 1 and number >= 0 for number in numbers])
                closed[f"{name}.weight"] = (None, rows) if _is_turned(self.layers[name]) else (rows, None)
        return closed

    def _why(self, decision: Decision | None, outputs: dict[str, Labels], key: int) -> str:
        """What keeps the channels of a bundle for the most part."""
        labels = [outputs[name] for name in self.all[key].numbers]
        whys = [] if decision is None else [str(why) for each in labels for why in decision.why[each] if why != "used"]
        return Counter(whys).most_common(1)[0][0] if whys else "what writes them is more than these layers"

    def _without(self, turn: int, left: dict[int, _Members], goal: dict[int, int]) -> dict[int, _Members]:
        """Leave out one layer of each bundle, where as many channels go all the same."""
        tried = {}
        for key, members in left.items():
            names = list(self.all[key].numbers)
            name = names[turn] if turn < len(names) else ""
            fewer = {n: numbers for n, numbers in members.numbers.items() if n != name}
            if fewer and len(fewer) < len(members.numbers) and _Members(fewer).size == members.size:
                tried[key] = _Members(fewer)
        if not tried:
            return left
        gone = self._gone({**left, **tried})
        return {key: tried[key] if key in tried and gone[key] >= goal[key] else left[key] for key in left}

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
                for kind, axis in (("weight", int(_is_turned(layer))), ("bias", 0)):
                    if (tensor := layer._parameters.get(kind)) is not None:
                        tensor.index_fill_(axis, torch.tensor(where, dtype=torch.long, device=tensor.device), 0.0)
        try:
            made = plan_traced(zeroed, self.example_inputs, self.tracer, "scatter", "drop", 1, False)
        except CollapseError:
            return
        rows_of = {row.layer: row for row in made.rows}
        for key in list(left):
            found = [rows_of[name] for name in self.all[key].numbers if name in rows_of]
            if all(row.kept == row.total for row in found):
                why = next((row.why.partition(" ")[2] for row in found if row.why), "the code counts on them")
                self._hold(self.all[key], f"these channels stay: {why}")
                del left[key]


def _outputs(flow: Flow) -> dict[str, Labels]:
    """What is known of the outputs of each layer, and of each norm that may be narrowed, in the order of their runs."""
    places = [(flow.order[mixer.node], mixer.layer, mixer.output.labels) for mixer in flow.mixers]
    places += [(flow.order[norm.node], layer, norm.labels) for layer, norm in flow.across.items()]
    return {layer: labels for _, layer, labels in sorted(places, key=lambda place: place[0])}


def _numbered(roots: Labels, reasons: dict[int, str], number: dict[int, int]) -> tuple[int, ...]:
    """Which of its bundle's channels each output of a layer is; -1 for one that stays."""
    return tuple(-1 if one in reasons else number.setdefault(one, len(number)) for one in roots.tolist())


def _said(reasons: dict[int, str], roots: Labels) -> str:
    why = Counter(reasons[one] for one in roots.tolist()).most_common(1)[0][0]
    return "its outputs are the model's" if why == _OUTPUT else f"its channels stay: {why}"


def _is_turned(layer: nn.Module) -> bool:
    return bool(getattr(layer, "transposed", False)) or is_conv1d(layer)
