"""From what the sweeps learned to which channels stay: the only place where anything is decided."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from narrowgate.flow.analysis import Flow, Mixer
from narrowgate.flow.state import PINNED, Labels, Mask

# A constant channel this much smaller than the largest is no good as a carrier: dividing by it would lose digits.
_CARRIER_RATIO = 1e-3
EQUAL_GROUPS = "for equal groups"


class CollapseError(RuntimeError):
    """So much is closed that the output no longer depends on the input."""


@dataclass
class Decision:
    """``kept[label]`` for every label, and for each label why its class stayed."""

    kept: Mask
    why: NDArray[np.object_]
    carriers: dict[int, int]

    def positions(self, labels: Labels) -> Labels:
        """Which positions of an axis stay."""
        return np.flatnonzero(self.kept[labels])


class _Classes:
    """Labels in classes that stay or go together; keeping one keeps its class."""

    def __init__(self, flow: Flow) -> None:
        self.root = components(flow.label_count, flow.edges)
        self.kept = np.zeros(flow.label_count, bool)  # indexed by root
        self.why = np.full(flow.label_count, "", object)

    def keep(self, labels: Labels, why: str) -> None:
        roots = self.root[labels]
        fresh = roots[~self.kept[roots]]
        self.why[fresh] = why
        self.kept[fresh] = True

    def is_kept(self, labels: Labels) -> Mask:
        return self.kept[self.root[labels]]


def decide(flow: Flow, round_to: int = 1) -> Decision:
    """Keep what varies and matters, what is pinned, what carries constants; round widths up; never reach width 0."""
    _check_collapse(flow)
    classes = _Classes(flow)
    classes.keep(np.array([PINNED]), "for fixed places")
    for labels, why in flow.pinned:
        classes.keep(labels, why)
    for node, live in flow.live.items():
        state = flow.states[node]
        for one, mask in zip(state, live, strict=True) if isinstance(state, list) else [(state, live)]:
            if one.axis is not None:
                classes.keep(one.labels[mask & one.varies], "used")
    carriers = _keep_constants(flow, classes)
    _round_up(flow, classes, round_to)
    kept = classes.kept[classes.root]
    return Decision(kept, classes.why[classes.root], carriers)


def _keep_constants(flow: Flow, classes: _Classes) -> dict[int, int]:
    """Where a non-zero constant can't become a bias, keep one such channel to carry them all (by mixer index)."""
    carriers: dict[int, int] = {}
    if flow.constants == "drop":
        return carriers
    hard = [(i, mixer) for i, mixer in enumerate(flow.mixers) if not folds(flow, mixer)]
    for _, mixer in hard:
        if mixer.shared or mixer.groups > 1:
            classes.keep(mixer.inputs.labels[wanted_constants(mixer)], f"for a constant that {mixer.layer} reads")
    for i, mixer in hard:
        wanted = np.flatnonzero(wanted_constants(mixer))
        if mixer.shared or mixer.groups > 1 or not len(wanted):
            continue
        labels, size = mixer.inputs.labels[wanted], np.abs(mixer.inputs.values[wanted])
        kept = classes.is_kept(labels)
        usable = kept & (size >= _CARRIER_RATIO * size.max())
        if kept.all():
            continue
        best = int(np.argmax(np.where(usable, size, 0.0) if usable.any() else size))
        carriers[i] = int(wanted[best])
        classes.keep(labels[best : best + 1], f"for constants that {mixer.layer} reads")
    return carriers


def folds(flow: Flow, mixer: Mixer) -> bool:
    """Whether constant inputs of a layer go into its bias: where that is exact, or where it was asked for anyway."""
    return mixer.foldable or (flow.constants == "fold" and not mixer.shared and mixer.out_axis == 0)


def wanted_constants(mixer: Mixer) -> Mask:
    """Input channels that are a non-zero constant and are read by an output that matters."""
    values = mixer.inputs.values
    wanted: Mask = mixer.live_columns & ~np.isnan(values) & (values != 0)
    return wanted


def _round_up(flow: Flow, classes: _Classes, round_to: int) -> None:
    """Keep more channels until grouped layers have equal groups and every width is at least 1 and a multiple."""
    axes = [labels for labels in flow.axis_labels.values() if len(labels)]
    changed = True
    while changed:
        changed = False
        for rows in flow.equal_counts:
            kept = classes.is_kept(rows)
            goal = max(1, int(kept.sum(1).max()))
            for row, have in zip(rows, kept, strict=True):
                if have.sum() < goal:
                    classes.keep(row[~have][: goal - int(have.sum())], EQUAL_GROUPS)
                    changed = True
        for labels in axes:
            have = classes.is_kept(labels)
            count = int(have.sum())
            goal = min(len(labels), -(-max(1, count) // round_to) * round_to)
            if count < goal:
                classes.keep(
                    labels[~have][: goal - count],
                    "round the width up" if count else "in place of an empty layer",
                )
                changed = True


def _check_collapse(flow: Flow) -> None:
    outputs = [flow.states[flow.resolve(node)] for node in flow.graph.outputs]
    states = [one for state in outputs for one in (state if isinstance(state, list) else [state])]
    if not states or any(state.varies.any() for state in states):
        return
    culprit = next((m.layer for m in flow.mixers if not m.output.varies.any()), "a layer")
    raise CollapseError(
        f"the output no longer depends on the input: every channel of {culprit} is constant. "
        f"Lower the penalty's strength, or open its least closed channel again (gates.reopen_({culprit!r}) if it has "
        "gates), then plan again"
    )


def components(count: int, edges: list[tuple[Labels, Labels]]) -> Labels:
    """The smallest label of each label's connected component."""
    root = np.arange(count)
    if not edges:
        return root
    first = np.concatenate([a for a, _ in edges])
    second = np.concatenate([b for _, b in edges])
    while True:
        low = np.minimum(root[first], root[second])
        before = root.copy()
        np.minimum.at(root, first, low)
        np.minimum.at(root, second, low)
        np.minimum.at(root, before[first], low)
        np.minimum.at(root, before[second], low)
        root = root[root]
        if (root == before).all() and (root[first] == root[second]).all():
            return root
