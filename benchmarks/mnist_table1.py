"""The paper's Table 1: LeNet-5 on MNIST, one run a row and seed, beside the paper's numbers.

    python benchmarks/mnist_table1.py --data mnist.npz                              # all rows, seed 0
    python benchmarks/mnist_table1.py --data mnist.npz --rows l1-1e-3 --seeds 0 1 2
    python benchmarks/mnist_table1.py --data mnist.npz --validation 10000 --rows bounded-l1-3e-3 \\
        --schedules step cosine --strengths 1e-3 2e-3 3e-3                          # choose without the test set

Needs the package installed, or ``PYTHONPATH=src``. ``mnist.npz`` holds ``x_train``, ``y_train``, ``x_test`` and
``y_test`` as uint8. Writes ``results/mnist/<row>-seed<k>.json``, one a run (settings that are not the row's own go
into the name); ``results/README.md`` explains the fields. A 60-epoch run takes seconds on a GPU, up to half an hour on
a CPU.

SGD, lr 0.1, momentum 0.9, batch 128, sigma 1, weight decay 0 but in the l2 row, which has it on all parameters, gates
included. The paper does not give its learning-rate schedule for this network: ``step`` is x0.1 at 1/2 and 3/4 of the
epochs, ``cosine`` goes to 0, one value an epoch.

Kept architectures read conv1-conv2-features-fc1. A feature (one of 50 x 16 inputs of fc1) is kept if its own gate and
that of its conv2 channel are open; a conv2 channel without a kept feature counts as removed. The parameters left are
those of a network built at these widths, and the error after removal is that network's.
"""

from __future__ import annotations

import argparse
import itertools
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from _lenet import Recipe, Split, Training, check_sgd, error_percent, load, logits, train
from _lenet_narrow import GROUPS, NarrowLeNet5, kept, open_gates, parameters_left
from _record import ROOT, about, table, write_json

ERROR_MARGIN, FEATURES_FACTOR = 0.3, 2.0


@dataclass(frozen=True)
class Row:
    """A row of the paper's Table 1: how it was trained and what came out."""

    penalty: str
    strength: float
    epochs: int
    architecture: str
    error_percent: float


ROWS = {
    "l2-5e-4": Row("l2", 5e-4, 200, "8-19-117-24", 0.79),
    "l1-1e-3": Row("l1", 1e-3, 60, "8-13-37-25", 0.98),
    "bounded-l1-4e-3": Row("bounded-l1", 4e-3, 60, "9-17-43-25", 0.92),
    "bounded-l1-3e-3": Row("bounded-l1", 3e-3, 60, "9-20-54-27", 0.67),
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="mnist.npz")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--seeds", "--seed", nargs="+", type=int, default=[0])
    parser.add_argument("--schedules", "--schedule", nargs="+", choices=("step", "cosine"), default=["step"])
    parser.add_argument("--lrs", "--lr", nargs="+", type=float, default=[0.1])
    parser.add_argument("--strengths", nargs="+", type=float, help="instead of the row's own; in the l2 row the decay")
    parser.add_argument("--epochs", type=int, help="instead of the row's own")
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--proximal", action="store_true", help="shrink gates after the step, not through the loss")
    parser.add_argument("--validation", type=int, default=0, metavar="N", help="judge on the last N training images")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out-dir", type=Path, default=ROOT / "results" / "mnist")
    options = parser.parse_args()
    if options.epochs is not None and options.epochs < 1:
        parser.error(f"--epochs must be 1 or more, got {options.epochs}")
    return options


def recipe_of(row: Row, strength: float, lr: float, schedule: str, options: argparse.Namespace) -> Recipe:
    """A row's recipe with the options put in."""
    decay_only = row.penalty == "l2"
    return Recipe(
        penalty="none" if decay_only else row.penalty,
        strength=0.0 if decay_only else strength,
        sigma=options.sigma,
        weight_decay=strength if decay_only else 0.0,
        epochs=options.epochs or row.epochs,
        lr=lr,
        schedule=schedule,
        momentum=0.9,
        batch=128,
        proximal=options.proximal and not decay_only,
    )


def file_name(name: str, recipe: Recipe, seed: int, options: argparse.Namespace) -> str:
    """The row, whatever differs from its own settings, and the seed."""
    own, strength = ROWS[name], recipe.strength or recipe.weight_decay
    parts = [
        f"strength{strength:g}" if strength != own.strength else "",
        recipe.schedule if recipe.schedule != "step" else "",
        f"lr{recipe.lr:g}" if recipe.lr != 0.1 else "",
        f"sigma{recipe.sigma:g}" if recipe.sigma != 1 else "",
        f"epochs{recipe.epochs}" if recipe.epochs != own.epochs else "",
        "proximal" if recipe.proximal else "",
        f"validation{options.validation}" if options.validation else "",
    ]
    return "-".join([name, *(part for part in parts if part), f"seed{seed}"]) + ".json"


def judge(training: Training, data: Split) -> dict[str, Any]:
    """What is left of a trained network, and its error before and after the rest is removed."""
    groups = kept(training.gates)
    counts = {name: int(groups[name].sum()) for name in GROUPS}
    whole = logits(training.model, data)
    found: dict[str, Any] = {
        "error_percent": round(error_percent(whole, data), 4),
        "architecture": "-".join(str(counts[name]) for name in GROUPS),
        "kept": counts,
        "gates_open": {name: int(mask.sum()) for name, mask in open_gates(training.gates).items()},
        "parameters_left": parameters_left(**counts),
        "parameters_whole": parameters_left(20, 50, 800, 500),
    }
    if not all(counts.values()):
        return found | {"collapsed": True}
    small = NarrowLeNet5(training.model, groups).to(data.images.device)
    built = sum(p.numel() for p in small.parameters())
    if built != found["parameters_left"]:
        raise RuntimeError(f"the narrow network has {built} parameters, the formula says {found['parameters_left']}")
    after = logits(small, data)
    return found | {
        "collapsed": False,
        "error_after_removal_percent": round(error_percent(after, data), 4),
        "predictions_changed_by_removal": int((after.argmax(1) != whole.argmax(1)).sum()),
        "largest_logit_change_by_removal": float((after - whole).abs().max()),
    }


def beside_paper(row: Row, found: dict[str, Any]) -> dict[str, Any]:
    """The paper's row and how the run compares with it; a better number is within every target."""
    features = int(row.architecture.split("-")[2])
    error = found["error_percent"]
    return {
        "paper": {"architecture": row.architecture, "error_percent": row.error_percent},
        "within_target": {
            "error": error <= row.error_percent + ERROR_MARGIN,
            "features": found["kept"]["features"] <= FEATURES_FACTOR * features,
        },
        "as_good_as_paper": {
            "error": error <= row.error_percent,
            "features": found["kept"]["features"] <= features,
        },
    }


def run(name: str, recipe: Recipe, seed: int, data: tuple[Split, Split], options: argparse.Namespace) -> dict[str, Any]:
    """Train one row with one seed and judge it."""
    start = time.perf_counter()
    training = Training(recipe, seed, data[0])
    apart = training.capture_() if options.device == "cuda" else None
    curves = train(training, lambda line: print(f"  {line}", flush=True))
    record: dict[str, Any] = {
        "what": "LeNet-5 on MNIST, the paper's Table 1",
        "row": name,
        "seed": seed,
        "recipe": asdict(recipe) | {"train_images": len(data[0].labels)},
        **about(options.device),
        "step": "eager" if apart is None else "CUDA graph",
        "replay_against_eager": apart,
        "error_on": f"the last {options.validation} training images" if options.validation else "test",
        "error_images": len(data[1].labels),
    }
    finished = len(curves["train_loss"]) == recipe.epochs
    found = judge(training, data[1]) if finished else {}
    record |= {"diverged": not finished, **found, **(beside_paper(ROWS[name], found) if found else {})}
    return record | {"seconds": round(time.perf_counter() - start, 2), **curves}


def line(record: dict[str, Any]) -> list[str]:
    """A run as a row of the printed table."""
    recipe, paper = record["recipe"], ROWS[record["row"]]
    settings = f"{recipe['strength'] or recipe['weight_decay']:g} {recipe['schedule']} lr {recipe['lr']:g}"
    left = [record["row"], settings + (" proximal" if recipe["proximal"] else ""), str(record["seed"])]
    right = [f"{record['seconds']:.1f}", paper.architecture, f"{paper.error_percent:.2f}"]
    if record["diverged"]:
        return [*left, "diverged", "", "", *right, ""]
    within = record["within_target"]
    verdict = "both" if all(within.values()) else ", ".join(key for key in within if within[key]) or "neither"
    return [
        *left,
        record["architecture"],
        str(record["parameters_left"]),
        f"{record['error_percent']:.2f}",
        *right,
        verdict,
    ]


def main() -> None:
    options = parse()
    torch.backends.cudnn.allow_tf32 = False  # float32 throughout
    print(f"hand-written SGD against torch.optim.SGD: {check_sgd(options.device):.1e} apart", flush=True)
    data = load(options.data, options.device, options.validation)
    rows = []
    for name, seed, schedule, lr in itertools.product(options.rows, options.seeds, options.schedules, options.lrs):
        for strength in options.strengths or [ROWS[name].strength]:
            recipe = recipe_of(ROWS[name], strength, lr, schedule, options)
            target = file_name(name, recipe, seed, options)
            print(target.removesuffix(".json"), flush=True)
            record = run(name, recipe, seed, data, options)
            write_json(options.out_dir / target, record)
            rows.append(line(record))
    head = ["row", "settings", "seed", "kept", "params", "error %", "s", "paper kept", "paper %", "within target"]
    print(table(head, rows))


if __name__ == "__main__":
    main()
