"""One training step, plain or gated, in the ways it is run: eager, captured in a CUDA graph, compiled and captured."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import narrowgate as ng

LR, MOMENTUM, STRENGTH = 0.01, 0.9, 1e-4
WARM_UP_STEPS = {"cpu": 2, "cuda": 5}


@dataclass(frozen=True)
class Workload:
    """A network with its input: what a step computes, whatever the mode."""

    name: str
    build: Callable[[], nn.Module]
    classes: int
    batch: int
    pixels: int


class Step:
    """A training step on a fixed random batch: forward, loss, penalty, backward, SGD with momentum."""

    def __init__(self, workload: Workload, device: str, gated: bool, compiled: str = "") -> None:
        torch.manual_seed(0)
        self.cuda = device == "cuda"
        layout = torch.channels_last if self.cuda else torch.contiguous_format
        self.model = workload.build().to(device).to(memory_format=layout).train()
        self.gates = ng.attach_gates_(self.model) if gated else None
        # strength and sigma go to the device at the first call, which must not happen inside a capture.
        self.penalty = None if self.gates is None else ng.Penalty(self.gates, "bounded-l1", strength=STRENGTH)
        if self.penalty is not None:
            self.penalty()
        self.optimizer = torch.optim.SGD(self.model.parameters(), LR, MOMENTUM, foreach=self.cuda)
        images = torch.randn(workload.batch, 3, workload.pixels, workload.pixels, device=device)
        self.images = images.contiguous(memory_format=layout)
        self.labels = torch.randint(workload.classes, (workload.batch,), device=device)
        self.forward: Any = torch.compile(self.model, fullgraph=True) if compiled == "model" else self.model
        self.objective: Any = torch.compile(self._objective, fullgraph=True) if compiled == "loss" else self._objective
        self.last_loss = torch.zeros((), device=device)
        self.first_seconds = 0.0
        self.marked: list[Tensor] = []

    def __call__(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with self._autocast():
            loss = self.objective(self.images, self.labels)
        loss.backward()
        self.optimizer.step()
        self.last_loss = loss.detach()

    def _objective(self, images: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(self.forward(images), labels)
        return loss if self.penalty is None else loss + self.penalty()

    def _autocast(self) -> AbstractContextManager[Any]:
        # Cached casts would be made outside and freed inside a capture; each weight is cast once a step either way.
        return torch.autocast("cuda", torch.bfloat16, cache_enabled=False) if self.cuda else nullcontext()

    def mark_(self) -> None:
        """Remember the parameters, for ``check``."""
        self.marked = [parameter.detach().clone() for parameter in self.model.parameters()]

    def check(self) -> None:
        """Raise unless training went on since ``mark_``: a finite loss, and no layer or gate that stood still."""
        if not math.isfinite(float(self.last_loss)):
            raise RuntimeError("the loss is not finite: these times are not those of training")
        for (name, new), old in zip(self.model.named_parameters(), self.marked, strict=True):
            if torch.equal(new, old):
                raise RuntimeError(f"{name} did not change: it was not part of the timed step")


def warmed_up(step: Step) -> Callable[[], None]:
    """The step itself, after a few runs; the first is timed, since it is the one that compiles."""
    start = time.perf_counter()
    step()
    if step.cuda:
        torch.cuda.synchronize()
    step.first_seconds = step.first_seconds or round(time.perf_counter() - start, 2)
    for _ in range(WARM_UP_STEPS["cuda" if step.cuda else "cpu"]):
        step()
    return step


def captured(step: Step) -> Callable[[], None]:
    """The step as the replay of one CUDA graph: forward, backward and optimizer without Python in between."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        warmed_up(step)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay
