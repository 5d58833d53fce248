"""The methods by name: what a recipe's ``method.name`` stands for, written in the keys of its other tables.

A method only decides which channels become zero. ``fixed`` keys make it that method; ``usual`` ones are where to start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

AS_WRITTEN = "as-written"
"""The name of no method: the recipe's tables say everything."""


@dataclass(frozen=True)
class Method:
    """Where a method is from, and the recipe keys that it consists of, as ``table.key``."""

    paper: str
    fixed: Mapping[str, object]
    usual: Mapping[str, object] = field(default_factory=dict)

    @property
    def keys(self) -> dict[str, object]:
        """All keys with their values."""
        return {**self.fixed, **self.usual}


METHODS: dict[str, Method] = {
    "bounded-l1": Method(
        "Mummadi et al. 2019, Group Pruning using a Bounded-lp norm for Group Gating and Regularization",
        {"gates.kind": "exponential", "penalty.kind": "bounded-l1"},
        {"penalty.strength": 3e-3},
    ),
    "slimming": Method(
        "Liu et al. 2017, Learning Efficient Convolutional Networks through Network Slimming",
        {"gates.kind": "linear", "penalty.kind": "l1", "penalty.proximal": False},
        {"gates.init": 0.5, "penalty.strength": 1e-4, "finish.close": 0.5},
    ),
    "l0": Method(
        "Louizos et al. 2018, Learning Sparse Neural Networks through L0 Regularization",
        {"gates.kind": "hard-concrete", "penalty.kind": "l0", "penalty.weights": "parameters"},
        {"penalty.strength": 1e-6, "gates.weight_decay": 0.0},
    ),
    "sparse-selection": Method(
        "Huang & Wang 2018, Data-Driven Sparse Structure Selection for Deep Neural Networks",
        {
            "gates.kind": "scaling",
            "penalty.kind": "l1",
            "penalty.proximal": True,
            "penalty.accelerated": True,
            "optimizer.kind": "sgd",
        },
        {"penalty.strength": 1e-3, "gates.weight_decay": 0.0},
    ),
    "ista": Method(
        "Ye et al. 2018, Rethinking the Smaller-Norm-Less-Informative Assumption in Channel Pruning",
        {"gates.kind": "linear", "penalty.kind": "l1", "penalty.proximal": True, "penalty.weights": "memory"},
        {"gates.init": 1.0, "gates.weight_decay": 0.0, "penalty.strength": 1e-3, "finish.threshold": 0.0},
    ),
    "group-lasso": Method(
        "Wen et al. 2016, Learning Structured Sparsity in Deep Neural Networks",
        {"gates.kind": "filter-l2", "penalty.kind": "l1"},
        {"penalty.strength": 1e-3, "finish.threshold": 1e-2},
    ),
    "magnitude": Method(
        "Li et al. 2017, Pruning Filters for Efficient ConvNets",
        {"gates.kind": "filter-l1", "penalty.strength": 0.0, "finish.per_layer": True},
        {"finish.close": 0.5},
    ),
}

REPLACED = {"gates": ("skip",), "penalty": (), "finish": ("finetune_epochs", "finetune_lr")}
"""Tables that a method named on the command line takes over, and the keys of theirs that stay the recipe's."""


def with_method(tables: dict[str, dict[str, object]], replace: bool) -> dict[str, dict[str, object]]:
    """A recipe's tables with the keys of the method that they name filled in.

    Keys that the recipe gives itself stay, unless ``replace``: then a recipe of one method becomes one of another, on
    the same network and data, for as long.
    """
    method = METHODS.get(str(tables.get("method", {}).get("name", AS_WRITTEN)))
    filled = {table: dict(values) for table, values in tables.items()}
    if method is None:
        return filled
    if replace:
        for table, stays in REPLACED.items():
            filled[table] = {key: value for key, value in filled.get(table, {}).items() if key in stays}
    for key, value in method.keys.items():
        if key == "finish.close" and filled.get("budget", {}).get("target"):
            continue  # the budget closes as many gates as its size needs
        table, _, name = key.partition(".")
        values = filled.setdefault(table, {})
        if replace and key in method.fixed and table in REPLACED:
            values[name] = value
        values.setdefault(name, value)
    return filled
