"""Who is coupled with whom: labels for positions of axes, which stay or go together, and which stay in any case."""

from __future__ import annotations

import numpy as np
from torch import Tensor, nn

from narrowgate.flow.state import PINNED, Labels

GROUPED = -1
"""In place of the second axis of a grouped convolution: the inputs of all groups, one after the other; of a transposed
one, the outputs."""
_OTHERWISE = "for another use of the same weight"
_ELSEWHERE = "for fixed places"


class Couplings:
    """The labels of all axes of a model's parameters and buffers, and what was learned about them."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors: dict[str, Tensor] = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        self.axis_labels: dict[tuple[str, int], Labels] = {}
        self.label_count = 1  # 0 is PINNED
        self.edges: list[tuple[Labels, Labels]] = []
        self.pinned: list[tuple[Labels, str]] = []
        self.equal_counts: list[Labels] = []  # one row a group: as many of each row stay

    def labels_of(self, name: str, axis: int) -> Labels:
        """The labels of one axis of a parameter or buffer, made at first sight."""
        return self._labels(name, axis, self.tensors[name].shape[axis])

    def grouped_labels_of(self, weight: str, size: int) -> Labels:
        """Labels for what the second axis of a grouped convolution's weight has for one group only."""
        labels = self._labels(weight, GROUPED, size)
        if len(labels) == size:
            return labels
        self.pin(labels, _OTHERWISE)
        return np.full(size, PINNED)

    def _labels(self, name: str, axis: int, size: int) -> Labels:
        key = (name, axis)
        if key not in self.axis_labels:
            self.axis_labels[key] = np.arange(self.label_count, self.label_count + size)
            self.label_count += size
            if axis in (1, GROUPED) and {(name, 1), (name, GROUPED)} <= self.axis_labels.keys():
                for one in (1, GROUPED):  # the same numbers: what is cut for one use is missing in the other
                    self.pin(self.axis_labels[name, one], _OTHERWISE)
        return self.axis_labels[key]

    def tie(self, first: Labels, second: Labels) -> None:
        """Positions with these labels stay or go together."""
        if first is not second:
            self.edges.append((first.reshape(-1), second.reshape(-1)))

    def pin(self, labels: Labels, why: str) -> None:
        """Positions with these labels stay."""
        self.pinned.append((labels.reshape(-1), why))

    def join(self, other: Couplings) -> None:
        """What another graph of the same model couples or holds in place, this one does as well."""
        offset = self.label_count
        self.label_count += other.label_count
        self.edges += [(first + offset, second + offset) for first, second in other.edges]
        self.pinned += [(np.array([PINNED + offset]), _ELSEWHERE), *((at + offset, why) for at, why in other.pinned)]
        self.equal_counts += [rows + offset for rows in other.equal_counts]
        for key in self.axis_labels.keys() & other.axis_labels.keys():
            self.tie(self.axis_labels[key], other.axis_labels[key] + offset)
