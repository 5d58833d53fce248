"""Does the small model compute what the large one did? Measured against how much outputs differ at all."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from narrowgate.flow.trace import ExampleInputs, buffers_kept, call_arguments, in_mode

# Relative to the spread of outputs: what rounding explains in each precision, or this many times the measured noise.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
_NOISE_FACTOR = 100.0
_HALF_NOISE_FACTOR = 3.0  # there the noise is that of all weights, not of one rounding in the inputs
_LARGEST_TOLERANCE = 0.5  # more would pass another function


class VerificationError(AssertionError):
    """The two models differ by more than rounding."""


@dataclass(frozen=True)
class Verification:
    """How far two models' outputs are apart.

    ``relative_error`` is the largest difference over the spread of outputs across inputs, 0 where it is no more than
    the outputs' own last digits; ``noise`` is what a change of the inputs by one unit in the last place does, on the
    same scale, or of the weights where they are in half precision.
    """

    max_error: float
    relative_error: float
    noise: float
    tolerance: float
    batches: tuple[int, ...]

    @property
    def passed(self) -> bool:
        """Whether the error is within the tolerance."""
        return self.relative_error <= self.tolerance

    def __str__(self) -> str:
        verdict = "same function" if self.passed else "DIFFERENT"
        share = f"{self.relative_error:.1e} of the outputs' spread"
        if self.max_error and not self.relative_error:  # "0.0e+00 of the spread" would contradict the difference
            share = "within the rounding of the outputs themselves"
        return (
            f"{verdict}: max difference {self.max_error:.1e}, {share} "
            f"(rounding noise {self.noise:.1e}, allowed {self.tolerance:.1e})"
        )


@contextmanager
def full_precision() -> Iterator[None]:
    """float32 that is float32: a GPU would round factors to TF32, by default in convolutions, and more than removal."""
    convolutions, products = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = convolutions
        torch.set_float32_matmul_precision(products)


def verify(
    model: nn.Module, small: nn.Module, example_inputs: ExampleInputs, *, tolerance: float | None = None
) -> Verification:
    """Compare two models in eval mode on the example inputs and on random ones like them, at two batch sizes.

    Models in half precision are compared as copies in float32, where that is possible: their own rounding would hide
    what there is to see. Raises VerificationError where shapes differ, the difference is more than rounding explains,
    or rounding is so large that nothing can be told.
    """
    args, kwargs = call_arguments(example_inputs)
    half = _half_precision(model, small, (args, kwargs))
    worst: Verification | None = None
    with in_mode(model, False), in_mode(small, False), torch.no_grad(), full_precision():
        if half is not None:
            worst = _compare_in_float32(model, small, (args, kwargs), tolerance, half)
        if worst is None:
            worst = _worst(model, small, list(_batches(args, kwargs)), tolerance, half)
    if not worst.passed:
        raise VerificationError(_message(worst, tolerance, half))
    return worst


def _message(worst: Verification, tolerance: float | None, half: torch.dtype | None) -> str:
    explained = worst.relative_error <= (_HALF_NOISE_FACTOR if half else _NOISE_FACTOR) * worst.noise
    if tolerance is not None or not explained:
        return f"the small model is not the same function: {worst}"
    numbers = str(worst).partition(": ")[2]
    remedy = "turn random numbers off if the model draws any, or give inputs for which outputs differ more"
    if half:
        remedy = "plan and compact the model in float32, verify that, and cast the small model afterwards"
    return f"can't tell whether the small model is the same function, rounding may be all of it: {numbers}; {remedy}"


def _half_precision(model: nn.Module, small: nn.Module, inputs: Any) -> torch.dtype | None:
    """The coarsest precision below float32 among the tensors of two models and their inputs."""
    tensors = [t for one in (model, small) for t in (*one.parameters(), *one.buffers())]
    tensors += [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    halves = {t.dtype for t in tensors if t.is_floating_point() and t.dtype.itemsize < 4}
    return max(halves, key=lambda dtype: torch.finfo(dtype).eps, default=None)


def _compare_in_float32(
    model: nn.Module, small: nn.Module, inputs: Any, tolerance: float | None, half: torch.dtype
) -> Verification | None:
    """Compare copies; None if there can be none, or the code itself asks for another precision."""
    halves = [name for name, p in model.named_parameters() if p.is_floating_point() and p.dtype.itemsize < 4]
    try:
        copied, copied_small = copy.deepcopy(model).float(), copy.deepcopy(small).float()
        batches = list(_batches(*pytree.tree_map(_in_float32, inputs)))
        return _worst(copied, copied_small, batches, tolerance, half, halves)
    except VerificationError:
        raise
    except Exception:
        return None


def _in_float32(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype.itemsize < 4 else leaf


def _worst(
    model: nn.Module,
    small: nn.Module,
    batches: list[Any],
    tolerance: float | None,
    half: torch.dtype | None,
    halves: Sequence[str] = (),
) -> Verification:
    """The worst of several batches; ``halves`` are the model's parameters whose rounding is to be measured."""
    with torch.random.fork_rng(devices=[]):
        expected, actual = ([_outputs(one, *batch) for batch in batches] for one in (model, small))
        moved = [[_outputs(model, *pytree.tree_map(_nudge, batch)) for batch in batches]]
        if halves and half is not None:
            _round_elsewhere_(model, halves, half)
            moved.append([_outputs(model, *batch) for batch in batches])
    _refuse_nothing_to_compare(model, expected)
    floor = None
    if half is not None:
        floor = 2 * torch.finfo(half).eps if halves else _TOLERANCE.get(half, 5e-2)
    each = zip(expected, actual, zip(*moved, strict=True), strict=True)
    results = [_compare(*one, tolerance, floor) for one in each]
    return max(results, key=lambda result: math.inf if math.isnan(result.relative_error) else result.relative_error)


def _refuse_nothing_to_compare(model: nn.Module, expected: list[list[Tensor]]) -> None:
    if not expected[0]:
        raise TypeError(f"{type(model).__name__} gives out no tensors that could be compared")
    floats = [t for outputs in expected for t in outputs if t.is_floating_point() and t.numel()]
    if floats and not any(bool(t.isfinite().any()) for t in floats):
        raise VerificationError(
            f"can't tell whether the small model is the same function: all that {type(model).__name__} gives out is "
            "NaN or infinite. Look for such numbers in its weights, where a run that diverged leaves them, and in the "
            "inputs"
        )


def _round_elsewhere_(model: nn.Module, names: Sequence[str], half: torch.dtype) -> None:
    """Move parameters as far as rounding them to half precision might."""
    generator = torch.Generator().manual_seed(0)
    for name in names:
        parameter = model.get_parameter(name)
        step = torch.rand(parameter.shape, generator=generator).sub_(0.5).mul_(torch.finfo(half).eps)
        parameter.mul_(1 + step.to(parameter.device))


def _compare(
    expected: list[Tensor],
    actual: list[Tensor],
    moved: Sequence[list[Tensor]],
    tolerance: float | None,
    half_floor: float | None,
) -> Verification:
    shapes = [tuple(t.shape) for t in expected], [tuple(t.shape) for t in actual]
    if shapes[0] != shapes[1]:
        raise VerificationError(f"the outputs have other shapes: {shapes[0]} became {shapes[1]}")
    max_error = relative = noise = 0.0
    dtype = torch.float32
    for want, got, *others in zip(expected, actual, *moved, strict=True):
        if not want.is_floating_point():
            if not torch.equal(want, got):
                raise VerificationError(f"the small model is not the same function: outputs of {want.dtype} differ")
            continue
        dtype = want.dtype
        finite = want.isfinite()
        if not torch.equal(want[~finite].nan_to_num(nan=1.0), got[~finite].nan_to_num(nan=1.0)) or not bool(
            got[finite].isfinite().all()
        ):
            raise VerificationError("the small model is not the same function: NaN or infinities are elsewhere")
        want, got, *others = (
            torch.where(finite, t.double(), torch.zeros_like(t.double())) for t in (want, got, *others)
        )
        spread = _spread(want, torch.finfo(dtype).eps)
        error = _largest(want - got)
        max_error = max(max_error, error)
        rounding = 4 * torch.finfo(dtype).eps * _largest(want)  # of the output itself, however small the spread
        relative = max(relative, error / spread if error > rounding else 0.0)
        noise = max(noise, *(_largest(want - other) / spread for other in others))
    floor = half_floor or _TOLERANCE.get(dtype, 1e-4)
    likely = (_HALF_NOISE_FACTOR if half_floor else _NOISE_FACTOR) * noise
    allowed = tolerance if tolerance is not None else max(floor, min(likely, _LARGEST_TOLERANCE))
    return Verification(max_error, relative, noise, allowed, (len(expected[0]) if expected[0].dim() else 1,))


def _spread(output: Tensor, eps: float) -> float:
    """How much outputs differ from one input to another; their size where that is rounding or there is one input."""
    size = _largest(output)
    if output.dim() and output.shape[0] > 1:
        spread = _largest(output - output.mean(0, keepdim=True))
        if spread > 8 * eps * size:
            return spread
    return size or 1.0


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _batches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The inputs as given, then random ones of twice and one and a half times the batch where that is possible."""
    yield args, kwargs
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if not leaves or any(leaf.dim() < 2 or not leaf.is_floating_point() for leaf in leaves):
        return
    if len({leaf.shape[0] for leaf in leaves}) != 1:
        return
    generator = torch.Generator().manual_seed(0)

    def grow(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        shape = (2 * leaf.shape[0] + 1, *leaf.shape[1:])
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(leaf)

    yield pytree.tree_map(grow, (args, kwargs))


def _nudge(leaf: Any) -> Any:
    """One unit in the last place up, for half of the elements."""
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return leaf
    moved = torch.nextafter(leaf, torch.full_like(leaf, math.inf)) if leaf.dtype.itemsize > 2 else leaf * (1 + 2**-8)
    odd = torch.arange(leaf.numel(), device=leaf.device).reshape(leaf.shape) % 2 == 0
    return torch.where(odd, moved, leaf)


def _outputs(model: nn.Module, args: Any, kwargs: Any) -> list[Tensor]:
    """What a model gives out; what it leaves in its buffers is undone, so that each call meets the same ones."""
    with buffers_kept(model.modules()):
        return _tensors(model(*args, **kwargs))


def _tensors(output: Any) -> list[Tensor]:
    if hasattr(output, "to_tuple"):
        output = output.to_tuple()
    if isinstance(output, Tensor):
        return [torch.view_as_real(output.resolve_conj()) if output.is_complex() else output]
    if isinstance(output, Mapping):
        output = list(output.values())
    elif is_dataclass(output) and not isinstance(output, type):
        output = [getattr(output, field.name) for field in fields(output)]
    if isinstance(output, Sequence) and not isinstance(output, (str, bytes)):
        return [tensor for part in output for tensor in _tensors(part)]
    return []
