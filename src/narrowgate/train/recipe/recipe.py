"""Recipes: one TOML file says everything about a run; checked as a whole before anything starts."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from narrowgate.schedules import Schedule, as_schedule
from narrowgate.train.recipe.checks import check_together
from narrowgate.train.recipe.part import Part, RecipeError
from narrowgate.train.recipe.parts import (
    PARTS,
    BudgetPart,
    CheckpointPart,
    DataPart,
    FinishPart,
    GatesPart,
    LrPart,
    ModelPart,
    OptimizerPart,
    PenaltyPart,
    ShrinkPart,
    TrainPart,
)
from narrowgate.train.recipe.reading import apply_overrides, parts_from, read_text, tables_from
from narrowgate.train.recipe.toml import write_value

_NOT_IN_DIGEST = {"data": ("path", "workers")}
"""Keys that leave the numbers alone: where the data lies, who reads it; all of [checkpoint] too."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides a run, a part for each table of the TOML file."""

    model: ModelPart
    data: DataPart
    gates: GatesPart = field(default_factory=GatesPart)
    penalty: PenaltyPart = field(default_factory=PenaltyPart)
    optimizer: OptimizerPart = field(default_factory=OptimizerPart)
    lr: LrPart = field(default_factory=LrPart)
    train: TrainPart
    shrink: ShrinkPart = field(default_factory=ShrinkPart)
    budget: BudgetPart = field(default_factory=BudgetPart)
    finish: FinishPart = field(default_factory=FinishPart)
    checkpoint: CheckpointPart = field(default_factory=CheckpointPart)

    def __post_init__(self) -> None:
        check_together(self.data, self.gates, self.penalty, self.optimizer, self.lr, self.train, self.budget)

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
        """The recipe in a TOML file, with ``table.key=value`` overrides."""
        return cls.from_toml(read_text(Path(path)), overrides, str(path))

    @classmethod
    def from_toml(cls, text: str, overrides: Sequence[str] = (), source: str = "recipe") -> Recipe:
        """The recipe in a TOML text; ``source`` names it in errors."""
        tables = tables_from(text, source)
        overridden = apply_overrides(tables, overrides)
        try:
            return cls(**parts_from(tables))  # type: ignore[arg-type]
        except RecipeError as error:
            used = [f"--set {overridden[key]}" for key in error.keys if key in overridden]
            where = " ".join([source, *(["with"] if used else []), *used])
            raise RecipeError(f"{where}: {error}", *error.keys) from None

    def parts(self) -> tuple[Part, ...]:
        """The tables in the file's order."""
        return tuple(getattr(self, part.TABLE) for part in PARTS)

    def tables(self) -> dict[str, dict[str, object]]:
        """Every table with every key, defaults included, in the form that TOML and JSON know."""
        return {part.TABLE: part.values() for part in self.parts()}

    def to_toml(self) -> str:
        """The recipe as TOML with every key written out; ``from_toml`` gives the same recipe again."""
        return "\n".join(
            f"[{table}]\n" + "".join(f"{key} = {write_value(value)}\n" for key, value in values.items())
            for table, values in self.tables().items()
        )

    def digest(self) -> str:
        """A SHA-256 of all that decides the numbers: all but [checkpoint] and where the data lies and who reads it."""
        tables = {
            table: {key: value for key, value in values.items() if key not in _NOT_IN_DIGEST.get(table, ())}
            for table, values in self.tables().items()
            if table != CheckpointPart.TABLE
        }
        return hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()

    def lr_at(self, progress: float) -> float:
        """The learning rate after ``progress`` epochs, which may be a fraction."""
        rate = self.optimizer.lr
        if progress < self.lr.warmup:
            rate *= progress / self.lr.warmup
        if self.lr.schedule == "step":
            rate *= self.lr.factor ** sum(math.floor(progress) >= drop for drop in self.lr.drops)
        elif self.lr.schedule == "cosine":
            rate *= (1 + math.cos(math.pi * min(progress / self.train.epochs, 1.0))) / 2
        return rate

    def strength_schedule(self) -> Schedule:
        """The penalty's strength by epoch."""
        return as_schedule("penalty.strength", self.penalty.strength)

    def sigma_schedule(self) -> Schedule:
        """The penalty's sigma by epoch."""
        return as_schedule("penalty.sigma", self.penalty.sigma)
