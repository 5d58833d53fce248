"""Recipes: one TOML file says everything about a run; checked as a whole before anything starts."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from narrowgate.rivals.methods import with_method
from narrowgate.schedules import Schedule, as_schedule
from narrowgate.train.recipe.checks import check_finish, check_shrink, check_together
from narrowgate.train.recipe.gating import GatesPart, MethodPart, PenaltyPart
from narrowgate.train.recipe.method_checks import check_method, check_rivals
from narrowgate.train.recipe.part import Part, RecipeError, shown
from narrowgate.train.recipe.parts import (
    PARTS,
    BudgetPart,
    CheckpointPart,
    DataPart,
    FinishPart,
    LrPart,
    ModelPart,
    OptimizerPart,
    ShrinkPart,
    TeacherPart,
    TrainPart,
)
from narrowgate.train.recipe.reading import apply_overrides, parts_from, read_text, tables_from
from narrowgate.train.recipe.toml import write_value

_NOT_IN_DIGEST = {"data": ("path", "workers"), "method": ("name",)}
"""Keys that leave the numbers alone: where the data lies, who reads it, what keys are called together; all of
[checkpoint] too."""


_BEFORE_METHODS = ("method.name", "budget.target")  # what a method fills in depends on these


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides a run, a part for each table of the TOML file."""

    model: ModelPart
    data: DataPart
    method: MethodPart = field(default_factory=MethodPart)
    gates: GatesPart = field(default_factory=GatesPart)
    penalty: PenaltyPart = field(default_factory=PenaltyPart)
    optimizer: OptimizerPart = field(default_factory=OptimizerPart)
    lr: LrPart = field(default_factory=LrPart)
    train: TrainPart
    teacher: TeacherPart = field(default_factory=TeacherPart)
    shrink: ShrinkPart = field(default_factory=ShrinkPart)
    budget: BudgetPart = field(default_factory=BudgetPart)
    finish: FinishPart = field(default_factory=FinishPart)
    checkpoint: CheckpointPart = field(default_factory=CheckpointPart)

    def __post_init__(self) -> None:
        check_together(self.data, self.gates, self.penalty, self.optimizer, self.lr, self.train, self.budget)
        check_shrink(self.shrink, self.optimizer, self.train, self.budget)
        check_method(self.method, self.parts(), self.tables())
        check_rivals(self.gates, self.penalty, self.optimizer, self.budget, self.shrink, self.finish)
        check_finish(self.finish, self.gates, self.budget)

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
        """The recipe in a TOML file, with ``table.key=value`` overrides."""
        return cls.from_toml(read_text(Path(path)), overrides, str(path))

    @classmethod
    def from_toml(cls, text: str, overrides: Sequence[str] = (), source: str = "recipe") -> Recipe:
        """The recipe in a TOML text; ``source`` names it in errors.

        A method that the text names fills in the keys that the text leaves out; one that an override names takes the
        place of what the text says about gates, penalty and the end (``rivals.methods.REPLACED``).
        """
        tables = tables_from(text, source)
        keys = [override.partition("=")[0].strip() for override in overrides]
        first = [override for override, key in zip(overrides, keys, strict=True) if key in _BEFORE_METHODS]
        overridden = apply_overrides(tables, first)
        tables = with_method(tables, replace="method.name" in keys)
        overridden |= apply_overrides(tables, overrides)
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

    def without_places(self) -> Recipe:
        """The same without where its images and its teacher lie, for what is passed on to others."""
        teacher = replace(self.teacher, run=Path(self.teacher.run).name)
        return replace(self, data=replace(self.data, path=""), teacher=teacher)

    def digest(self) -> str:
        """A SHA-256 of all that decides the numbers: not where data lies, what a method is called, or [checkpoint]."""
        return hashlib.sha256(json.dumps(self._deciding(), sort_keys=True).encode()).hexdigest()

    def differences(self, other: Recipe) -> dict[str, tuple[str, str]]:
        """What decides the numbers and is not the same in both, by ``table.key``: the value here, and there."""
        theirs = other._deciding()
        return {
            f"{table}.{key}": (shown(value), shown(theirs[table][key]))
            for table, values in self._deciding().items()
            for key, value in values.items()
            if value != theirs[table][key]
        }

    def _deciding(self) -> dict[str, dict[str, object]]:
        return {
            table: {key: value for key, value in values.items() if key not in _NOT_IN_DIGEST.get(table, ())}
            for table, values in self.tables().items()
            if table != CheckpointPart.TABLE
        }

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
