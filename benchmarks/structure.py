"""What is left, and how long it takes, when streams and whole blocks go and not only what is inside blocks.

    python benchmarks/structure.py          # a CPU, about ten minutes

Streams: half of all gates are closed at random (after the norm, or on layer and norm together), once with a gate for
every channel of every layer and once with one for every channel of a stream (``narrowgate.coupled``).
Blocks: the last scale of every second residual branch is zero; the small network as it is, and as it was before blocks
went as a whole, with one channel of each dead branch kept.

Nothing is trained: this says nothing about accuracy. All small networks are verified against the large ones. Each is
timed in turns with its dense network. Needs torchvision and the package with its ``export`` extra. Writes
``benchmarks/structure.json`` and a table beside it.
"""

from __future__ import annotations

import argparse
import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torchvision
from _record import ROOT, about, write_json
from torch import nn

import narrowgate as ng
from narrowgate.groups import branch_ends_of
from narrowgate.measure.latency import latency

HEAD = ["network", "what", "layout", "parameters left", "multiply-adds left", "time / dense"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=224, help="height and width of the images")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "structure.json")
    arguments = parser.parse_args()
    example = torch.randn(2, 3, arguments.size, arguments.size)
    rows: list[dict[str, Any]] = []
    for row, dense, small in (*streams(example), *blocks(example)):
        rows.append(row | sizes(dense, small, example) | {"time": time(dense, small, example, arguments)})
        facts = {"size": arguments.size, "batch": arguments.batch, "rows": rows}
        write_json(arguments.out, {"what": "streams and blocks", **about("cpu"), **facts})
        arguments.out.with_suffix(".md").write_text(page(rows))
        print(*cells(rows[-1]), sep=" | ", flush=True)


def streams(example: torch.Tensor) -> Any:
    """Networks with half of their gates closed, cut."""
    for name, norm, layouts in (
        ("resnet50", nn.BatchNorm2d, (("channels", "aligned"), ("channels", "scatter"), ("coupled", "aligned"))),
        ("resnet50, GroupNorm", group_norm, (("channels", "scatter"), ("coupled", "scatter"))),
    ):
        torch.manual_seed(0)
        dense = torchvision.models.resnet50(norm_layer=norm).eval()
        for groups, layout in layouts:
            model = copy.deepcopy(dense)
            chosen = groups if groups == "channels" else ng.coupled(model, example)
            gates = ng.attach_gates_(model, groups=chosen, placement="after-norm")
            torch.manual_seed(1)
            for gate in gates.modules():
                gate.close_(torch.randperm(gate.size) < gate.size // 2)
            what = "half of all gates, one for each " + (
                "layer's channel" if groups == "channels" else "stream's channel"
            )
            yield {"network": name, "what": what, "layout": layout}, dense, cut(model, example, layout)


def group_norm(width: int) -> nn.Module:
    return nn.GroupNorm(32, width)


def blocks(example: torch.Tensor) -> Any:
    """Networks with every second branch dead, cut as they are and with one channel of each left."""
    for name in ("resnet50", "mobilenet_v2", "vit_b_16"):
        torch.manual_seed(0)
        dense = getattr(torchvision.models, name)().eval()
        if name == "vit_b_16":
            nn.init.normal_(dense.heads.head.weight, std=0.02)  # torchvision's starts at zero
        model = copy.deepcopy(dense)
        with torch.no_grad():
            for _, layer in list(branch_ends_of(model))[1::2]:
                layer.weight.zero_()
                layer.bias.zero_()
        plan = ng.plan(model, example)
        for what, made in (("one channel kept", replace(plan, idle={})), ("gone", plan)):
            small = ng.compact(model, made)
            ng.verify(model, small, example, other_sizes=False)
            yield {"network": name, "what": f"every second branch dead, {what}", "layout": "aligned"}, dense, small


def cut(model: nn.Module, example: torch.Tensor, layout: str) -> nn.Module:
    small = ng.compact(model, ng.plan(model, example, layout=layout))
    ng.verify(model, small, example, other_sizes=False)
    return small


def sizes(dense: nn.Module, small: nn.Module, example: torch.Tensor) -> dict[str, Any]:
    before, after = ng.summarize(dense, example[:1]), ng.summarize(small, example[:1])
    return {
        "parameters": after.parameters,
        "parameters_left": after.parameters / before.parameters,
        "multiply_adds_left": after.multiply_adds / before.multiply_adds,
    }


def time(dense: nn.Module, small: nn.Module, example: torch.Tensor, arguments: argparse.Namespace) -> float:
    """The small network's time over the dense one's, by ONNX Runtime."""
    how: dict[str, Any] = {"devices": ["cpu"], "modes": ["onnx"], "batches": [arguments.batch]}
    (timing,) = latency(dense, small, example, rounds=arguments.rounds, seconds=40, **how).timings
    return timing.ratio.median


def cells(row: dict[str, Any]) -> list[str]:
    left = [f"{row[key]:.1%}" for key in ("parameters_left", "multiply_adds_left")]
    return [row["network"], row["what"], row["layout"], *left, f"{row['time']:.2f}"]


def page(rows: list[dict[str, Any]]) -> str:
    lines = ["| " + " | ".join(line) + " |" for line in (HEAD, ["---"] * len(HEAD), *map(cells, rows))]
    title = "# Streams and blocks\n\nMade by `python benchmarks/structure.py` ([numbers](structure.json)).\n\n"
    return title + "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
