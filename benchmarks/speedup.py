"""Is the smaller network faster? Forward time of dense against compacted networks, interleaved in one run.

Half of all filters are zeroed at random, each layer by itself, BatchNorm shifts zero: a hard case for the aligned
layout, since residual streams lose few channels that way. Modes: eager, and on a GPU a CUDA graph; float32 on the CPU,
bfloat16 and channels_last on a GPU.

    python benchmarks/speedup.py --device cuda
    python benchmarks/speedup.py --device cpu
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torchvision
from _record import ROOT, about, table, write_json
from _zeroed import zero_half_
from torch import Tensor, nn

import narrowgate as ng

VARIANTS = {
    "aligned": {"layout": "aligned"},
    "aligned, multiples of 8": {"layout": "aligned", "round_to": 8},
    "scatter": {"layout": "scatter"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", default=["resnet50", "mobilenet_v2"])
    parser.add_argument("--batches", nargs="+", type=int)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = arguments.device
    batches = arguments.batches or ([1, 32, 256] if device == "cuda" else [1, 8])
    rows = []
    for name in arguments.models:
        for batch in batches:
            for mode in ("eager", "graph") if device == "cuda" else ("eager",):
                rows += measure(name, batch, mode, device, arguments.repeats)
    out = arguments.out or ROOT / "benchmarks" / f"speedup_{device}.json"
    write_json(out, {"what": "forward time of compacted against dense networks", **about(device), "rows": rows})
    head = ["model", "batch", "mode", "variant", "multiply-adds", "ms", "time against dense"]
    cells = [[r["model"], r["batch"], r["mode"], r["variant"], f"{r['multiply_adds']:.0%}"] for r in rows]
    numbers = [[f"{r['ms']:.3f}", f"{r['ratio']:.2f}"] for r in rows]
    print(table(head, [[str(c) for c in a + b] for a, b in zip(cells, numbers, strict=True)]))


def measure(name: str, batch: int, mode: str, device: str, repeats: int) -> list[dict[str, object]]:
    """The dense network and its compacted variants, timed in turns."""
    torch.manual_seed(0)
    dense = getattr(torchvision.models, name)().eval()
    zero_half_(dense)
    example = torch.randn(2, 3, 224, 224)
    models = {"dense": dense}
    for variant, options in VARIANTS.items():
        models[variant] = ng.compact(dense, ng.plan(dense, example, **options))  # type: ignore[arg-type]
    whole = ng.summarize(dense, example).multiply_adds
    shares = {variant: ng.summarize(model, example).multiply_adds / whole for variant, model in models.items()}
    x = torch.randn(batch, 3, 224, 224, device=device)
    runs = {variant: runner(model, x, mode, device) for variant, model in models.items()}
    times: dict[str, list[float]] = {variant: [] for variant in runs}
    for _ in range(repeats):
        for variant, run in runs.items():
            times[variant].append(timed(run, device))
    median = {variant: statistics.median(values) for variant, values in times.items()}
    return [
        {
            "model": name,
            "batch": batch,
            "mode": mode,
            "variant": variant,
            "multiply_adds": shares[variant],
            "ms": median[variant] * 1e3,
            "quartiles_ms": [q * 1e3 for q in statistics.quantiles(times[variant], n=4)],
            "ratio": median[variant] / median["dense"],
        }
        for variant in runs
    ]


@torch.no_grad()
def runner(model: nn.Module, x: Tensor, mode: str, device: str) -> Callable[[], object]:
    """A call that runs the model once, warmed up."""
    if device == "cuda":
        model = model.to(device, torch.bfloat16, memory_format=torch.channels_last)  # type: ignore[call-overload]
        x = x.to(torch.bfloat16, memory_format=torch.channels_last)

    def run() -> object:
        with torch.no_grad():
            return model(x)

    for _ in range(3):
        run()
    if mode == "eager":
        return run
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def timed(run: Callable[[], object], device: str) -> float:
    """Seconds for one call; on a GPU ten in a row, so that the clock sees the work and not the launch."""
    if device == "cpu":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    start_event, stop_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start_event.record()
    for _ in range(10):
        run()
    stop_event.record()
    torch.cuda.synchronize()
    return float(start_event.elapsed_time(stop_event)) / 1e4


if __name__ == "__main__":
    main()
