"""``narrowgate demo``: train a small network on real handwritten digits with gates, and show what is left of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F

import narrowgate as ng

BATCH = 64
LEARNING_RATE = 0.05
WEIGHT_DECAY = 5e-4


@dataclass(frozen=True)
class Settings:
    """What can be chosen on the command line."""

    epochs: int = 80
    seed: int = 0
    penalty: str = "bounded-l1"
    strength: float = 0.02
    placement: str = "after-norm"


@dataclass(frozen=True)
class Outcome:
    """What came out: the share of gates that closed, and the test error before and after removal."""

    closed: float
    error_before: float
    error_after: float


@dataclass(frozen=True)
class Digits:
    """1,797 images of 8 x 8 pixels, two thirds to train on and one third to test."""

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor

    @classmethod
    def load(cls) -> Digits:
        """The images that come with scikit-learn, split the same way every time."""
        digits = load_digits()
        images = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None]
        labels = torch.tensor(digits.target, dtype=torch.long)
        train, test = train_test_split(range(len(labels)), test_size=1 / 3, random_state=0, stratify=labels)
        return cls(images[train], labels[train], images[test], labels[test])


class ConvNorm(nn.Sequential):
    """A 3x3 convolution and its BatchNorm."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
        # With 18 steps an epoch, running statistics at the usual momentum of 0.1 would lag behind the weights.
        self.norm = nn.BatchNorm2d(channels_out, momentum=0.3)


class DigitsNet(nn.Module):
    """A small residual network; it knows nothing of gates."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem = ConvNorm(1, width)
        self.branch1 = ConvNorm(width, width)
        self.branch2 = ConvNorm(width, width)
        self.head = ConvNorm(width, 2 * width)
        self.classifier = nn.Linear(2 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = F.relu(x + self.branch2(F.relu(self.branch1(x))))
        x = F.relu(self.head(F.max_pool2d(x, 2)))
        return self.classifier(x.mean((2, 3)))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Epoch:
    """How training stands after one pass over the training images."""

    number: int
    loss: float
    closed: float
    error: float

    def __str__(self) -> str:
        return f"loss {self.loss:.3f}  closed {self.closed:5.1%}  test error {self.error:5.2%}"


def train(model: nn.Module, gates: ng.Gates, penalty: ng.Penalty, data: Digits, epochs: int) -> Iterator[Epoch]:
    """An ordinary training loop; of gates it knows one thing, the penalty that it adds to the loss."""
    steps = len(data.y_train) // BATCH
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9, weight_decay=WEIGHT_DECAY)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * steps)
    for number in range(1, epochs + 1):
        model.train()
        total = 0.0
        for batch in torch.randperm(len(data.y_train))[: steps * BATCH].view(steps, BATCH):
            loss = F.cross_entropy(model(data.x_train[batch]), data.y_train[batch])
            optimizer.zero_grad()
            (loss + penalty()).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            scheduler.step()
            total += float(loss.detach())
        yield Epoch(number, total / steps, gates.closed_fraction(), error_of(model, data))


@torch.no_grad()
def error_of(model: nn.Module, data: Digits) -> float:
    """The share of test images that the model takes for another digit."""
    wrong = model.eval()(data.x_test).argmax(1) != data.y_test
    return float(wrong.float().mean())


def remove(model: nn.Module, example: Tensor) -> tuple[nn.Module, ng.Verification]:
    """A smaller copy of the model without its closed channels, and the proof that it computes the same."""
    narrow = ng.compact(model, ng.plan(model, example))
    return narrow, ng.verify(model, narrow, example)


@dataclass(frozen=True)
class Size:
    """How many output channels a layer has, and how many parameters."""

    channels: int
    parameters: int


def sizes(model: nn.Module) -> dict[str, Size]:
    """The size of each layer of a DigitsNet without gates."""
    found: dict[str, Size] = {}
    for name, layer in model.named_children():
        last = layer.conv if isinstance(layer, ConvNorm) else layer
        channels = last.weight.shape[0] if isinstance(last.weight, Tensor) else 0
        found[name] = Size(channels, sum(p.numel() for p in layer.parameters()))
    return found


def run(settings: Settings, console: Console | None = None) -> Outcome:
    """Train, remove, compare, and print each step."""
    console = console or Console(highlight=False)
    data = Digits.load()
    console.print("[bold]narrowgate demo[/]: handwritten digits, 8 x 8 pixels")
    console.print("The images come with scikit-learn: nothing is downloaded.")
    console.print(f"{len(data.y_train)} images to train on, {len(data.y_test)} to test.\n")
    with _seeded(settings.seed):
        model = DigitsNet()
        before = sizes(model)
        gates = ng.attach_gates_(model, placement=settings.placement)
        penalty = ng.Penalty(gates, settings.penalty, settings.strength)
        console.print(
            f"{gates.count} gates on {len(gates)} layers, pulled to zero by {penalty.kind} {penalty.strength:g}."
        )
        started = time.perf_counter()
        _show(train(model, gates, penalty, data, settings.epochs), settings.epochs, console)
        console.print(f"Trained in {time.perf_counter() - started:.0f} s.\n")
    closed, error = gates.closed_fraction(), error_of(model, data)
    if closed == 0:
        return Outcome(closed, error, error)
    narrow, proof = remove(model, data.x_test[:64])
    outcome = Outcome(closed, error, error_of(narrow, data))
    _report(before, sizes(narrow), outcome, proof, console)
    return outcome


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Repeatable random numbers on one thread, which is all that so small a network can use; both are given back."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def _show(epochs: Iterator[Epoch], total: int, console: Console) -> None:
    """A progress bar in a terminal, about ten lines anywhere else."""
    if not console.is_terminal:
        for epoch in epochs:
            if epoch.number % max(1, total // 10) == 0 or epoch.number == total:
                console.print(f"epoch {epoch.number:>3}/{total}  {epoch}")
        return
    columns = (TextColumn("epoch {task.completed:>3.0f}/{task.total:.0f}"), BarColumn(12), TimeRemainingColumn(True))
    with Progress(*columns, TextColumn("{task.description}"), console=console) as progress:
        task = progress.add_task("", total=total)
        for epoch in epochs:
            progress.update(task, completed=epoch.number, description=str(epoch))


def _report(
    before: dict[str, Size], after: dict[str, Size], outcome: Outcome, proof: ng.Verification, console: Console
) -> None:
    table = Table("layer", box=box.SIMPLE_HEAD, show_footer=True, show_edge=False, pad_edge=False)
    for title in ("channels", "left", "parameters", "left"):
        table.add_column(title, justify="right", min_width=8)
    for name, old in before.items():
        new = after[name]
        table.add_row(name, f"{old.channels}", f"{new.channels}", f"{old.parameters:,}", f"{new.parameters:,}")
    total_old, total_new = (sum(size.parameters for size in side.values()) for side in (before, after))
    for column, footer in zip(table.columns, ("all", "", "", f"{total_old:,}", f"{total_new:,}"), strict=True):
        column.footer = footer
    console.print(table)
    console.print(f"\nGates closed  {outcome.closed:.1%}")
    console.print(f"Test error    {outcome.error_before:.2%} before, {outcome.error_after:.2%} after")
    console.print(f"Exactness     max difference {proof.max_error:.0e} between the outputs, by rounding")
    console.print("\nThe closed channels are gone: what is left is an ordinary, smaller network.")
    if outcome.error_after > 0.5:
        console.print("It does not know the digits any more: lower --strength.")
