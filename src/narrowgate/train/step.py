"""The training step, and an epoch of it: on the host, or as replays of one captured CUDA graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from narrowgate.penalties import Penalty
from narrowgate.train.feed import ArrayFeed, FolderFeed
from narrowgate.train.teacher import Teacher

_STEPS_BEFORE_CAPTURE = 3


@dataclass
class Step:
    """Forward, loss, penalty, backward, optimizer; loss and hits are summed up on the device."""

    forward: Callable[[Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    penalty: Penalty | None
    device: torch.device
    bf16: bool = False
    label_smoothing: float = 0.0
    proximal: float | None = None
    """The proximal step's length in learning rates; None adds the penalty to the loss instead."""
    backward: Callable[[Tensor], Any] = torch.Tensor.backward
    teacher: Teacher | None = None
    _loss: Tensor = field(init=False)
    _hits: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._loss = torch.zeros((), device=self.device)
        self._hits = torch.zeros((), dtype=torch.long, device=self.device)
        if self.penalty is not None:
            self.penalty()  # puts strength and sigma on the device, which can't be done inside a capture

    def __call__(self, images: Tensor, labels: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with autocast(self.device, self.bf16):
            outputs = self.forward(images)
            answers = None if self.teacher is None else self.teacher(images)
        loss = F.cross_entropy(outputs.float(), labels, label_smoothing=self.label_smoothing)
        if self.teacher is not None and answers is not None:
            loss = self.teacher.mixed(loss, outputs, answers)
        self.backward(loss)
        if self.penalty is not None and self.proximal is None:
            add_gradients_(self.penalty(), self.penalty.gates.parameters())
        self.optimizer.step()
        if self.penalty is not None and self.proximal is not None:
            self.penalty.proximal_(self.optimizer.param_groups[-1]["lr"] * self.proximal)
        self._loss += loss.detach()
        self._hits += (outputs.detach().argmax(1) == labels).sum()

    def take_sums(self) -> tuple[Tensor, Tensor]:
        """The sums of loss and hits since the last time, as tensors; both start again at 0."""
        sums = self._loss.clone(), self._hits.clone()
        self._loss.zero_()
        self._hits.zero_()
        return sums


def add_gradients_(value: Tensor, parameters: Sequence[Tensor]) -> None:
    """What ``value.backward()`` does, in one operation for all parameters instead of one for each."""
    gradients = dict(zip(parameters, torch.autograd.grad(value, parameters), strict=True))
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = gradients.pop(parameter)
    if gradients:
        torch._foreach_add_([cast(Tensor, parameter.grad) for parameter in gradients], list(gradients.values()))


def autocast(device: torch.device, bf16: bool) -> AbstractContextManager[Any]:
    """bfloat16 autocast, or nothing."""
    # Cached casts would be made outside a capture and freed inside; each weight is cast once a step either way.
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False) if bf16 else nullcontext()


def set_lr_(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every group the learning rate times its own ``lr_factor``; in place where it is a tensor."""
    for group in optimizer.param_groups:
        value = lr * group["lr_factor"]
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value


LrAt = Callable[[float], float]


class Loop:
    """Runs epochs of a step on the host."""

    def __init__(self, step: Step, feed: ArrayFeed | FolderFeed) -> None:
        self.step, self._feed = step, feed
        self._lr: float | None = None

    def epoch(self, epoch: int, lr_at: LrAt, on_step: Callable[[int], None]) -> None:
        """One pass over the training images."""
        self._feed.start(epoch)
        self._lr = None
        for i, batch in enumerate(self._feed.batches()):
            self._tune(lr_at(epoch + i / self._feed.steps))
            self.step(*batch)
            on_step(i + 1)

    def _tune(self, lr: float) -> None:
        if lr != self._lr:
            set_lr_(self.step.optimizer, lr)
            self._lr = lr


class GraphLoop(Loop):
    """Runs epochs as replays of a CUDA graph that holds the whole step, the picking of the batch included.

    The first few steps run as ordinary ones, on the graph's stream: they are steps like any other, and PyTorch wants
    them before a capture. After the network has changed, make a new one.
    """

    def __init__(self, step: Step, feed: ArrayFeed, notice: Callable[[str], None]) -> None:
        super().__init__(step, feed)
        self._arrays, self._notice = feed, notice
        self._stream = torch.cuda.Stream(step.device)  # type: ignore[no-untyped-call]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._until_capture: float = _STEPS_BEFORE_CAPTURE

    def epoch(self, epoch: int, lr_at: LrAt, on_step: Callable[[int], None]) -> None:
        """One pass over the training images."""
        self._arrays.start(epoch)
        self._lr = None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for i in range(self._arrays.steps):
                self._tune(lr_at(epoch + i / self._arrays.steps))
                self._one()
                on_step(i + 1)
        torch.cuda.current_stream().wait_stream(self._stream)

    def _one(self) -> None:
        if self._graph is None and self._until_capture <= 0:
            self._capture()
        if self._graph is None:
            self.step(*self._arrays.batch())
            self._until_capture -= 1
        else:
            self._graph.replay()

    def _capture(self) -> None:
        """Record a step, which runs nothing; where that fails, go on without a graph for good."""
        self.step.optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self._stream):
                self.step(*self._arrays.batch())
            self._graph = graph
        except RuntimeError as error:
            self._until_capture = math.inf
            self.step.optimizer.zero_grad(set_to_none=True)
            reason = str(error).partition("\n")[0]
            self._notice(f"steps run without a CUDA graph, since one could not be captured: {reason}")


@torch.no_grad()
def count_hits(
    model: nn.Module, batches: Any, device: torch.device, bf16: bool, noisy: Sequence[nn.Module] = ()
) -> Tensor:
    """How many images a model gets right and how many there are, as one tensor; its mode is given back.

    Args:
        noisy: layers of it that are in training mode for this.
    """
    training, benchmark = model.training, torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False  # trying kernels out would take longer than the few batches do
    counts = torch.zeros(2, dtype=torch.float64, device=device)
    model.eval()
    for layer in noisy:
        layer.training = True
    by_batch = any(isinstance(layer, _BatchNorm) for layer in noisy)
    try:
        for images, labels in batches:
            if len(labels) == 1 and by_batch:  # one image has no statistics
                continue
            with autocast(device, bf16):
                outputs = model(images)
            counts[0] += (outputs.argmax(1) == labels).sum()
            counts[1] += len(labels)
    finally:
        model.train(training)
        torch.backends.cudnn.benchmark = benchmark
    return counts
