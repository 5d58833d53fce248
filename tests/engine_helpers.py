"""Tiny data sets and recipes for the tests of the training engine."""

import io
import json

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file

import narrowgate as ng
from narrowgate import models
from narrowgate.train import engine
from narrowgate.train.recipe import Recipe

TIMES = ("seconds", "images_per_second", "event")  # an event says how long it took

# Both learn their images within the epochs given, and close some gates of their own accord, but not all.
LENET = """
[model]
name = "lenet5"
[data]
source = "npz"
[gates]
lr_factor = 15.0
[penalty]
strength = 0.8
proximal = true
[optimizer]
kind = "adamw"
lr = 0.002
[train]
epochs = 5
batch = 16
"""

RESNET = """
[model]
name = "resnet"
options = { depth = 11, dropout = 0.0 }
[data]
source = "npz"
[gates]
placement = "after-norm"
lr_factor = 10.0
[penalty]
strength = 1.0
proximal = true
[optimizer]
kind = "adamw"
lr = 0.002
[lr]
schedule = "cosine"
[train]
epochs = 5
batch = 8
"""


def write_images(path, side=8, train=160, test=60, classes=4):
    """An ``.npz`` of noisy images of a few patterns, which a network learns within an epoch or two."""
    draw = np.random.default_rng(0)
    patterns = draw.uniform(0, 255, (classes, side, side))

    def images(count):
        labels = np.arange(count) % classes
        noisy = patterns[labels] * 0.6 + draw.uniform(0, 255, (count, side, side)) * 0.4
        return noisy.astype(np.uint8), labels

    (x_train, y_train), (x_test, y_test) = images(train), images(test)
    np.savez(path, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    return str(path)


def train(text, folder, data, *settings, **options):
    """Run a recipe with settings on the CPU; what it printed is in ``train.printed`` afterwards."""
    console = Console(file=io.StringIO(), width=200)
    try:
        return engine.run(
            Recipe.from_toml(text, settings), folder, data_path=data, accelerator="cpu", console=console, **options
        )
    finally:
        train.printed = console.file.getvalue()


def rows(folder):
    """The lines of a run's log."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def outcome(folder):
    """All that two equal runs have in common: networks, plan, optimizer state, numbers in the log, the result."""
    last = max((folder / "checkpoints").glob("epoch-*"))
    result = json.loads((folder / "result.json").read_text())
    tensors = {
        **{f"small/{name}": array for name, array in load_file(folder / "small" / "model.safetensors").items()},
        **load_file(last / "tensors.safetensors"),
    }
    return {
        "tensors": {name: (array.shape, array.tobytes()) for name, array in tensors.items()},
        "plan": (folder / "small" / "plan.json").read_text(),
        "log": [{key: value for key, value in row.items() if key not in TIMES} for row in rows(folder)],
        "cuts": [row["event"].partition(" in ")[0] for row in rows(folder)],
        "result": {key: value for key, value in result.items() if key != "seconds"},
    }


def load_small(folder, name="lenet5", shape=(1, 28, 28), **options):
    """The small network of a finished run, in eval mode."""
    return ng.load(folder / "small", lambda: models.build(name, 4, image_shape=shape, **options)).eval()


def count(model):
    """How many parameters a model has."""
    return sum(parameter.numel() for parameter in model.parameters())


class Killed(BaseException):
    """What a process that is killed would never come back from."""


def train_until(monkeypatch, epoch, *arguments, **options):
    """A run that ends abruptly once the checkpoint of an epoch is written."""
    save = engine.save

    def save_and_die(training, checkpoints, row):
        save(training, checkpoints, row)
        if training.epoch == epoch:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(engine, "save", save_and_die)
        with pytest.raises(Killed):
            train(*arguments, **options)
