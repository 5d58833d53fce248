"""What a model costs, as values that print as tables."""

from __future__ import annotations

from dataclasses import dataclass

from narrowgate.measure.tables import change, share, short, table


@dataclass(frozen=True)
class Layer:
    """One layer's costs for one sample; ``calls`` is how often it ran."""

    name: str
    kind: str
    output_shape: tuple[int, ...] | None
    parameters: int
    gates: int
    multiply_adds: int
    activations: int
    calls: int


@dataclass(frozen=True)
class Uncounted:
    """An operation without a formula, how often it ran and in which layers."""

    op: str
    calls: int
    layers: tuple[str, ...]


@dataclass(frozen=True)
class Summary:
    """What a model costs for one sample, layer by layer; print it for a table."""

    model: str
    inputs: str
    layers: tuple[Layer, ...]
    uncounted: tuple[Uncounted, ...]

    @property
    def parameters(self) -> int:
        """All parameters but the gates', tied ones once."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def gates(self) -> int:
        """Parameters that gates added; 0 for linear gates, which are BatchNorm's own scales."""
        return sum(layer.gates for layer in self.layers)

    @property
    def multiply_adds(self) -> int:
        """Multiplications with an addition; the paper calls one of these a FLOP, other authors two."""
        return sum(layer.multiply_adds for layer in self.layers)

    @property
    def activations(self) -> int:
        """Elements that all listed layers compute."""
        return sum(layer.activations for layer in self.layers)

    @property
    def product_activations(self) -> int:
        """Elements that multiply-adds compute, without norms and embeddings: "activations" in RegNet, fvcore, timm."""
        return sum(layer.activations for layer in self.layers if layer.multiply_adds)

    def __str__(self) -> str:
        header = ["layer", "kind", "output shape", "parameters", "multiply-adds", "activations"]
        rows = [_cells(layer) for layer in self.layers]
        total = ["total", "", "", f"{self.parameters:,}", f"{self.multiply_adds:,}", f"{self.activations:,}"]
        if self.gates:
            header.append("gates")
            for row, layer in zip(rows, self.layers, strict=True):
                row.append(_count(layer.gates))
            total.append(f"{self.gates:,}")
        return "\n".join([self._title(), table(header, rows, total, 3), *self._notes()])

    def _title(self) -> str:
        return (
            f"{self.model}: {short(self.parameters)} parameters, {short(self.multiply_adds)} multiply-adds, "
            f"{short(self.activations)} activations for one sample ({self.inputs})"
        )

    def _notes(self) -> list[str]:
        notes = []
        if any(layer.output_shape is None for layer in self.layers):
            notes.append("not called: unused in eval mode, or the module around it uses its weights and has the costs")
        if any(layer.calls > 1 for layer in self.layers):
            notes.append("x2, x3, ...: the layer ran that often; its costs are for all of them")
        if self.uncounted:
            notes.append("not counted, for want of a formula:")
            notes += [f"  {each.op} x{each.calls} in {_some(each.layers)}" for each in self.uncounted]
        return notes


def compare(before: Summary, after: Summary) -> str:
    """A table of two summaries: each layer's costs before -> after, layers that only one has, and totals."""
    header = ["layer", "kind", "output shape", "parameters", "multiply-adds", "activations"]
    old = {layer.name: layer for layer in before.layers}
    new = {layer.name: layer for layer in after.layers}
    rows = []
    for name in _in_order(list(old), list(new)):
        was, now = old.get(name), new.get(name)
        rows.append(_changed(was, now) if was and now else _alone(was or now, "gone" if was else "new"))
    pairs = [(getattr(before, name), getattr(after, name)) for name in ("parameters", "multiply_adds", "activations")]
    total = ["total", "", "", *(change(*pair) for pair in pairs)]
    text = table(header, rows, total, 3)
    left = ", ".join(f"{share(*pair)} ({name})" for pair, name in zip(pairs, header[3:], strict=True))
    lines = [f"{before.model}, for one sample ({before.inputs}): {left}", text]
    if before.inputs != after.inputs:
        lines.append(f"The inputs differ: {before.inputs} before, {after.inputs} after")
    for summary, when in ((before, "before"), (after, "after")):
        if summary.uncounted:
            lines.append(f"not counted {when}: {', '.join(each.op for each in summary.uncounted)}")
    return "\n".join(lines)


def _cells(layer: Layer) -> list[str]:
    return [
        layer.name or "(the model itself)",
        layer.kind,
        _shape(layer),
        _count(layer.parameters),
        _count(layer.multiply_adds),
        _count(layer.activations),
    ]


def _changed(was: Layer, now: Layer) -> list[str]:
    cells = _cells(now)
    if _shape(was) != _shape(now):
        cells[2] = f"{_shape(was)} -> {_shape(now)}"
    pairs = [
        (was.parameters, now.parameters),
        (was.multiply_adds, now.multiply_adds),
        (was.activations, now.activations),
    ]
    return [*cells[:3], *(change(*pair) if any(pair) else "-" for pair in pairs)]


def _alone(layer: Layer | None, which: str) -> list[str]:
    assert layer is not None
    cells = _cells(layer)
    cells[1] = f"{cells[1]} ({which})"
    return cells


def _shape(layer: Layer) -> str:
    if layer.output_shape is None:
        return "not called"
    text = " x ".join(map(str, layer.output_shape))
    return f"{text} (x{layer.calls})" if layer.calls > 1 else text


def _count(number: int) -> str:
    return f"{number:,}" if number else "-"


def _some(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _in_order(old: list[str], new: list[str]) -> list[str]:
    """Both lists' names: the old ones in order, each new one behind its predecessor."""
    names, known = list(old), set(old)
    for i, name in enumerate(new):
        if name not in known:
            names.insert(names.index(new[i - 1]) + 1 if i else 0, name)
            known.add(name)
    return names
