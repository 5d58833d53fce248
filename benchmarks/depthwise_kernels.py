"""How fast are our kernels for depthwise convolutions? Beside cuDNN's, on the shapes of a MobileNetV2 for CIFAR.

    python benchmarks/depthwise_kernels.py
    python benchmarks/depthwise_kernels.py --widths 0.3 --try

Microseconds of a captured call at batch 128, forward and backward (the gradients of batch and weight), and their sums
over a whole network. ``--widths`` takes narrower layers, as a cut leaves them. ``--try`` tries other sizes of work for
a program, to choose the constants in ``train/depthwise.py`` by. Needs a GPU.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from unittest import mock

import torch
from _record import ROOT, about, table, write_json

from narrowgate.train import depthwise

BATCH, REPLAYS = 128, 30
LAYERS = [  # channels, side, stride, how many of them
    *((32, 32, 1, 1), (96, 32, 1, 1), (144, 32, 1, 1), (144, 32, 2, 1), (192, 16, 1, 2), (192, 16, 2, 1)),
    *((384, 8, 1, 4), (576, 8, 1, 2), (576, 8, 2, 1), (960, 4, 1, 3)),
]
CHOICES = [  # columns, channels and warps of a program
    *((16, 64, 4), (16, 32, 4), (16, 32, 2), (32, 32, 4), (8, 64, 4), (8, 32, 2), (32, 64, 4), (32, 64, 8))
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=float, default=1.0, help="share of the channels that a layer has")
    parser.add_argument("--try", dest="tries", action="store_true", help="other sizes of work too")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "depthwise_kernels.json")
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = False
    rows, total = [], Counter[str]()
    for channels, side, stride, count in LAYERS:
        channels = max(8, round(channels * options.widths / 8) * 8)
        times = measured(channels, side, stride, options.tries)
        rows.append({"channels": channels, "side": side, "stride": stride, "layers": count, **times})
        total.update({name: us * count for name, us in times.items()})
    sums = {name: round(us) for name, us in total.items()}
    head = list(rows[0])
    cells = [[str(value) for value in row.values()] for row in rows]
    print(table(head, [*cells, ["all", "", "", "", *(str(us) for us in sums.values())]]))
    facts = {"batch": BATCH, "widths": options.widths}
    write_json(
        options.out, {"what": "us of depthwise convolutions", **about("cuda"), **facts, "rows": rows, "network": sums}
    )


def measured(channels: int, side: int, stride: int, tries: bool) -> dict[str, float]:
    """Microseconds by who does it; ours are compared with cuDNN's first."""
    make = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(BATCH, channels, side, side, **make).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(channels, 1, 3, 3, **make)
    options = [stride, stride], [1, 1], [1, 1], False, [0, 0], channels
    y = torch.conv2d(x, weight, None, stride, 1, 1, channels)
    dy, taps = torch.randn_like(y), depthwise.taps_of(weight)

    def theirs() -> tuple[torch.Tensor, ...]:
        return torch.ops.aten.convolution_backward(dy, x, weight, None, *options, [True, True, False])[:2]

    for a, b in zip((y, *theirs()), (forward(x, taps, stride), *backward(x, taps, dy, stride)), strict=True):
        assert torch.allclose(a.float(), b.float(), rtol=0.05, atol=0.01 * float(a.abs().max())), "other numbers"
    times = {
        "cuDNN forward": timed(lambda: torch.conv2d(x, weight, None, stride, 1, 1, channels)),
        "ours forward": timed(lambda: forward(x, taps, stride)),
        "cuDNN backward": timed(theirs),
        "ours backward": timed(lambda: backward(x, taps, dy, stride)),
    }
    for columns, channels_each, warps in CHOICES if tries else []:
        each = {"_COLUMNS": columns, "_CHANNELS": channels_each, "_CHANNELS_BACK": channels_each, "_WARPS": warps}
        with mock.patch.multiple(depthwise, **each):
            times[f"forward {columns} {channels_each} {warps}"] = timed(lambda: forward(x, taps, stride))
            times[f"backward {columns} {channels_each} {warps}"] = timed(lambda: backward(x, taps, dy, stride))
    return times


def forward(x: torch.Tensor, taps: torch.Tensor, stride: int) -> torch.Tensor:
    """Ours."""
    return depthwise.convolved(x, taps, stride, 1)


def backward(x: torch.Tensor, taps: torch.Tensor, dy: torch.Tensor, stride: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ours."""
    return depthwise.gradients(x, taps, dy, stride, 1)


def timed(work: Callable[[], object]) -> float:
    """Microseconds of one call, out of replays of a graph that holds it."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    graph.replay()
    torch.cuda.synchronize()
    start = perf_counter()
    for _ in range(REPLAYS):
        graph.replay()
    torch.cuda.synchronize()
    return round((perf_counter() - start) / REPLAYS * 1e6, 1)


if __name__ == "__main__":
    main()
