"""The tables of a recipe that say which channels go: a method by name, gates, and the penalty on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from narrowgate.attach import KINDS as GATES
from narrowgate.attach import PLACEMENTS
from narrowgate.groups import COUPLED
from narrowgate.groups import NAMES as GROUPS
from narrowgate.penalties import KINDS as PENALTIES
from narrowgate.rivals.methods import AS_WRITTEN, METHODS
from narrowgate.schedules import Schedule
from narrowgate.train.recipe.part import Part, key
from narrowgate.train.recipe.values import Flag, Many, Number, Scheduled, Table, Text

RIVALS = ("scaling", "filter-l1", "filter-l2")
"""Kinds of gates beside those of ``attach_gates_``."""
WEIGHTS = ("equal", "parameters", "memory")


@dataclass(frozen=True)
class MethodPart(Part):
    TABLE = "method"
    MEANING = "whose way to decide which channels go"
    name: str = field(
        default=AS_WRITTEN,
        metadata=key(
            Text((AS_WRITTEN, *METHODS)),
            "a method by name, which fills in keys of the tables below; `as-written`: they say it all",
        ),
    )


@dataclass(frozen=True)
class GatesPart(Part):
    TABLE = "gates"
    MEANING = "what decides which channels matter"
    kind: str = field(
        default="exponential",
        metadata=key(
            Text((*GATES, *RIVALS, "none")),
            "the kind of gate; `scaling` is a plain factor, `filter-l1` and `filter-l2` are the norms of a layer's own "
            "filters, `none` trains the plain network",
        ),
    )
    placement: str = field(
        default="before-norm", metadata=key(Text(PLACEMENTS), "before or after the BatchNorm behind a layer")
    )
    init: float | None = field(
        default=None, metadata=key(Number(optional=True), "where gates start; `none`: the kind's own start")
    )
    weight_decay: float | None = field(
        default=None,
        metadata=key(Number(0, optional=True), "weight decay of the gates; `none`: `optimizer.weight_decay`"),
    )
    lr_factor: float = field(
        default=1.0, metadata=key(Number(above=0), "learning rate of the gates as a multiple of the others'")
    )
    skip: tuple[str, ...] = field(
        default=(),
        metadata=key(
            Many(Text()), "layers without gates (for linear gates: BatchNorms), by name; `*` stands for anything"
        ),
    )
    inputs: tuple[str, ...] = field(
        default=(),
        metadata=key(
            Many(Text()), "layers with gates on their inputs, by name; empty: those that the network names itself"
        ),
    )
    groups: tuple[str, ...] = field(
        default=("channels",),
        metadata=key(
            Many(Text((*GROUPS, COUPLED))),
            "what a gate stands for: channels, neurons of MLPs, attention heads, residual blocks, or several of these; "
            "or `coupled` alone: a channel of a stream, with all layers that write it",
        ),
    )
    rescale: float = field(
        default=1.0,
        metadata=key(
            Number(above=0),
            "for `linear`: multiply the scales by this and divide the weights behind by it until training has ended, "
            "which changes how fast they close, not what the network computes",
        ),
    )


@dataclass(frozen=True)
class PenaltyPart(Part):
    TABLE = "penalty"
    MEANING = "what closes gates"
    kind: str = field(
        default="l1", metadata=key(Text(PENALTIES), "the norm of the gates; `l0` goes with hard-concrete gates")
    )
    strength: float | Schedule = field(default=0.0, metadata=key(Scheduled(Number(0)), "the factor before the norm"))
    sigma: float | Schedule = field(
        default=1.0, metadata=key(Scheduled(Number(above=0)), "the width of a bounded norm; for `l1` a plain divisor")
    )
    p: float | None = field(
        default=None, metadata=key(Number(above=0, optional=True), "the exponent of `bounded-lp`, which needs one")
    )
    weights: str = field(
        default="equal",
        metadata=key(
            Text(WEIGHTS),
            "what a gate's share of the norm is multiplied by: nothing, the parameters it rules over, or the memory "
            "that its channel takes (Ye et al. 2018, for `linear`)",
        ),
    )
    factors: Mapping[str, object] = field(
        default_factory=dict,
        metadata=key(Table(), 'further factors by layer, as in `{ conv1 = 10.0, "fc1.inputs" = 0.1 }`'),
    )
    relative: bool = field(
        default=False,
        metadata=key(
            Flag(),
            "count each layer's gates relative to their typical size, so that shrinking a whole layer wins nothing: "
            "for networks where a norm comes between one layer and the next",
        ),
    )
    proximal: bool = field(
        default=False,
        metadata=key(
            Flag(), "shrink the gates after each step of the optimizer instead of adding the penalty to the loss"
        ),
    )
    accelerated: bool = field(
        default=False,
        metadata=key(Flag(), "the proximal step inside the gates' own momentum (Huang & Wang 2018), for `scaling`"),
    )
