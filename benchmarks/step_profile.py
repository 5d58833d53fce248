"""Where does a training step on a GPU spend its time? The kernels of one captured step, by kind.

    python benchmarks/step_profile.py --data cifar100.npz --models resnet164 densenet40 mobilenetv2

Prints a table a network. ``mobilenetv2:0.5`` closes that share of the gates, at random, and cuts the network first.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections import Counter
from pathlib import Path
from time import perf_counter

import torch
from _record import ROOT, about, table, write_json
from torch.profiler import ProfilerActivity, profile
from train_speed import GPU_RECIPE, Engine

from narrowgate.train.step import GraphLoop
from narrowgate.train.training import Training

STEPS, TIMED_STEPS = 5, 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=["resnet164", "densenet40", "mobilenetv2"])
    parser.add_argument("--rows", type=int, default=25, help="kinds of kernels to print (default 25)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "step_profile.json")
    options = parser.parse_args()
    found = {}
    for model in options.models:
        time, count, wall = kernels_of(*model.partition(":")[::2], options.data)
        total = sum(time.values())
        print(f"{model}: {wall:.2f} ms a step, {total / 1000:.2f} of them in {sum(count.values()):.0f} kernels")
        rows = [[f"{us:.0f}", f"{us / total:.1%}", f"{count[name]:.0f}", name] for name, us in time.most_common()]
        print(table(["us", "share", "kernels", "kind"], rows[: options.rows]), flush=True)
        kinds = {name: {"us": round(us, 1), "kernels": count[name]} for name, us in time.most_common()}
        found[model] = {"ms": round(wall, 3), "kernels": kinds}
        write_json(options.out, {"what": "kernels of a training step", **about("cuda"), "models": found})


def kernels_of(model: str, closed: str, data: Path) -> tuple[Counter[str], Counter[str], float]:
    """Microseconds and number of kernels a step, by kind; milliseconds a step without the profiler."""
    text = GPU_RECIPE.format(model=model, placement="after-norm", compile="false")
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(text.replace('when = "off"', 'when = "during"\nevery = 1'), data, Path(folder), "cuda")
        training = engine.training
        if closed:
            cut_(training, float(closed))
        loop = training.loop_for(training.parts)
        training.run_epoch(loop, 0, training.recipe.lr_at)  # captures the graph
        assert isinstance(loop, GraphLoop) and loop._graph is not None, "the step could not be captured"
        training.feed.start(1)
        torch.cuda.synchronize()
        start = perf_counter()
        for _ in range(TIMED_STEPS):
            loop._graph.replay()
        torch.cuda.synchronize()
        wall = (perf_counter() - start) * 1000 / TIMED_STEPS
        with profile(activities=[ProfilerActivity.CUDA]) as watched:
            for _ in range(STEPS):
                loop._graph.replay()
            torch.cuda.synchronize()
        engine.close()
    time: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for event in watched.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            time[kind_of(event.name)] += event.device_time_total / STEPS
            count[kind_of(event.name)] += 1 / STEPS
    return time, count, wall


@torch.no_grad()
def cut_(training: Training, share: float) -> None:
    """Close this share of the gates at random, one of each layer stays open, and cut the network."""
    assert training.parts.gates is not None and training.shrinker is not None
    generator = torch.Generator().manual_seed(0)
    for gate in training.parts.gates.modules():
        closed = torch.rand(gate.size, generator=generator) < share
        closed[0] = False
        gate.g[closed.to(gate.g.device)] = 0.0
    training.shrinker.step(0)


def kind_of(kernel: str) -> str:
    """A kernel's name without what it was compiled for."""
    return re.sub(r"[<(].*", "", kernel.removeprefix("void ").replace("(anonymous namespace)::", ""))[:80]


if __name__ == "__main__":
    main()
