"""Does the small model compute what the large one did? Measured against how much outputs differ at all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from narrowgate.flow.trace import ExampleInputs, call_arguments, in_mode

# Relative to the spread of outputs: what rounding explains in each precision, or this many times the measured noise.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
_NOISE_FACTOR = 100.0


class VerificationError(AssertionError):
    """The two models differ by more than rounding."""


@dataclass(frozen=True)
class Verification:
    """How far two models' outputs are apart.

    ``relative_error`` is the largest difference over the spread of outputs across inputs; ``noise`` is what a change
    of the inputs by one unit in the last place does, on the same scale.
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
        return (
            f"{verdict}: max difference {self.max_error:.1e}, {self.relative_error:.1e} of the outputs' spread "
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

    Raises VerificationError where shapes differ or the difference is more than rounding explains.
    """
    args, kwargs = call_arguments(example_inputs)
    worst: Verification | None = None
    with in_mode(model, False), in_mode(small, False), torch.no_grad(), full_precision():
        for batch in _batches(args, kwargs):
            result = _compare(model, small, batch, tolerance)
            if worst is None or not result.relative_error <= worst.relative_error:
                worst = result
    assert worst is not None
    if not worst.passed:
        raise VerificationError(f"the small model is not the same function: {worst}")
    return worst


def _compare(model: nn.Module, small: nn.Module, batch: Any, tolerance: float | None) -> Verification:
    args, kwargs = batch
    with torch.random.fork_rng(devices=[]):
        expected = _tensors(model(*args, **kwargs))
        actual = _tensors(small(*args, **kwargs))
        nudged_args, nudged_kwargs = pytree.tree_map(_nudge, (args, kwargs))
        nudged = _tensors(model(*nudged_args, **nudged_kwargs))
    shapes = [tuple(t.shape) for t in expected], [tuple(t.shape) for t in actual]
    if shapes[0] != shapes[1]:
        raise VerificationError(f"the outputs have other shapes: {shapes[0]} became {shapes[1]}")
    max_error = relative = noise = 0.0
    dtype = torch.float32
    for want, got, moved in zip(expected, actual, nudged, strict=True):
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
        want, got, moved = (torch.where(finite, t.double(), torch.zeros_like(t.double())) for t in (want, got, moved))
        spread = _spread(want, torch.finfo(dtype).eps)
        error = _largest(want - got)
        max_error = max(max_error, error)
        rounding = 4 * torch.finfo(dtype).eps * _largest(want)  # of the output itself, however small the spread
        relative = max(relative, error / spread if error > rounding else 0.0)
        noise = max(noise, _largest(want - moved) / spread)
    floor = _TOLERANCE.get(dtype, 1e-4)
    allowed = tolerance if tolerance is not None else max(floor, _NOISE_FACTOR * noise)
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


def _tensors(output: Any) -> list[Tensor]:
    if hasattr(output, "to_tuple"):
        output = output.to_tuple()
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, Sequence) and not isinstance(output, Tensor):
        return [tensor for part in output for tensor in _tensors(part)]
    return [output] if isinstance(output, Tensor) else []
