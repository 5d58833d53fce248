"""The vocabulary of a plan: what stays of a parameter, and how a layer's numbers change."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Cut:
    """What stays of one parameter or buffer: positions by axis; with groups, of the second axis in each of them."""

    shape: tuple[int, ...]
    keep: dict[int, list[int]]
    grouped: list[list[int]] | None = None

    @property
    def new_shape(self) -> tuple[int, ...]:
        shape = [len(self.keep.get(axis, range(size))) for axis, size in enumerate(self.shape)]
        if self.grouped is not None:
            shape[1] = len(self.grouped[0])
        return tuple(shape)


@dataclass(frozen=True)
class Counted:
    """What a norm across channels has to know of those that are gone, which still count in its mean and variance.

    ``members`` says in which group each channel that is left is; a group had ``size`` channels, ``means`` are those of
    the constants in it that are gone, and ``spreads`` the sums of their squared distances from these. ``axis`` is where
    its module has the channels.
    """

    axis: int
    size: int
    members: list[int]
    means: list[float]
    spreads: list[float]


@dataclass(frozen=True)
class Edit:
    """How a layer's numbers change before it is cut.

    ``rows`` are output channels that are constant: their weight becomes 0 and their bias the number. ``folded`` are
    input channels that are constant: their part goes into the bias. ``carried`` are such channels as multiples of the
    constant ``carrier``: their weights are added to its. ``merged`` are channels that are sums of others (and of a
    constant, which is folded): their weights are added to those of the others, each times its factor. In the scatter
    layout ``gather`` and ``scatter`` are where the layer's own channels are in the streams it reads (``reads`` wide)
    and writes (as wide as ``fill``). A norm's edit is a ``gather`` alone, or what it has ``counted``. ``mean`` is the
    running mean of the norm behind, where that takes what would be a new bias.
    """

    layer: str
    weight: str
    bias: str | None
    groups: int
    transposed: bool
    rows: dict[int, float] = field(default_factory=dict)
    folded: dict[int, float] = field(default_factory=dict)
    carried: dict[int, float] = field(default_factory=dict)
    carrier: int | None = None
    merged: dict[int, dict[int, float]] = field(default_factory=dict)
    new_bias: bool = False
    new_groups: int = 1
    gather: list[int] | None = None
    scatter: list[int] | None = None
    fill: list[float] | None = None
    reads: int | None = None
    mean: str | None = None
    counted: Counted | None = None
