"""Runs to report on: one that was really trained, and what may happen to its folder."""

import json
import shutil

from engine_helpers import RESNET, train, write_images

from narrowgate.report import write_report


def make_run(folder, **settings):
    """A finished run of a small ResNet on made-up images, with cuts on the way."""
    images = write_images(folder.parent / "images.npz")
    changes = {"shrink.when": "'during'", "shrink.every": "2", "data.path": f"'{images}'", **settings}
    train(RESNET, folder, None, *(f"{key}={value}" for key, value in changes.items()))
    return folder


def copy_run(run, folder):
    return shutil.copytree(run, folder, ignore=shutil.ignore_patterns("checkpoints", "tensorboard"))


def change_json(path, **changes):
    """Set some keys of a JSON file; to None takes them away."""
    data = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))


def interrupt(folder, epochs):
    """Leave what a run has on disk that was killed while it wrote the epoch after these."""
    shutil.rmtree(folder / "small")
    (folder / "result.json").unlink()
    for name in ("metrics.jsonl", "gates.jsonl"):
        lines = (folder / name).read_text().splitlines(keepends=True)
        (folder / name).write_text("".join(lines[:epochs]) + lines[epochs][:20])
    return folder


def add_event(folder, text):
    """Have the first epoch's line tell of something."""
    path = folder / "metrics.jsonl"
    first, *others = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps({**json.loads(first), "event": text}), *others]) + "\n")


def report(*paths, out):
    return write_report(paths, out).read_text(encoding="utf-8")


LATENCY = {
    "format": 1,
    "model": "x",
    "inputs": "1 x 1 x 8 x 8",
    "precisions": {"cpu": "32"},
    "devices": {"cpu": "some processor"},
    "threads": 1,
    "torch": "2",
    "multiply_adds": [100, 50],
    "parameters": [10, 5],
    "indexed_layers": 0,
    "odd_widths": 0,
    "timings": [
        {
            "device": "cpu",
            "mode": mode,
            "batch": batch,
            "rounds": 30,
            "before": {"q1": 0.009, "median": 0.01, "q3": 0.011},
            "after": {"q1": 0.9 * after, "median": after, "q3": 1.1 * after},
            "ratio": {"q1": 90 * after, "median": 100 * after, "q3": 110 * after},
        }
        for mode, batch, after in (("eager", 1, 0.005), ("onnx", 1, 0.00025), ("eager", 64, 0.02))
    ],
    "missing": [{"device": "cuda", "mode": "graph", "why": "no GPU"}],
}
