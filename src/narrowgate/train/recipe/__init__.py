"""Recipes: one TOML file says everything about a run."""

from narrowgate.train.recipe.gating import GatesPart, MethodPart, PenaltyPart
from narrowgate.train.recipe.part import RecipeError
from narrowgate.train.recipe.parts import (
    BudgetPart,
    CheckpointPart,
    DataPart,
    FinishPart,
    LrPart,
    ModelPart,
    OptimizerPart,
    ShrinkPart,
    TrainPart,
)
from narrowgate.train.recipe.recipe import Recipe

__all__ = [
    "BudgetPart",
    "CheckpointPart",
    "DataPart",
    "FinishPart",
    "GatesPart",
    "LrPart",
    "MethodPart",
    "ModelPart",
    "OptimizerPart",
    "PenaltyPart",
    "Recipe",
    "RecipeError",
    "ShrinkPart",
    "TrainPart",
]
