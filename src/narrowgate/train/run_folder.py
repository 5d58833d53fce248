"""What lies in the folder of a run, by name; a reader of such folders need not import what writes them."""

from __future__ import annotations

from pathlib import Path

RECIPE = "recipe.toml"
METRICS = "metrics.jsonl"
GATES = "gates.jsonl"
TENSORBOARD = "tensorboard"
CHECKPOINTS = "checkpoints"
SMALL = "small"
RESULT = "result.json"
LOCK = ".train.lock"


def folder_of(recipe: Path) -> Path:
    """Where the run of a recipe goes: after its name, or to where it lies if it is what a run there wrote down."""
    if recipe.name == RECIPE and any((recipe.parent / name).exists() for name in (LOCK, METRICS, CHECKPOINTS)):
        return recipe.parent
    return Path("runs") / recipe.stem
