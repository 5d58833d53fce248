"""What lies in the folder of a run, by name; a reader of such folders need not import what writes them."""

from __future__ import annotations

RECIPE = "recipe.toml"
METRICS = "metrics.jsonl"
GATES = "gates.jsonl"
TENSORBOARD = "tensorboard"
CHECKPOINTS = "checkpoints"
SMALL = "small"
RESULT = "result.json"
LOCK = ".train.lock"
