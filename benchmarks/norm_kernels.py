"""How fast are our kernels for norms, and how should their work be dealt out? A step's norms, forward and backward.

    python benchmarks/norm_kernels.py
    python benchmarks/norm_kernels.py --try

Milliseconds of a captured pass over the norms of a whole network at batch 128, and of the MobileNetV2 that a run left
(its widths are in ``results/``) at the larger batches that it trains with. ``floor`` is the time in which a copy moves
as many bytes. ``--try`` tries other ways to deal out the work, to choose the constants in ``train/norm_launch.py`` by.
Needs a GPU. Of the tries "264 writers, four warps" was taken; the recorded file is from then, and calls "as it is" what
is "before" here.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from time import perf_counter
from unittest import mock

import torch
from _record import ROOT, about, table, write_json
from depthwise_kernels import timed
from torch import nn

from narrowgate import models
from narrowgate.train import norm_launch

NARROW = ROOT / "results" / "cifar100" / "shrinking-cifar100-mobilenetv2-l1-exp.json"
# Readers, writers, most sums of a column, numbers and warps of a program, before one of the choices was taken.
BEFORE = {"_READERS": 264, "_WRITERS": 528, "_SUMS": 128, "_TILE": 4096, "_WARPS": 8}
CHOICES: dict[str, dict[str, int]] = {  # what each changes of that
    "before": {},
    "264 writers, four warps": {"_WRITERS": 264, "_WARPS": 4},
    "132 writers": {"_WRITERS": 132},
    "132 writers, 64 sums": {"_WRITERS": 132, "_SUMS": 64, "_READERS": 132},
    "264 writers, 64 sums": {"_WRITERS": 264, "_SUMS": 64},
    "264 writers, tiles of 2048, four warps": {"_WRITERS": 264, "_TILE": 2048, "_WARPS": 4},
    "264 writers, tiles of 8192": {"_WRITERS": 264, "_TILE": 8192},
    "264 writers, 256 sums, four warps": {"_WRITERS": 264, "_SUMS": 256, "_READERS": 528, "_WARPS": 4},
    "396 writers, four warps": {"_WRITERS": 396, "_WARPS": 4},
    "264 writers": {"_WRITERS": 264},
    "528 writers, four warps": {"_WRITERS": 528, "_WARPS": 4},
    "264 writers, tiles of 8192, four warps": {"_WRITERS": 264, "_TILE": 8192, "_WARPS": 4},
}
Shape = tuple[int, int, int]
"""Batch, channels, side."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--try", dest="tries", action="store_true", help="other ways to deal out the work too")
    parser.add_argument("--seconds", type=float, default=240, help="no further try is begun after this (default 240)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "norm_kernels.json")
    options = parser.parse_args()
    networks = {
        "mobilenetv2": norms_of("mobilenetv2", 128),
        "mobilenetv2, narrow, batch 352": narrowed(norms_of("mobilenetv2", 352)),
        "mobilenetv2, narrow, batch 128": narrowed(norms_of("mobilenetv2", 128)),
        "resnet164": norms_of("resnet164", 128),
    }
    begun, rows = perf_counter(), []
    floors = {name: floor(shapes) for name, shapes in networks.items()}
    now = {name: getattr(norm_launch, name) for name in BEFORE}
    tries = {label: BEFORE | how for label, how in CHOICES.items()} if options.tries else {"as it is": now}
    for label, how in tries.items():
        if perf_counter() - begun > options.seconds:
            break
        with mock.patch.multiple(norm_launch, **how):
            rows.append({"dealt": label, **how, "ms": {name: measured(shapes) for name, shapes in networks.items()}})
        print(label, rows[-1]["ms"], flush=True)
        facts = {"norms": {name: len(shapes) for name, shapes in networks.items()}, "floor_ms": floors, "rows": rows}
        write_json(options.out, {"what": "ms of a step's norms, forward and backward", **about("cuda"), **facts})
    cells = [[row["dealt"], *(f"{ms:.3f}" for ms in row["ms"].values())] for row in rows]
    print(table(["dealt", *networks], [["floor", *(f"{ms:.3f}" for ms in floors.values())], *cells]))


def norms_of(name: str, batch: int) -> dict[str, Shape]:
    """What each norm of a network for CIFAR-100 reads, by name."""
    model, found = models.build(name, 100).eval(), {}

    def note(key: str):  # type: ignore[no-untyped-def]
        def hook(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            found[key] = batch, args[0].shape[1], args[0].shape[2]

        return hook

    for key, module in model.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            module.register_forward_pre_hook(note(key))
    with torch.no_grad():
        model(torch.zeros(1, 3, 32, 32))
    return found


def narrowed(norms: dict[str, Shape]) -> dict[str, Shape]:
    """The same norms with the channels that a run left, up to the next multiple of eight as while it trains."""
    left = json.loads(NARROW.read_text())["runs"]["during"]["architecture"]
    by_block = {name.rpartition(".")[0]: kept for name, (kept, _) in left.items()}
    return {
        name: (batch, -(-by_block[name.rpartition(".")[0]] // 8) * 8, side) for name, (batch, _, side) in norms.items()
    }


def tensors(shapes: dict[str, Shape]) -> list[tuple[torch.Tensor, ...]]:
    """Of each norm: its batch, the gradient of its result, scale, shift, and running statistics."""
    make = {"device": "cuda", "dtype": torch.bfloat16}
    made = []
    for batch, channels, side in shapes.values():
        x, dy = (
            torch.randn(batch, channels, side, side, **make).contiguous(memory_format=torch.channels_last)
            for _ in range(2)
        )
        made.append((x, dy, *(torch.rand(channels, device="cuda") for _ in range(4))))
    return made


def measured(shapes: dict[str, Shape]) -> float:
    """Milliseconds of one pass over all norms, forward and then backward."""
    held = tensors(shapes)

    def work() -> None:
        facts = []
        for x, _, weight, bias, mean, var in held:
            norm = norm_launch.Norm(x.shape[1], x.shape[1], 0.1, 1e-5, 2)
            facts.append((norm, norm_launch.forward(x, weight, bias, (mean, var), norm)[1]))
        for (x, dy, *_), (norm, fact) in zip(reversed(held), reversed(facts), strict=True):
            norm_launch.backward(x, dy, None, fact, norm)

    return round(timed(work) / 1000, 4)


def floor(shapes: dict[str, Shape]) -> float:
    """Milliseconds in which copies move the bytes of these passes: eight times the batch, copies of half of that."""
    pairs = [(x, torch.empty_like(x)) for x, *_ in tensors(shapes)]

    def work() -> None:
        for _ in range(4):
            for x, y in pairs:
                y.copy_(x)

    return round(timed(work) / 1000, 4)


if __name__ == "__main__":
    main()
