"""The model behind ``scale.py``: steps of a shrinking network on several GPUs that exchange gradients along a ring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

GPUS = (1, 2, 4, 8, 16, 32, 64)
BATCH = 128  # of one GPU, at which all step times were measured
GLOBAL_BATCH = BATCH * GPUS[-1]

# Nothing here was measured.
ASSUMED: dict[str, Any] = {
    "alpha_us": 5.0,
    "alphas_us": [2.0, 5.0, 50.0],
    "beta_gb_per_s": 50.0,  # 400 Gb/s for each GPU
    "betas_gb_per_s": [1.25, 12.5, 50.0, 450.0],
    "bytes_per_gradient": 4,
    "forwards_per_step": 3.0,  # a training step takes as long as this many forward passes
    "forwards_range": [2.5, 3.0, 4.0],
    "imagenet_epochs": 90,
}


@dataclass(frozen=True)
class Phase:
    """Part of a run: how many epochs at which size, and the seconds of one step on one GPU."""

    epochs: int
    parameters: int
    step: float


@dataclass(frozen=True)
class Network:
    """A network that shrinks while it trains: the phases of its run, and what its cuts take besides."""

    name: str
    images: int
    phases: tuple[Phase, ...]
    cut_seconds: float

    @property
    def whole(self) -> tuple[Phase, ...]:
        """The same run without shrinking."""
        first = self.phases[0]
        return (Phase(sum(phase.epochs for phase in self.phases), first.parameters, first.step),)


def all_reduce(gpus: int, size: float, alpha: float, beta: float) -> float:
    """Seconds of a ring all-reduce of so many bytes: 2 (n - 1) messages, each of a part of 1 / n."""
    return 2 * (gpus - 1) * (alpha + size / gpus / beta)


def sent(gpus: int, size: float) -> float:
    """Bytes that each GPU sends for it."""
    return 2 * (gpus - 1) / gpus * size


def step_time(phase: Phase, gpus: int, link: tuple[float, float], overlap: bool, micro_steps: int = 1) -> float:
    """Seconds of one step; communication hides behind computation altogether, or not at all."""
    gradients = all_reduce(gpus, ASSUMED["bytes_per_gradient"] * phase.parameters, *link)
    compute = micro_steps * phase.step
    return max(compute, gradients) if overlap else compute + gradients


def run_time(network: Network, shrinks: bool, gpus: int, link: tuple[float, float], overlap: bool = False) -> float:
    """Seconds of a whole run with the same batch on each GPU, cuts included; those don't get faster with more GPUs."""
    steps = network.images // (BATCH * gpus)
    phases = network.phases if shrinks else network.whole
    seconds = sum(phase.epochs * steps * step_time(phase, gpus, link, overlap) for phase in phases)
    return seconds + (network.cut_seconds if shrinks else 0.0)


def link(alpha_us: float | None = None, beta: float | None = None) -> tuple[float, float]:
    """Latency in seconds and bytes a second of each GPU's link."""
    alpha_us = ASSUMED["alpha_us"] if alpha_us is None else alpha_us
    return alpha_us * 1e-6, (ASSUMED["beta_gb_per_s"] if beta is None else beta) * 1e9


def saved(network: Network, gpus: int, at: tuple[float, float], overlap: bool) -> float:
    """The share of a run's time that shrinking saves; negative where its cuts cost more."""
    return 1 - run_time(network, True, gpus, at, overlap) / run_time(network, False, gpus, at, overlap)


def scaling(network: Network) -> list[dict[str, float]]:
    """Steps of the whole and of the small network by number of GPUs, without overlap."""
    rows = []
    for gpus in GPUS:
        row: dict[str, float] = {"gpus": gpus}
        for key, phase in (("whole", network.phases[0]), ("small", network.phases[-1])):
            size = ASSUMED["bytes_per_gradient"] * phase.parameters
            row[f"{key}_all_reduce_ms"] = 1e3 * all_reduce(gpus, size, *link())
            row[f"{key}_sent_mb"] = sent(gpus, size) / 1e6
            row[f"{key}_step_ms"] = 1e3 * step_time(phase, gpus, link(), overlap=False)
            micro_steps = GLOBAL_BATCH // (BATCH * gpus)
            row[f"{key}_global_step_ms"] = 1e3 * step_time(phase, gpus, link(), False, micro_steps)
        row["whole_run_h"] = run_time(network, False, gpus, link()) / 3600
        row["small_run_h"] = run_time(network, True, gpus, link()) / 3600
        rows.append({key: round(value, 6) for key, value in row.items()})
    return rows


def links(network: Network) -> list[dict[str, float]]:
    """What shrinking saves of a run on 64 GPUs, by latency and bandwidth."""
    return [
        {
            "beta_gb_per_s": beta,
            "alpha_us": alpha,
            "saved": round(saved(network, GPUS[-1], link(alpha, beta), overlap=False), 6),
            "saved_overlapped": round(saved(network, GPUS[-1], link(alpha, beta), overlap=True), 6),
        }
        for beta in ASSUMED["betas_gb_per_s"]
        for alpha in ASSUMED["alphas_us"]
    ]


def bytes_of_run(network: Network, shrinks: bool, gpus: int = GPUS[-1]) -> float:
    """Bytes that one GPU sends in a whole run."""
    steps = network.images // (BATCH * gpus)
    phases = network.phases if shrinks else network.whole
    return sum(p.epochs * steps * sent(gpus, ASSUMED["bytes_per_gradient"] * p.parameters) for p in phases)
