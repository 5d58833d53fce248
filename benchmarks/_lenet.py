"""Training the gated LeNet-5 with its data on the device.

On a GPU one replay of a CUDA graph is a whole training step, the picking of the batch included; on a CPU the same step
runs eagerly.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import narrowgate as ng
from narrowgate.models import LeNet5

MEAN, DEVIATION = 0.1307, 0.3081  # of MNIST's training pixels
EVALUATION_BATCH = 2000


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a run but its seed and data."""

    penalty: str
    strength: float
    sigma: float
    weight_decay: float
    epochs: int
    lr: float
    schedule: str
    momentum: float
    batch: int
    proximal: bool

    def lr_at(self, epoch: int) -> float:
        """The learning rate of an epoch, counted from 0."""
        if self.schedule == "cosine":
            return self.lr * (1 + math.cos(math.pi * epoch / self.epochs)) / 2
        return self.lr * 0.1 ** ((epoch >= self.epochs / 2) + (epoch >= 3 * self.epochs / 4))


@dataclass(frozen=True)
class Split:
    """Images (N, 1, 28, 28), normalised, and labels, on the device."""

    images: Tensor
    labels: Tensor


def load(path: Path, device: str, validation: int) -> tuple[Split, Split]:
    """Training and evaluation data: the test set, or the last images of the training set, then kept out of training."""
    with np.load(path) as arrays:
        images, labels = arrays["x_train"], arrays["y_train"]
        if validation:
            if not 0 < validation < len(images):
                raise ValueError(f"--validation must leave images to train on: got {validation} of {len(images)}")
            cut = len(images) - validation
            parts = [(images[:cut], labels[:cut]), (images[cut:], labels[cut:])]
        else:
            parts = [(images, labels), (arrays["x_test"], arrays["y_test"])]
    return _split(*parts[0], device), _split(*parts[1], device)


def _split(images: np.ndarray, labels: np.ndarray, device: str) -> Split:
    pixels = torch.from_numpy(np.ascontiguousarray(images)).to(device)[:, None].float()
    return Split((pixels / 255 - MEAN) / DEVIATION, torch.from_numpy(labels.astype(np.int64)).to(device))


@torch.no_grad()
def sgd_(
    params: list[Tensor], grads: list[Tensor], velocity: list[Tensor], lr: Tensor, momentum: float, weight_decay: float
) -> None:
    """torch.optim.SGD's step with the learning rate in a tensor, which a captured graph reads anew at each replay."""
    if weight_decay:
        grads = list(torch._foreach_add(grads, params, alpha=weight_decay))
    torch._foreach_mul_(velocity, momentum)
    torch._foreach_add_(velocity, grads)
    torch._foreach_sub_(params, torch._foreach_mul(velocity, lr))


def check_sgd(device: str) -> float:
    """The largest difference between ``sgd_`` and torch.optim.SGD over ten steps in float64; raises if there is one."""
    torch.manual_seed(0)
    ours = [torch.randn(size, device=device, dtype=torch.float64) for size in ((3, 4), (5,))]
    theirs = [nn.Parameter(tensor.clone()) for tensor in ours]
    velocity = [torch.zeros_like(tensor) for tensor in ours]
    optimizer = torch.optim.SGD(theirs, lr=0.1, momentum=0.9, weight_decay=5e-4)
    for step in range(10):
        rate = 0.1 if step < 5 else 0.01
        grads = [torch.randn_like(tensor) for tensor in ours]
        sgd_(ours, grads, velocity, torch.tensor(rate, device=device, dtype=torch.float64), 0.9, 5e-4)
        for parameter, grad in zip(theirs, grads, strict=True):
            parameter.grad = grad.clone()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    difference = max(float((a - b).detach().abs().max()) for a, b in zip(ours, theirs, strict=True))
    if difference > 1e-12:
        raise RuntimeError(f"the hand-written SGD differs from torch.optim.SGD by {difference:.1e}")
    return difference


class Training:
    """A gated LeNet-5 and the state of its training, every number of which lives on the device."""

    def __init__(self, recipe: Recipe, seed: int, data: Split) -> None:
        self.recipe, self.data = recipe, data
        device = data.images.device
        torch.manual_seed(seed)
        self.model = LeNet5().to(device).train()
        self.gates = ng.attach_gates_(self.model)
        self.penalty: ng.Penalty | None = None
        if recipe.penalty != "none":
            self.penalty = ng.Penalty(self.gates, recipe.penalty, recipe.strength, recipe.sigma)
        self.params: list[Tensor] = list(self.model.parameters())
        self.velocity = [torch.zeros_like(p, requires_grad=False) for p in self.params]
        self.lr = torch.zeros((), device=device)
        self.order = torch.arange(len(data.labels), device=device)
        self.offsets = torch.arange(recipe.batch, device=device)
        self.position = torch.zeros((), dtype=torch.int64, device=device)
        self.loss_sum = torch.zeros((), device=device)
        self.shuffler = torch.Generator(device).manual_seed(seed)
        self.steps_per_epoch = len(data.labels) // recipe.batch  # the last, smaller batch waits for the next shuffle
        self.advance: Callable[[], None] = self.step

    def step(self) -> None:
        """One step on the next batch of ``order``."""
        rows = self.order.index_select(0, self.offsets + self.position)
        images, labels = self.data.images.index_select(0, rows), self.data.labels.index_select(0, rows)
        loss = F.cross_entropy(self.model(images), labels)
        in_loss = self.penalty is not None and not self.recipe.proximal
        grads = torch.autograd.grad(loss + self.penalty() if in_loss else loss, self.params)
        sgd_(self.params, list(grads), self.velocity, self.lr, self.recipe.momentum, self.recipe.weight_decay)
        if self.penalty is not None and self.recipe.proximal:
            # Shrinks at the speed a penalty in the loss has under momentum.
            self.penalty.proximal_(self.lr / (1 - self.recipe.momentum))
        self.loss_sum += loss.detach()
        self.position += self.recipe.batch

    def epoch(self, epoch: int) -> float:
        """One pass over the shuffled data; returns the mean task loss."""
        self.lr.fill_(self.recipe.lr_at(epoch))
        self.order.copy_(torch.randperm(len(self.order), generator=self.shuffler, device=self.order.device))
        self.position.zero_()
        self.loss_sum.zero_()
        for _ in range(self.steps_per_epoch):
            self.advance()
        return float(self.loss_sum) / self.steps_per_epoch

    def capture_(self) -> float:
        """Make ``advance`` the replay of a CUDA graph; returns how far three replays are from three eager steps."""
        before = self._state()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self.step()
        after: list[list[Tensor]] = []
        for advance in (self.step, graph.replay):
            self._restore_(before)
            self.lr.fill_(self.recipe.lr)
            for _ in range(3):
                advance()
            after.append([p.detach().clone() for p in self.params])
        self._restore_(before)
        difference = max(float((eager - replayed).abs().max()) for eager, replayed in zip(*after, strict=True))
        moved = max(float((new - old).abs().max()) for new, old in zip(after[1], before[0], strict=True))
        if not difference < 0.01 * moved:
            raise RuntimeError(
                f"the CUDA graph does not train like eager steps: {difference:.1e} apart after {moved:.1e}"
            )
        self.advance = graph.replay
        return difference

    def _tensors(self) -> list[list[Tensor]]:
        return [self.params, self.velocity, [self.lr, self.position, self.loss_sum]]

    def _state(self) -> list[list[Tensor]]:
        return [[tensor.detach().clone() for tensor in tensors] for tensors in self._tensors()]

    @torch.no_grad()
    def _restore_(self, state: list[list[Tensor]]) -> None:
        for tensors, saved in zip(self._tensors(), state, strict=True):
            for tensor, old in zip(tensors, saved, strict=True):
                tensor.copy_(old)


def train(training: Training, report: Callable[[str], None]) -> dict[str, list[float]]:
    """Run all epochs; returns the curves. A run whose loss is no longer finite stops there."""
    curves: dict[str, list[float]] = {"train_loss": [], "closed_share": []}
    start = time.perf_counter()
    for epoch in range(training.recipe.epochs):
        try:
            loss = training.epoch(epoch)
        except ValueError:  # on a CPU the gates themselves complain about NaN
            if all(bool(parameter.isfinite().all()) for parameter in training.params):
                raise
            loss = math.nan
        if not math.isfinite(loss):
            report(f"epoch {epoch + 1}: the loss is {loss}, stopped")
            break
        curves["train_loss"].append(round(loss, 6))
        curves["closed_share"].append(round(training.gates.closed_fraction(), 4))
        if (epoch + 1) % 10 == 0 or epoch + 1 == training.recipe.epochs:
            seconds = time.perf_counter() - start
            report(f"epoch {epoch + 1}: loss {loss:.4f}, closed {curves['closed_share'][-1]:.1%}, {seconds:.1f} s")
    return curves


@torch.no_grad()
def logits(model: nn.Module, data: Split) -> Tensor:
    """A model's outputs in evaluation mode, which is undone afterwards."""
    was_training = model.training
    model.eval()
    outputs = torch.cat([model(images) for images in data.images.split(EVALUATION_BATCH)])
    model.train(was_training)
    return outputs


def error_percent(outputs: Tensor, data: Split) -> float:
    """The share of wrong predictions, in percent."""
    return 100 * int((outputs.argmax(1) != data.labels).sum()) / len(data.labels)
