"""What a named method and the gates of the rival methods need, found before a run starts and named with a remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from narrowgate.groups import COUPLED
from narrowgate.rivals.methods import METHODS
from narrowgate.train.recipe.checks import refuse
from narrowgate.train.recipe.gating import RIVALS, GatesPart, MethodPart, PenaltyPart
from narrowgate.train.recipe.part import Part, shown
from narrowgate.train.recipe.parts import BudgetPart, FinishPart, OptimizerPart, ShrinkPart
from narrowgate.train.recipe.values import Number


def check_method(method: MethodPart, parts: Sequence[Part], tables: Mapping[str, Mapping[str, object]]) -> None:
    """What makes a method that method must not be set to something else."""
    if method.name not in METHODS:
        return
    by_table = {part.TABLE: part for part in parts}
    for key, value in METHODS[method.name].fixed.items():
        table, _, name = key.partition(".")
        if tables[table][name] != value:
            remedy = f"that method has {key} = {shown(value)}; leave one of the two out"
            if table == "optimizer":  # the learning rate is another's
                remedy = f"that method needs {key} = {shown(value)}; set it, with a learning rate for it"
            raise refuse(remedy, (by_table[table], name), (method, "name"))


def check_rivals(
    gates: GatesPart,
    penalty: PenaltyPart,
    optimizer: OptimizerPart,
    budget: BudgetPart,
    shrink: ShrinkPart,
    finish: FinishPart,
) -> None:
    """Gates and steps of the rival methods must fit each other and the rest."""
    _check_gates(gates, budget, shrink)
    _check_weights(gates, penalty)
    if penalty.accelerated and not (penalty.proximal and gates.kind == "scaling" and optimizer.kind == "sgd"):
        raise refuse(
            'needs penalty.proximal = true, gates.kind = "scaling" and optimizer.kind = "sgd"', (penalty, "accelerated")
        )
    closing = penalty.strength != 0 or budget.target or finish.close or finish.threshold
    if gates.kind == "scaling" and closing and not penalty.accelerated:
        raise refuse(
            "scaling factors must not go below 0, which only penalty.accelerated = true sees to; set it, and "
            "penalty.proximal = true",
            (gates, "kind"),
        )


def _check_gates(gates: GatesPart, budget: BudgetPart, shrink: ShrinkPart) -> None:
    filters = gates.kind.startswith("filter")
    if filters and budget.target:
        raise refuse("a budget steers gates; use finish.close instead", (budget, "target"), (gates, "kind"))
    if filters and shrink.when == "during":
        raise refuse(
            'a filter that is zero may learn again, so nothing goes before the end; use "end"',
            (shrink, "when"),
            (gates, "kind"),
        )
    if gates.rescale != 1 and gates.kind != "linear":
        raise refuse("rescales BatchNorm scales; leave it at 1", (gates, "rescale"), (gates, "kind"))
    if gates.inputs and gates.kind in ("linear", "none"):
        raise refuse("BatchNorm scales are where they are; leave it out", (gates, "inputs"), (gates, "kind"))
    if gates.groups != ("channels",) and (gates.kind in ("linear", "none") or filters):
        raise refuse('these are one a channel; leave it at ["channels"]', (gates, "groups"), (gates, "kind"))
    if COUPLED in gates.groups and len(gates.groups) > 1:
        raise refuse(f'"{COUPLED}" is a choice of all gates; leave the others out', (gates, "groups"))
    if not gates.groups:
        raise refuse('name some, for example ["channels"]; no gates at all are gates.kind = "none"', (gates, "groups"))
    if gates.kind in RIVALS[1:] and gates.placement != "before-norm":
        raise refuse("filters have no placement; leave it out", (gates, "placement"), (gates, "kind"))
    if filters and gates.init is not None:
        raise refuse("filters start as the network makes them; leave it out", (gates, "init"), (gates, "kind"))


def _check_weights(gates: GatesPart, penalty: PenaltyPart) -> None:
    if penalty.weights == "memory" and gates.kind != "linear":
        raise refuse('is the cost of a BatchNorm\'s channel; use "parameters"', (penalty, "weights"), (gates, "kind"))
    if penalty.weights == "parameters" and gates.kind == "linear":
        raise refuse(
            'a BatchNorm\'s scale rules over layers beside it; use "memory"', (penalty, "weights"), (gates, "kind")
        )
    if penalty.weights == "parameters" and not {"channels", "neurons", COUPLED}.issuperset(gates.groups):
        raise refuse('only a channel\'s parameters are counted; use "equal"', (penalty, "weights"), (gates, "groups"))
    for layer, factor in penalty.factors.items():
        try:
            Number(0).read(factor)
        except ValueError as error:
            raise refuse(f"the factor of {layer} {error}", (penalty, "factors")) from None
