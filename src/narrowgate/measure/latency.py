"""How long a network takes before and after, in turns in one run: medians and quartiles, never a single number."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from narrowgate.flow.layers import IndexedLayer
from narrowgate.measure.counts import summarize
from narrowgate.measure.runners import MODES, Call, UnavailableError, device_or_why_not, prepare
from narrowgate.measure.timings import Latency, Missing, Spread, Timing
from narrowgate.sites import layers_of
from narrowgate.swap import is_conv1d

__all__ = ["ChoiceError", "Latency", "Missing", "Spread", "Timing", "latency"]

PRECISIONS = {"32": torch.float32, "bf16": torch.bfloat16}
_FEWEST_ROUNDS = 5
_AT_ONCE = {"cpu": 2e-3, "cuda": 2e-2}
"""Calls shorter than this are timed several at once: clocks cost time themselves, and launches overlap in real use."""


class ChoiceError(ValueError):
    """A device, mode or number that can't be measured with; says what can."""


def latency(
    before: nn.Module,
    after: nn.Module,
    example: Tensor,
    *,
    devices: Sequence[str] = ("cpu", "cuda"),
    modes: Sequence[str] | None = None,
    batches: Sequence[int] = (1, 8, 64),
    precision: str | None = None,
    rounds: int = 30,
    seconds: float = 5.0,
    progress: Callable[[Latency], None] | None = None,
) -> Latency:
    """Time two networks in turns, in eval mode, on copies; what can't be run here is listed with the reason.

    Args:
        example: inputs as the networks take them; of these, one sample is repeated to make each batch.
        modes: of ``eager``, ``compiled``, ``onnx`` (CPU) and ``graph`` (a CUDA graph); all by default. Compiling takes
            up to a minute for each network and batch size, and forgets what this process compiled before.
        precision: ``32`` or ``bf16``; by default float32 on a CPU and bfloat16, channels last, on a GPU.
        rounds: each runs both networks once, the order changes from round to round.
        seconds: stop early, after at least 5 rounds, when a way of running and a batch size have taken this long.
        progress: called with what there is so far, each time that a way of running and a batch size are done.
    """
    _check(devices, modes, batches, precision, rounds)
    if not isinstance(example, Tensor) or not example.dim() or not len(example):
        raise ChoiceError(f"the example must be one tensor with a sample along its first axis, got {_short(example)}")
    chosen = {device: precision or ("bf16" if device == "cuda" else "32") for device in devices}
    found = _counted(before, after, example, chosen)
    for device in devices:
        wanted = [mode for mode in MODES[device] if modes is None or mode in modes]
        if why := device_or_why_not(device):
            found = replace(found, missing=(*found.missing, *(Missing(device, mode, why) for mode in wanted)))
            continue
        pair = [_placed(model, device, PRECISIONS[chosen[device]]) for model in (before, after)]
        x = _moved(example[:1], device, PRECISIONS[chosen[device]])
        for mode in wanted:
            try:
                for timing in _time_mode(pair, x, device, mode, batches, rounds, seconds):
                    found = replace(found, timings=(*found.timings, timing))
                    if progress is not None:
                        progress(found)
            except UnavailableError as error:
                found = replace(found, missing=(*found.missing, Missing(device, mode, str(error))))
    return found


def _counted(before: nn.Module, after: nn.Module, example: Tensor, precisions: dict[str, str]) -> Latency:
    """All that is known before anything is timed."""
    was, now = summarize(before, example), summarize(after, example)
    return Latency(
        model=was.model,
        inputs=was.inputs,
        precisions=precisions,
        devices={device: _device_name(device) for device in precisions if device_or_why_not(device) is None},
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        multiply_adds=(was.multiply_adds, now.multiply_adds),
        parameters=(was.parameters, now.parameters),
        indexed_layers=sum(isinstance(module, IndexedLayer) for module in after.modules()),
        odd_widths=sum(_width(layer) % 8 != 0 for _, layer in layers_of(after)[:-1]),
        timings=(),
        missing=(),
        activations=(was.activations, now.activations),
    )


def _check(
    devices: Sequence[str], modes: Sequence[str] | None, batches: Sequence[int], precision: str | None, rounds: int
) -> None:
    known = list(dict.fromkeys(mode for each in MODES.values() for mode in each))
    for what, given, allowed in (
        ("device", devices, list(MODES)),
        ("mode", modes or (), known),
        ("precision", [] if precision is None else [precision], list(PRECISIONS)),
    ):
        if wrong := [value for value in given if value not in allowed]:
            raise ChoiceError(f"unknown {what} {wrong[0]!r}; choose from {', '.join(allowed)}")
    if not devices or (modes is not None and not modes):
        raise ChoiceError(f"no {'mode' if devices else 'device'} is given, so nothing would be timed; name some")
    if modes and (useless := [d for d in devices if not set(modes) & set(MODES[d])]) and len(useless) == len(devices):
        raise ChoiceError(f"{', '.join(modes)} can't run on {', '.join(devices)}; a CPU has {', '.join(MODES['cpu'])}")
    if not batches or min(batches) < 1:
        raise ChoiceError(f"batch sizes must be 1 or above, got {', '.join(map(str, batches)) or 'none'}")
    if rounds < 2:
        raise ChoiceError(f"quartiles need at least 2 rounds, got {rounds}")


def _time_mode(
    pair: Sequence[nn.Module], x: Tensor, device: str, mode: str, batches: Sequence[int], rounds: int, seconds: float
) -> Iterator[Timing]:
    with torch.random.fork_rng(), _compiler_reset(mode):
        made = [prepare(model, x, mode) for model in pair]
        for batch in batches:
            if mode == "compiled":
                torch.compiler.reset()
            inputs = _repeated(x, batch)
            yield _time_pair([on(inputs) for on in made], device, mode, batch, rounds, seconds)


@contextmanager
def _compiler_reset(mode: str) -> Iterator[None]:
    """Leave no compiled copies behind: they hold on to weights."""
    try:
        yield
    finally:
        if mode == "compiled":
            torch.compiler.reset()


def _time_pair(calls: Sequence[Call], device: str, mode: str, batch: int, rounds: int, seconds: float) -> Timing:
    start = time.perf_counter()
    longest = max(_seconds(call, device, 1) for call in calls for _ in range(3))
    count = max(1, min(20, int(_AT_ONCE[device] / max(longest, 1e-6))))
    taken: list[list[float]] = [[], []]
    for turn in range(rounds):
        if turn >= min(rounds, _FEWEST_ROUNDS) and time.perf_counter() - start > seconds:
            break
        for i in (0, 1) if turn % 2 else (1, 0):
            taken[i].append(_seconds(calls[i], device, count))
    ratios = [after / before for before, after in zip(*taken, strict=True)]
    return Timing(device, mode, batch, len(ratios), Spread.of(taken[0]), Spread.of(taken[1]), Spread.of(ratios))


def _seconds(call: Call, device: str, count: int) -> float:
    """Seconds for one call, from several in a row; on a GPU by its own clock."""
    if device == "cpu":
        start = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - start) / count
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    first.record()
    for _ in range(count):
        call()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last)) / 1e3 / count


def _width(layer: nn.Module) -> int:
    """Output channels that are computed, which in the scatter layout are fewer than the layer says."""
    assert isinstance(layer.weight, Tensor)
    return layer.weight.shape[1 if isinstance(layer, _ConvTransposeNd) or is_conv1d(layer) else 0]


def _placed(model: nn.Module, device: str, dtype: torch.dtype) -> nn.Module:
    placed = copy.deepcopy(model).eval().to(device, dtype)
    return placed.to(memory_format=torch.channels_last) if device == "cuda" else placed


def _moved(x: Tensor, device: str, dtype: torch.dtype) -> Tensor:
    return x.to(device, dtype) if x.is_floating_point() else x.to(device)


def _repeated(x: Tensor, batch: int) -> Tensor:
    x = x.expand(batch, *x.shape[1:])
    return x.contiguous(memory_format=torch.channels_last) if x.is_cuda and x.dim() == 4 else x.contiguous()


def _short(example: object) -> str:
    return f"shape {tuple(example.shape)}" if isinstance(example, Tensor) else f"a {type(example).__name__}"


def _device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"CPU ({torch.backends.cpu.get_cpu_capability()})"
