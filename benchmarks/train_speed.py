"""How fast does the engine train? Epochs of ``narrowgate train`` and of plain PyTorch loops, taken in turns in one run.

On a GPU (``--data`` is a CIFAR-100 array file) the plain loop is the usual training script: the network without
gates, a ``DataLoader`` with worker processes and torchvision's augmentation, float32, no graph. Another is the usual
pruning script: the same, with gates as one writes them by hand, a module behind each convolution and a penalty.
``--plain-bf16`` adds one under autocast. The engine trains the *gated* network from a recipe, as a CUDA graph (gates
before the norm as in the paper, and after it) and as a compiled one.

On a CPU (MNIST, LeNet-5) the plain loop trains the same gated network with the same penalty over tensors in memory, and
the engine's whole epoch counts, evaluation included in both.

    python benchmarks/train_speed.py --device cuda --data cifar100.npz
    python benchmarks/train_speed.py --device cpu --data mnist.npz
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from _record import ROOT, about, table, write_json
from torch import Tensor, nn
from torch.nn import functional as F

import narrowgate as ng
from narrowgate import models
from narrowgate.train.data import Data, load_data
from narrowgate.train.engine import launch
from narrowgate.train.feed import Place
from narrowgate.train.recipe import Recipe
from narrowgate.train.show import Show
from narrowgate.train.training import Training

BATCH, WORKERS = 128, 8
MEAN, STD = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
BY_HAND = "gates by hand, float32"
GPU_MODELS = ("resnet164", "densenet40", "mobilenetv2")
GPU_RECIPE = """
[model]
name = "{model}"
[data]
source = "npz"
augment = "crop-flip"
[gates]
placement = "{placement}"
[penalty]
kind = "bounded-l1"
strength = 1e-4
[optimizer]
weight_decay = 1e-4
[train]
epochs = 1000
precision = "bf16"
evaluate_every = 1000
compile = {compile}
[shrink]
when = "off"
"""
CPU_RECIPE = """
[model]
name = "lenet5"
[data]
source = "mnist"
[penalty]
kind = "bounded-l1"
strength = 3e-3
[train]
epochs = 1000
[shrink]
when = "during"
"""


class Turn(Protocol):
    """One kind of loop; each call is a turn of it and gives milliseconds a step."""

    def __call__(self) -> float: ...

    def close(self) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=GPU_MODELS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plain-steps", type=int, default=100, help="GPU: steps of a plain loop's turn")
    parser.add_argument("--plain-bf16", action="store_true", help="GPU: a plain loop under autocast as well")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--try-kernels", action="store_true", help="GPU: cudnn.benchmark, for all loops alike")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.backends.cudnn.benchmark = arguments.try_kernels
    rows: list[dict[str, Any]] = []
    out = arguments.out or ROOT / "benchmarks" / f"train_speed_{arguments.device}.json"
    facts = {"cudnn_benchmark": arguments.try_kernels}
    for name in arguments.models if arguments.device == "cuda" else ("lenet5",):
        rows += measure(name, arguments)
        write_json(
            out, {"what": "training speed, in turns", **about(arguments.device), "batch": BATCH, **facts, "rows": rows}
        )
    head = ["model", "loop", "ms a step", "images/s", "times plain", "times gates by hand"]
    keys = ("model", "loop", "ms", "images_per_second", "ratio", "ratio_to_gates_by_hand")
    print(table(head, [[str(row.get(key, "")) for key in keys] for row in rows]))


def measure(name: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds a step of every loop for one network, medians over rounds in which each has its turn."""
    with tempfile.TemporaryDirectory() as folder:
        if arguments.device == "cpu":
            loops = dict(cpu_loops(arguments.data, Path(folder)))
        else:
            loops = dict(gpu_loops(name, arguments, Path(folder)))
        times: dict[str, list[float]] = {label: [] for label in loops}
        first = {label: turn() for label, turn in loops.items()}  # capture, compile and worker start
        for _ in range(arguments.rounds):
            for label, turn in loops.items():
                times[label].append(turn())
        for turn in loops.values():
            turn.close()
    ms = {label: statistics.median(values) for label, values in times.items()}
    plain, gated = ms[next(iter(ms))], ms.get(BY_HAND)
    return [
        {
            "model": name,
            "loop": label,
            "ms": round(ms[label], 3),
            "all_ms": [round(value, 3) for value in times[label]],
            "first_ms": round(first[label], 3),
            "images_per_second": round(BATCH / ms[label] * 1000),
            "ratio": round(plain / ms[label], 3),
            **({"ratio_to_gates_by_hand": round(gated / ms[label], 3)} if gated else {}),
        }
        for label in loops
    ]


def gpu_loops(name: str, arguments: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Turn]]:
    """Plain loops first, then the engine's."""
    yield "plain, float32", Plain(name, arguments.data, arguments.plain_steps)
    yield BY_HAND, Plain(name, arguments.data, arguments.plain_steps, gated=True)
    if arguments.plain_bf16:
        yield "plain, bfloat16", Plain(name, arguments.data, arguments.plain_steps, bf16=True)
    kinds = [("engine, graph", "before-norm", "false"), ("engine, graph, gates after the norm", "after-norm", "false")]
    if not arguments.no_compile:
        kinds.append(("engine, compiled graph", "before-norm", "true"))
    for label, placement, compiled in kinds:
        text = GPU_RECIPE.format(model=name, placement=placement, compile=compiled)
        yield label, Engine(text, arguments.data, folder / f"{placement}-{compiled}", "cuda")


def cpu_loops(data: Path, folder: Path) -> Iterator[tuple[str, Turn]]:
    """The same gated LeNet-5 by hand and by the engine."""
    yield "plain", PlainLeNet(data)
    yield "engine", Engine(CPU_RECIPE, data, folder, "cpu", whole=True)


class Engine:
    """One epoch of the engine a turn; milliseconds a step."""

    def __init__(self, text: str, data: Path, folder: Path, device: str, whole: bool = False) -> None:
        recipe = Recipe.from_toml(text)
        fabric = launch(device, 1, 1)
        place = Place(fabric.device)
        folder.mkdir(exist_ok=True)
        loaded = load_data(recipe.data, str(data))
        self.training = Training(recipe, folder, loaded, place, fabric, Show(None, 1, quiet=True))
        self.whole = whole

    def close(self) -> None:
        """Let go of the log, and of the network on the GPU."""
        self.training.close()
        del self.training

    def __call__(self) -> float:
        row = self.training.one_epoch()
        seconds = row.seconds if self.whole else BATCH * self.training.feed.steps / row.images_per_second
        return seconds * 1000 / self.training.feed.steps


class Plain:
    """A stretch of the usual script a turn, from a DataLoader; milliseconds a step."""

    def __init__(self, name: str, path: Path, steps: int, bf16: bool = False, gated: bool = False) -> None:
        from torchvision import transforms

        with np.load(path) as arrays:
            images, labels = arrays["x_train"], arrays["y_train"].astype(np.int64)
        pipeline = transforms.Compose(
            [
                transforms.ToPILImage(),
                transforms.RandomCrop(32, padding=4),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(MEAN, STD),
            ]
        )
        self.loader = torch.utils.data.DataLoader(
            _Augmented(images, labels, pipeline),
            BATCH,
            shuffle=True,
            drop_last=True,
            num_workers=WORKERS,
            pin_memory=True,
            persistent_workers=True,
        )
        self.batches = iter(self.loader)
        model = models.build(name, 100)
        self.gates = gate_by_hand(model) if gated else []
        self.model = model.cuda().train()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, 0.9, weight_decay=1e-4)
        self.bf16, self.steps = bf16, steps

    def close(self) -> None:
        """Stop the worker processes."""
        del self.batches, self.loader

    def __call__(self) -> float:
        self._step()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(self.steps):
            self._step()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1000 / self.steps

    def _step(self) -> None:
        try:
            images, labels = next(self.batches)
        except StopIteration:
            self.batches = iter(self.loader)
            images, labels = next(self.batches)
        images, labels = images.cuda(non_blocking=True), labels.cuda(non_blocking=True)
        self.optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=self.bf16):
            loss = F.cross_entropy(self.model(images), labels)
        for gate in self.gates:
            loss = loss + 1e-4 * (1 - torch.exp(-gate.g.abs())).sum()
        loss.backward()
        self.optimizer.step()


class HandGate(nn.Module):
    """The paper's exponential gate as one would write it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Each channel times its gate's value."""
        return x * (1 - torch.exp(-self.g * self.g)).view(1, -1, 1, 1)


def gate_by_hand(model: nn.Module) -> list[HandGate]:
    """Put a gate behind every convolution, as part of a sequence in its place."""
    gates = []
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Conv2d):
                gates.append(HandGate(child.out_channels))
                setattr(module, name, nn.Sequential(child, gates[-1]))
    return gates


class _Augmented(torch.utils.data.Dataset[tuple[Tensor, int]]):
    def __init__(self, images: np.ndarray, labels: np.ndarray, pipeline: Callable[[Any], Tensor]) -> None:
        self.images, self.labels, self.pipeline = images, labels, pipeline

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.pipeline(self.images[index]), int(self.labels[index])


class PlainLeNet:
    """An epoch by hand a turn: gates, penalty, SGD and a test at the end; milliseconds a step."""

    def __init__(self, path: Path) -> None:
        data = load_data(Recipe.from_toml(CPU_RECIPE).data, str(path))
        assert isinstance(data, Data)
        torch.manual_seed(0)
        self.model: nn.Module = models.LeNet5().train()
        gates = ng.attach_gates_(self.model)
        self.penalty = ng.Penalty(gates, "bounded-l1", 3e-3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, 0.9)
        self.train = (data.train.images.float() / 255 - 0.1307) / 0.3081, data.train.labels
        self.test = (data.test.images.float() / 255 - 0.1307) / 0.3081, data.test.labels

    def close(self) -> None:
        """Nothing to give back."""

    def __call__(self) -> float:
        start = time.perf_counter()
        images, labels = self.train
        steps = len(labels) // BATCH
        self.model.train()
        for chosen in torch.randperm(len(labels))[: steps * BATCH].view(steps, BATCH):
            self.optimizer.zero_grad()
            (F.cross_entropy(self.model(images[chosen]), labels[chosen]) + self.penalty()).backward()
            self.optimizer.step()
        self.model.eval()
        with torch.no_grad():
            batches = zip(*(tensor.split(500) for tensor in self.test), strict=True)
            hits = sum(int((self.model(x).argmax(1) == y).sum()) for x, y in batches)
        assert hits > 0
        return (time.perf_counter() - start) * 1000 / steps


if __name__ == "__main__":
    main()
