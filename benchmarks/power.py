"""How much is removed, next to a count by brute force of what a network needs.

    python benchmarks/power.py                      # about an hour on one core, two thirds of it resnet50
    python benchmarks/power.py --workers 12         # twelve processes, the same numbers
    python benchmarks/power.py --only resnet164     # one network

Needs the package installed and torchvision. Writes ``benchmarks/power.json`` and ``benchmarks/power.md``, or what
``--out some/where.json`` names. Targets: with zero shifts ``scatter`` leaves at most 1.02 times the brute-force count;
with random shifts, N(0, 0.1), ``exact`` leaves at most 1.15 times that count and the outputs do not move.

Half of the filters of every layer but the last are zero, drawn layer by layer; BatchNorm means are zero, variances fit
the data. The brute-force count knows nothing of graphs: it runs the network on many random images, forward and
backward, in float64, and notes for each layer which input channels ever change, which output channels ever change, and
which of those the output ever has a non-zero derivative for. A weight w[o, i] is needed if its output channel o changes
and matters and its input channel i changes; scale and shift of a BatchNorm are needed if its channel changes and
matters. Channels that no image happens to excite are missed, so the count grows a little with the number of images: it
is given at every step. The same count with every ReLU made leaky, so that no channel is missed for lack of luck, is
given beside it.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from _record import ROOT, about, write_json
from _workers import Job, Limits, add_options, outcomes
from _zeroed import batch_norms, mixers, parameters, zero_half_
from torch import Tensor, nn
from torch.nn import functional as F

import narrowgate as ng

RESULTS = ROOT / "benchmarks" / "power.json"
SHIFT = 0.1
TARGETS = {"scatter": 1.02, "exact": 1.15}
SHIFTS = {"zero_shifts": 0.0, "random_shifts": SHIFT}
LAYOUTS = ("aligned", "scatter")
CHUNK = 64  # images that one process looks at
Seen = dict[str, dict[str, list[bool]]]


def networks() -> dict[str, Callable[[], nn.Module]]:
    """The four networks by name."""
    from torchvision import models

    from narrowgate.models import resnet164

    return {
        "resnet50": models.resnet50,
        "mobilenet_v2": models.mobilenet_v2,
        "densenet121": models.densenet121,
        "resnet164": lambda: resnet164(classes=10),
    }


def pixels(name: str) -> int:
    return 32 if name == "resnet164" else 64


def zeroed(name: str, shift: float, seed: int = 0) -> nn.Module:
    """A network with half of its filters zero, BatchNorm means zero and shifts N(0, shift); the same filters always."""
    torch.manual_seed(seed)
    model = networks()[name]().double().eval()
    zero_half_(model)
    for norm in batch_norms(model):
        with torch.no_grad():
            norm.weight.uniform_(0.5, 1.5)
            norm.bias.copy_(torch.randn_like(norm.bias) * shift)
    fit_variances_(model, images(name, 8))
    return model


@torch.no_grad()
def fit_variances_(model: nn.Module, batch: Tensor) -> None:
    """Running variances from one batch, running means zero, so that a channel that was zero stays zero."""
    hooks = [norm.register_forward_pre_hook(_fit_variance) for norm in batch_norms(model)]
    model(batch)
    for hook in hooks:
        hook.remove()


def _fit_variance(norm: nn.Module, inputs: tuple[Tensor]) -> None:
    square = inputs[0].square().mean((0, 2, 3))
    norm.running_mean.zero_()
    norm.running_var.copy_(torch.where(square > 0, square, torch.ones_like(square)))


def images(name: str, count: int) -> Tensor:
    """Random images of many kinds: white noise, smooth, dark and bright, one colour, one bright spot."""
    size = pixels(name)
    white = torch.randn(count, 3, size, size, dtype=torch.float64)
    smooth = F.interpolate(torch.randn(count, 3, 4, 4, dtype=torch.float64), (size, size), mode="bilinear") * 2
    flat = torch.randn(count, 3, 1, 1, dtype=torch.float64) * 2
    spot = torch.zeros_like(white)
    for one in spot:
        row, column = torch.randint(size, (2,)).tolist()
        one[:, row, column] = torch.randn(3, dtype=torch.float64) * 20
    kinds = torch.stack([white, smooth + flat, white * 0.3 + flat, spot + smooth])
    return kinds[torch.arange(count) % len(kinds), torch.arange(count)]


class Counter:
    """What brute force has seen: by layer, which channels changed and which mattered."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = {**mixers(model), **{n: m for n, m in model.named_modules() if m in set(batch_norms(model))}}
        self.seen: dict[str, dict[str, Tensor]] = {name: {} for name in self.layers}
        for name, layer in self.layers.items():
            layer.register_forward_hook(self._forward(name))

    def _forward(self, name: str) -> Callable[..., None]:
        def hook(layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
            self._note(name, "inputs", inputs[0], changes)
            self._note(name, "outputs", output, changes)
            output.register_hook(lambda grad: self._note(name, "matter", grad, nonzero))

        return hook

    def _note(self, name: str, what: str, tensor: Tensor, test: Callable[[Tensor], Tensor]) -> None:
        found = test(tensor.detach())
        seen = self.seen[name]
        seen[what] = seen[what] | found if what in seen else found


def by_channel(tensor: Tensor) -> Tensor:
    return tensor.movedim(1, 0).flatten(1)


def changes(tensor: Tensor) -> Tensor:
    """Which channels are not the same number everywhere."""
    rows = by_channel(tensor)
    return (rows != rows[:, :1]).any(1)


def nonzero(tensor: Tensor) -> Tensor:
    """Which channels have anything but zeros."""
    return by_channel(tensor).ne(0).any(1)


def needed_by(layer: nn.Module, inputs: Tensor, outputs: Tensor, matter: Tensor) -> int:
    live = outputs & matter
    if isinstance(layer, nn.modules.batchnorm._BatchNorm):
        return 2 * int(live.sum())
    taps = layer.weight[0, 0].numel()
    groups = getattr(layer, "groups", 1)
    pairs = live.reshape(groups, -1).sum(1) * inputs.reshape(groups, -1).sum(1)
    return taps * int(pairs.sum()) + (int(live.sum()) if layer.bias is not None else 0)


def look(name: str, chunk: int, leaky: bool) -> Seen:
    """What one lot of images shows, by layer; the same for the same number of the lot."""
    model = zeroed(name, 0.0)
    if leaky:
        make_leaky_(model)
    counter = Counter(model)
    torch.manual_seed(1000 + chunk)
    with functional_leaky(leaky):
        for _ in range(CHUNK // 16):
            output = model(images(name, 16).requires_grad_())
            (output * torch.randn_like(output)).sum().backward()
            model.zero_grad()
    return {layer: {what: found.tolist() for what, found in seen.items()} for layer, seen in counter.seen.items()}


def needed(name: str, lots: list[Seen]) -> int:
    """Parameters a network needs that has just the channels which these lots of images show."""
    count = 0
    for layer, module in Counter(networks()[name]()).layers.items():
        seen = {what: torch.tensor([lot[layer][what] for lot in lots]).any(0) for what in lots[0][layer]}
        count += needed_by(module, **seen) if seen else 0
    return count


def make_leaky_(model: nn.Module) -> None:
    """Every ReLU lets a tenth of what is negative through, zero still gives zero, and nothing saturates."""
    for module in model.modules():
        for key, child in module.named_children():
            if isinstance(child, (nn.ReLU, nn.ReLU6)):
                setattr(module, key, nn.LeakyReLU(0.1))


class functional_leaky:
    """Inside, ``F.relu`` is leaky too: DenseNet and the pre-activation ResNet call it."""

    def __init__(self, active: bool) -> None:
        self.active = active

    def __enter__(self) -> None:
        self.relu = F.relu
        if self.active:
            F.relu = lambda x, inplace=False: F.leaky_relu(x, 0.1)

    def __exit__(self, *error: object) -> None:
        F.relu = self.relu


def compacted(name: str, shift: float, layout: str) -> dict[str, Any]:
    """What a layout leaves, and what the outputs lose."""
    model, example = zeroed(name, shift), images(name, 4)
    small = ng.compact(model, ng.plan(model, example, layout=layout))
    checked = ng.verify(model, small, example)
    return {"parameters": parameters(small), "error": checked.relative_error, "noise": checked.noise}


def jobs_of(names: list[str], lots: int) -> dict[str, Job]:
    """Everything there is to measure, the longest first."""
    jobs: dict[str, Job] = {}
    for name in names:
        jobs |= {f"{name} lot {chunk}": functools.partial(look, name, chunk, False) for chunk in range(lots)}
        jobs[f"{name} leaky"] = functools.partial(look, name, 0, True)
        for title, shift in SHIFTS.items():
            for layout in LAYOUTS:
                jobs[f"{name} {title} {layout}"] = functools.partial(compacted, name, shift, layout)
    return jobs


def assembled(name: str, found: dict[str, Any], counts: list[int]) -> dict[str, Any]:
    """One network's results from those of its jobs."""
    lots = [found[f"{name} lot {chunk}"] for chunk in range(max(counts) // CHUNK)]
    brute = {str(count): needed(name, lots[: count // CHUNK]) for count in counts}
    needs = max(brute.values())
    result: dict[str, Any] = {
        "parameters": parameters(networks()[name]()),
        "brute_force": needs,
        "brute_force_by_images": brute,
        "brute_force_leaky_by_images": {str(CHUNK): needed(name, [found[f"{name} leaky"]])},
    }
    for title in SHIFTS:
        by_layout = {layout: found[f"{name} {title} {layout}"] for layout in LAYOUTS}
        result[title] = {
            layout: {**one, "over_brute_force": round(one["parameters"] / needs, 4)}
            for layout, one in by_layout.items()
        }
    return result


def rows(record: dict[str, Any]) -> Iterator[str]:
    head = "network", "parameters, M", "brute force", "aligned", "scatter", "over brute force"
    shifted_head = "with shifts: aligned", "scatter", "over brute force", "largest error"
    yield "| " + " | ".join([*head, *shifted_head]) + " |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for name, found in record["networks"].items():
        zero, shifted = found["zero_shifts"], found["random_shifts"]
        error = max(part[layout]["error"] for part in (zero, shifted) for layout in part)
        cells = [name, *(f"{count / 1e6:.3f}" for count in (found["parameters"], found["brute_force"]))]
        for part in (zero, shifted):
            cells += [f"{part[layout]['parameters'] / 1e6:.3f}" for layout in ("aligned", "scatter")]
            cells.append(f"{part['scatter']['over_brute_force']:.3f}")
        yield "| " + " | ".join([*cells, f"{error:.0e}"]) + " |"


def page(record: dict[str, Any]) -> str:
    return "\n".join(
        [
            "# Power: what is left, next to what is needed",
            "",
            f"Made by `{record['about']['command']}` ({record['about']['date'][:10]}). Numbers in full: `power.json`; "
            "how the brute-force count is made: `power.py`.",
            "",
            "Half of the filters zeroed at random. Left: BatchNorm shifts zero; target, scatter at most "
            f'{TARGETS["scatter"]} times brute force. Right: shifts N(0, {SHIFT}), `constants="exact"`; target at most '
            f"{TARGETS['exact']} times the same count. Errors are relative to the outputs' spread, in float64.",
            "",
            *rows(record),
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="networks whose name contains this; other results stay")
    parser.add_argument("--images", type=int, nargs="+", default=[64, 256, 1024], help="report the count after these")
    parser.add_argument("--out", type=Path, default=RESULTS)
    add_options(parser, seconds=900.0)
    options = parser.parse_args()
    counts = sorted(options.images)
    if any(count % CHUNK for count in counts):
        parser.error(f"--images: multiples of {CHUNK}")
    record = json.loads(options.out.read_text()) if options.only and options.out.exists() else {"networks": {}}
    names = [name for name in networks() if options.only in name]
    found: dict[str, Any] = {}
    failed: list[str] = []
    for key, outcome in outcomes(jobs_of(names, max(counts) // CHUNK), Limits.of(options)):
        found[key] = outcome.value
        print(f"{key:<40} {outcome.seconds:6.1f} s  {outcome.failure}", flush=True)
        failed += [key] if outcome.failure else []
    for name in names:
        if any(key.startswith(f"{name} ") for key in failed):
            print(f"{name}: no result, see above")
            continue
        record["networks"][name] = assembled(name, found, counts)
        print(name, json.dumps(record["networks"][name], indent=1), flush=True)
    record["networks"] = {name: record["networks"][name] for name in networks() if name in record["networks"]}
    record["about"] = about()
    write_json(options.out, record)
    options.out.with_suffix(".md").write_text(page(record))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
