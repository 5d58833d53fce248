"""What would shrinking save on 64 GPUs? A simulation from measured step times and counted bytes; nothing ran there.

Step times come from files of other benchmarks, sizes from the networks themselves, and gradients are exchanged by a
ring all-reduce of time 2 (n - 1) alpha + 2 (n - 1) / n * bytes / beta. What is assumed is in
``ASSUMED`` of ``_scale_model.py``, by name.

    python benchmarks/scale.py             # simulate: the JSON file, the page's tables and the figure
    python benchmarks/scale.py --memory    # measure again what planning without memory takes
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from _record import ROOT, about, write_json
from _scale_model import ASSUMED, BATCH, GPUS, Network, Phase, all_reduce, bytes_of_run, link, links, saved, scaling

FILE = ROOT / "benchmarks" / "scale.json"
LOG = "results/cifar100/unfinished/ours-mobilenetv2-budget-seed0.metrics.jsonl"
FORWARD = "benchmarks/speedup_cuda.json"
IMAGES = {"cifar100": 50_000, "imagenet": 1_281_167}


def logged_run() -> tuple[Network, dict[str, Any]]:
    """The run that shrank: for each size its epochs and median step, and what its cuts took beyond ordinary epochs."""
    rows = [json.loads(line) for line in (ROOT / LOG).read_text().splitlines()]
    # A cut is made at the end of its epoch, and the next one begins with compiling and capturing the smaller step.
    cuts = [row["epoch"] for row in rows if row["event"].startswith("shrunk")]
    slow = {1, *cuts, *(epoch + 1 for epoch in cuts)}
    phases, cut_seconds = [], 0.0
    for first, last in pairwise([0, *cuts, len(rows)]):
        own = rows[first:last]
        usual = [row for row in own if row["epoch"] not in slow]
        step = BATCH / statistics.median(row["images_per_second"] for row in usual)
        phases.append(Phase(len(own), rows[max(0, first - 1)]["parameters"], step))
        seconds = statistics.median(row["seconds"] for row in usual)
        cut_seconds += sum(row["seconds"] - seconds for row in own if row["epoch"] in slow - {1})
    sizes = list(dict.fromkeys((row["parameters"], row["multiply_adds"]) for row in rows))
    assert [size[0] for size in sizes] == [phase.parameters for phase in phases]
    facts = {
        "file": LOG,
        "epochs": len(rows),
        "epochs_planned": rows[0]["epochs"],
        "cuts_at_epochs": cuts,
        "cut_seconds": round(cut_seconds, 2),
        "planning_seconds": sum(float(row["event"].split()[-2]) for row in rows if row["epoch"] in cuts),
        "multiply_adds": [size[1] for size in sizes],
    }
    return Network("MobileNetV2, CIFAR-100", IMAGES["cifar100"], tuple(phases), cut_seconds), facts


def compacted(name: str) -> dict[str, int]:
    """Parameters and multiply-adds of a network of ``speedup.py`` and of what it was cut to, counted here."""
    import torch
    import torchvision
    from _zeroed import zero_half_

    import narrowgate as ng

    torch.manual_seed(0)
    dense = getattr(torchvision.models, name)().eval()
    zero_half_(dense)
    example = torch.randn(2, 3, 224, 224)
    small = ng.compact(dense, ng.plan(dense, example, round_to=8))
    whole, left = ng.summarize(dense, example), ng.summarize(small, example)
    return {
        "parameters": whole.parameters,
        "parameters_small": left.parameters,
        "multiply_adds": whole.multiply_adds,
        "multiply_adds_small": left.multiply_adds,
    }


def forward_ms(name: str) -> dict[str, float]:
    """Milliseconds of a forward pass of the network and of what it was cut to, and the share of multiply-adds left."""
    rows = json.loads((ROOT / FORWARD).read_text())["rows"]
    wanted = {"dense": "dense", "small": "aligned, multiples of 8"}
    found: dict[str, float] = {}
    for key, variant in wanted.items():
        kind = {"model": name, "batch": BATCH, "mode": "graph", "variant": variant}
        (row,) = [row for row in rows if all(row[field] == value for field, value in kind.items())]
        found |= {key: row["ms"], f"{key}_multiply_adds": row["multiply_adds"]}
    return found


def imagenet(name: str, title: str, sizes: dict[str, int], log: dict[str, Any], forwards: float) -> Network:
    """A run on ImageNet with a single cut, at the share of epochs at which the logged run made its last one."""
    times = forward_ms(name)
    share = sizes["multiply_adds_small"] / sizes["multiply_adds"]
    assert abs(share - times["small_multiply_adds"]) < 1e-9, "not the network that was timed"
    epochs = ASSUMED["imagenet_epochs"]
    before = round(epochs * log["cuts_at_epochs"][-1] / log["epochs_planned"])
    dense = Phase(before, sizes["parameters"], forwards * times["dense"] / 1e3)
    small = Phase(epochs - before, sizes["parameters_small"], forwards * times["small"] / 1e3)
    return Network(title, IMAGES["imagenet"], (dense, small), log["cut_seconds"] / len(log["cuts_at_epochs"]))


TITLES = {"resnet50": "ResNet-50, ImageNet", "mobilenet_v2": "MobileNetV2, ImageNet"}


def networks(sizes: dict[str, dict[str, int]], forwards: float | None = None) -> list[Network]:
    """All networks of the page."""
    run, log = logged_run()
    times = ASSUMED["forwards_per_step"] if forwards is None else forwards
    return [run, *(imagenet(name, title, sizes[name], log, times) for name, title in TITLES.items())]


def full_size() -> dict[str, Any]:
    """Measured steps of networks that did not shrink, beside the all-reduce of their gradients on 64 GPUs."""
    from narrowgate.models import build

    found = {}
    for name in ("mobilenetv2", "densenet40", "resnet164"):
        file = f"benchmarks/train_speed_cuda_{name}.json"
        rows = json.loads((ROOT / file).read_text())["rows"]
        fastest = min(rows, key=lambda row: row["ms"])
        parameters = sum(p.numel() for p in build(name, 100).parameters())
        seconds = all_reduce(GPUS[-1], ASSUMED["bytes_per_gradient"] * parameters, *link())
        found[name] = {
            "file": file,
            "loop": fastest["loop"],
            "step_ms": fastest["ms"],
            "parameters": parameters,
            "all_reduce_ms": round(1e3 * seconds, 6),
        }
    return found


def simulate(sizes: dict[str, dict[str, int]]) -> dict[str, Any]:
    """All numbers of the page that follow from measurements and assumptions."""
    found: dict[str, Any] = {}
    for network in networks(sizes):
        found[network.name] = {
            "phases": [asdict(phase) for phase in network.phases],
            "cut_seconds": round(network.cut_seconds, 2),
            "scaling": scaling(network),
            "links": links(network),
            "sent_gb": [round(bytes_of_run(network, shrinks) / 1e9, 3) for shrinks in (False, True)],
        }
    by_forwards = {
        str(forwards): {n.name: round(saved(n, GPUS[-1], link(), False), 6) for n in networks(sizes, forwards)[1:]}
        for forwards in ASSUMED["forwards_range"]
    }
    return {"networks": found, "saved_by_forwards_per_step": by_forwards}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", action="store_true", help="measure planning without memory too (a minute)")
    arguments = parser.parse_args()
    import _scale_memory
    import _scale_page

    before = json.loads(FILE.read_text()) if FILE.exists() else {}
    memory = _scale_memory.measure() if arguments.memory or "memory" not in before else before["memory"]
    sizes = {name: compacted(name) for name in TITLES}
    what = {"what": "a simulation of what shrinking saves on 64 GPUs, and the memory that planning takes", **about()}
    log = logged_run()[1]
    found = {"full_size": full_size(), **simulate(sizes)}
    write_json(FILE, {**what, "assumed": ASSUMED, "log": log, "sizes": sizes, **found, "memory": memory})
    for path in _scale_page.write(json.loads(FILE.read_text())):
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
