"""Removing zero filters: what is left and what the outputs lose, beside Torch-Pruning on the same networks.

    pip install torch-pruning
    python benchmarks/against_torch_pruning.py        # a few minutes on one core
    python benchmarks/against_torch_pruning.py --theirs benchmarks/against_torch_pruning.json

Needs the package installed, torchvision and torch-pruning; with ``--theirs`` Torch-Pruning's figures are those of an
earlier run of the same networks, which the page then says, and the package is not needed. Writes
``benchmarks/against_torch_pruning.json`` and ``.md``, or what ``--out some/where.json`` names.

Half of the filters of every layer but the last are zero, drawn layer by layer.

1. What is left, with BatchNorm shifts and means zero. Torch-Pruning has no mode that removes dead channels: the rule
   "a channel goes if its filters are zero in every coupled layer" is ours, the groups and the cut are its own. Target:
   ``aligned`` never leaves more.
2. What the outputs lose, with shifts N(0, sigma). A zero filter's BatchNorm puts out its shift, a constant; its running
   mean is zero, as training leaves it, other statistics fit the data. Torch-Pruning cuts the channels of its rule and
   with them their constants; ``exact`` folds or keeps constants, ``drop`` is our cut without them. The error is
   |cut - original| / |original|, 2-norms over 16 random images, the mean of three draws, in float64.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from _record import ROOT, about, write_json
from _torch_pruning import relative_l2, require, version, without_dead_channels
from _zeroed import batch_norms, parameters, zero_half_
from power import images, networks, zeroed
from torch import Tensor, nn

import narrowgate as ng

RESULTS = ROOT / "benchmarks" / "against_torch_pruning.json"
SHIFTS = (0.0, 0.01, 0.03, 0.1, 0.3)
SHIFTED = ("resnet18", "mobilenet_v2", "vgg11_bn")
SEEDS = (0, 1, 2)


Record = dict[str, Any]


def left(name: str, old: Record | None) -> Record:
    """Parameters left by both, shifts zero."""
    model = zeroed(name, 0.0)
    example = images(name, 2)
    found: Record = {"parameters": parameters(model)} | theirs_of(old)
    with torch.no_grad():
        wanted = model(example)
    if old is None:
        cut = without_dead_channels(model, example)
        found |= {"torch_pruning": parameters(cut), "torch_pruning_error": relative_l2(wanted, cut(example))}
    with torch.no_grad():
        for layout in ("aligned", "scatter"):
            small = ng.compact(model, ng.plan(model, example, layout=layout))
            found[layout] = parameters(small)
            found[f"{layout}_error"] = relative_l2(wanted, small(example))
    return found


def theirs_of(old: Record | None) -> Record:
    """Torch-Pruning's part of an earlier result."""
    return {key: value for key, value in (old or {}).items() if key.startswith("torch_pruning")}


def shifted(name: str, shift: float, seed: int, pixels: int = 64) -> tuple[nn.Module, Tensor]:
    """A network whose dead channels are the constants their BatchNorm adds, and images for it."""
    from torchvision.models import get_model

    torch.manual_seed(seed)
    model = get_model(name, weights=None).double().eval()
    zero_half_(model)
    batch = torch.randn(16, 3, pixels, pixels, dtype=torch.float64)
    norms = list(batch_norms(model))
    with torch.no_grad():
        for norm in norms:
            norm.weight.uniform_(0.5, 1.5)
            norm.bias.copy_(torch.randn_like(norm.bias) * shift)
            norm.train()
            norm.momentum = 1.0
        model(batch)
        for norm in norms:
            norm.eval()
            norm.running_var[norm.running_var == 0] = 1.0
    return model, torch.randn_like(batch)


@torch.no_grad()
def lost(name: str, shift: float, seed: int, old: Record | None) -> Record:
    """Errors and parameters of the three cuts of one network."""
    model, batch = shifted(name, shift, seed)
    cuts = {}
    if old is None:
        with torch.enable_grad():
            cuts["torch_pruning"] = without_dead_channels(model, batch[:2])
    for constants in ("drop", "exact"):
        cuts[constants] = ng.compact(model, ng.plan(model, batch[:2], constants=constants))
    wanted = model(batch)
    found = {f"{title}_error": relative_l2(wanted, cut(batch)) for title, cut in cuts.items()}
    return theirs_of(old) | found | {f"{title}_parameters": parameters(cut) for title, cut in cuts.items()}


def mean_over_seeds(name: str, shift: float, old: Record | None) -> Record:
    earlier = old["runs"] if old else [None] * len(SEEDS)
    runs = [lost(name, shift, seed, one) for seed, one in zip(SEEDS, earlier, strict=True)]
    means = {key: statistics.fmean(run[key] for run in runs) for key in runs[0]}
    return {"shift": shift, **means, "runs": runs}


def page(record: Record) -> str:
    made = record["about"]
    theirs = made["torch_pruning"]
    when = f", its figures from the run of {theirs['date'][:10]}" if "date" in theirs else ""
    return "\n".join(
        [
            "# Beside Torch-Pruning",
            "",
            f"Made by `{made['command']}` ({made['date'][:10]}, Torch-Pruning {theirs['version']}{when}, PyTorch "
            f"{made['versions']['torch']}). What is compared, and how: `against_torch_pruning.py`. Half of the filters "
            "zeroed at random.",
            "",
            "## Parameters left, BatchNorm shifts zero (millions)",
            "",
            "The rule for Torch-Pruning, a channel goes if its filters are zero in every coupled layer, is ours: the "
            "package has no such mode. All outputs are equal to the original's here.",
            "",
            "| network | all | Torch-Pruning's groups | aligned | scatter |",
            "|---|---|---|---|---|",
            *(left_row(name, found) for name, found in record["left"].items()),
            "",
            "## Error of the outputs over the size of the shifts",
            "",
            "Relative 2-norm, mean of three draws. Torch-Pruning removes dead channels together with the constants "
            "they put out; `drop` is narrowgate's cut when told to do the same, `exact`, the default, keeps the "
            "function.",
            "",
            "| network | shifts, sigma | Torch-Pruning | narrowgate, drop | narrowgate, exact |",
            "|---|---|---|---|---|",
            *lost_rows(record),
            "",
        ]
    )


def left_row(name: str, found: Record) -> str:
    counts = [found[key] for key in ("parameters", "torch_pruning", "aligned", "scatter")]
    return f"| {name} | " + " | ".join(f"{count / 1e6:.3f}" for count in counts) + " |"


def lost_rows(record: Record) -> Iterator[str]:
    for name, rows in record["lost"].items():
        for row in rows:
            cells = [
                f"{row[f'{cut}_error']:.1e} ({row[f'{cut}_parameters'] / 1e6:.2f} M)"
                for cut in ("torch_pruning", "drop", "exact")
            ]
            yield f"| {name} | {row['shift']:g} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--theirs", type=Path, help="a file of an earlier run, for Torch-Pruning's figures")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    old = json.loads(options.theirs.read_text()) if options.theirs else None
    if old is None:
        require("--theirs FILE")
    record: Record = {"about": {**about(), "torch_pruning": source_of(old)}, "left": {}, "lost": {}}
    for name in networks():
        record["left"][name] = left(name, old and old["left"][name])
        print(name, record["left"][name], flush=True)
    for name in SHIFTED:
        record["lost"][name] = []
        for i, shift in enumerate(SHIFTS):
            record["lost"][name].append(mean_over_seeds(name, shift, old and old["lost"][name][i]))
            print(name, {k: v for k, v in record["lost"][name][-1].items() if k != "runs"}, flush=True)
    write_json(options.out, record)
    options.out.with_suffix(".md").write_text(page(record))


def source_of(old: Record | None) -> Record:
    """Torch-Pruning's version, and where its figures come from an earlier run, that run's date."""
    if old is None:
        return {"version": version()}
    theirs = old["about"]["torch_pruning"]
    return {"version": theirs, "date": old["about"]["date"]} if isinstance(theirs, str) else theirs


if __name__ == "__main__":
    main()
