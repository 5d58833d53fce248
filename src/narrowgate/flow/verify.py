"""Does the small model compute what the large one did? Measured against how much outputs differ at all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from narrowgate.flow.copies import copy_structure
from narrowgate.flow.differences import (
    NOISE_FACTOR,
    TOLERANCE,
    WEIGHTS_NOISE_FACTOR,
    Difference,
    Limits,
    ratio,
    worst_part,
)
from narrowgate.flow.trace import ExampleInputs, buffers_kept, call_arguments, in_mode
from narrowgate.flow.trials import Inputs, elsewhere, nudge, shapes_of, trials


class VerificationError(AssertionError):
    """The two models differ by more than rounding."""


class _SmallFails(VerificationError):
    """The small model does not run at all."""


@dataclass(frozen=True)
class Verification:
    """How far two models' outputs are apart.

    ``relative_error`` is the largest difference over the spread of outputs across inputs, 0 where it is no more than
    the outputs' own last digits; ``noise`` is what a change of the inputs by one unit in the last place does, on the
    same scale, or of the weights where they are in half precision or that of the inputs does not explain it. These two
    and the tolerance are of the whole output or of one of its channels, ``where``, whichever is worse; for inputs of
    the shapes ``inputs``. ``constant`` says that the first model gave out the same for all inputs, as one that has
    collapsed does.
    """

    max_error: float
    relative_error: float
    noise: float
    tolerance: float
    batches: tuple[int, ...]
    where: str = ""
    inputs: tuple[tuple[int, ...], ...] = ()
    constant: bool = False

    @property
    def passed(self) -> bool:
        """Whether the error is within the tolerance."""
        return self.relative_error <= self.tolerance

    def __str__(self) -> str:
        verdict = "same function" if self.passed else "DIFFERENT"
        share = f"{self.relative_error:.1e} of the outputs' spread" + (f" at {self.where}" if self.where else "")
        if self.max_error and not self.relative_error:  # "0.0e+00 of the spread" would contradict the difference
            share = "within the rounding of the outputs themselves"
        return (
            f"{verdict}: max difference {self.max_error:.1e}, {share} "
            f"(rounding noise {self.noise:.1e}, allowed {self.tolerance:.1e})"
            + ("; but the model's output is the same for all inputs" if self.constant else "")
        )


@contextlib.contextmanager
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
    model: nn.Module,
    small: nn.Module,
    example_inputs: ExampleInputs,
    *,
    tolerance: float | None = None,
    other_sizes: bool = True,
) -> Verification:
    """Compare two models in eval mode on the example inputs and on random ones like them.

    These are a second batch and a batch of larger images (or longer sequences), where the model takes such. Models in
    half precision are compared as copies in float32, where that is possible: their own rounding would hide what there
    is to see. Raises VerificationError where the small model fails, shapes differ, the difference is more than rounding
    explains, or rounding is so large that nothing can be told.

    Args:
        tolerance: what to allow, relative to the spread of whole outputs. By default what rounding explains.
        other_sizes: try larger images too; not for networks that will only ever see one size.
    """
    for each in (model, small):
        if not isinstance(each, nn.Module):
            raise TypeError(f"verify compares two models, nn.Modules that were built, got {type(each).__name__}")
    args, kwargs = call_arguments(example_inputs)
    half = _half_precision(model, small, (args, kwargs))
    worst: Verification | None = None
    with in_mode(model, False), in_mode(small, False), torch.no_grad(), full_precision():
        if half is not None:
            worst = _compare_in_float32(model, small, (args, kwargs), tolerance, half, other_sizes)
        if worst is None:
            worst = _worst(model, small, trials(args, kwargs, other_sizes), tolerance, half)
    if not worst.passed:
        where = elsewhere(worst.inputs, shapes_of((args, kwargs)))
        raise VerificationError(_message(worst, tolerance, half, where, trained=any(True for _ in small.parameters())))
    return worst


def _message(worst: Verification, tolerance: float | None, half: torch.dtype | None, where: str, trained: bool) -> str:
    explained = worst.relative_error <= (WEIGHTS_NOISE_FACTOR if half else NOISE_FACTOR) * worst.noise
    if tolerance is not None or not explained:
        remedy = "; if either was trained on since the plan was made, plan and compact again" if trained else ""
        return f"the small model is not the same function: {worst}{where}{remedy}"
    numbers = str(worst).partition(": ")[2]
    remedy = "turn random numbers off if the model draws any, or give inputs for which outputs differ more"
    if half:
        remedy = "plan and compact the model in float32, verify that, and cast the small model afterwards"
    doubt = "can't tell whether the small model is the same function, rounding may be all of it"
    return f"{doubt}: {numbers}; {remedy}{where}"


def _half_precision(model: nn.Module, small: nn.Module, inputs: Any) -> torch.dtype | None:
    """The coarsest precision below float32 among the tensors of two models and their inputs."""
    tensors = [t for one in (model, small) for t in (*one.parameters(), *one.buffers())]
    tensors += [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    halves = {t.dtype for t in tensors if t.is_floating_point() and t.dtype.itemsize < 4}
    return max(halves, key=lambda dtype: torch.finfo(dtype).eps, default=None)


def _compare_in_float32(
    model: nn.Module, small: nn.Module, inputs: Any, tolerance: float | None, half: torch.dtype, other_sizes: bool
) -> Verification | None:
    """Compare copies; None if there can be none, or the code itself asks for another precision."""
    halves = [name for name, p in model.named_parameters() if p.is_floating_point() and p.dtype.itemsize < 4]
    try:
        copied, copied_small = copy_structure(model, {}).float(), copy_structure(small, {}).float()
        args, kwargs = pytree.tree_map(_in_float32, inputs)
        batches = trials(args, kwargs, other_sizes)
        return _worst(copied, copied_small, batches, tolerance, half, halves)
    except _SmallFails:
        return None  # an exported file runs in its own precision only
    except VerificationError:
        raise
    except Exception:
        return None


def _in_float32(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype.itemsize < 4 else leaf


def _worst(
    model: nn.Module,
    small: nn.Module,
    alternatives: Iterator[list[Inputs]],
    tolerance: float | None,
    half: torch.dtype | None,
    halves: Sequence[str] = (),
) -> Verification:
    """The first of several trials that fails, or the worst; ``halves`` are parameters whose rounding is measured."""
    floor = None
    if half is not None:
        floor = 2 * torch.finfo(half).eps if halves else TOLERANCE.get(half, 5e-2)
    with torch.random.fork_rng(devices=[]):
        batches, expected = that_run(model, alternatives)
        _refuse_nothing_to_compare(model, expected)
        moved = [[outputs_of(model, *pytree.tree_map(nudge, batch)) for batch in batches]]
        if halves and half is not None:
            _round_elsewhere_(model, halves, half)
            moved.append([outputs_of(model, *batch) for batch in batches])
        results: list[Verification] = []
        for batch, want, others in zip(batches, expected, zip(*moved, strict=True), strict=True):
            try:
                found = _compare(want, _of_small(small, batch), others, Limits(tolerance, floor))
            except VerificationError as error:
                where = elsewhere(shapes_of(batch), shapes_of(batches[0]))
                raise type(error)(f"{error}{where}") from error.__cause__
            if not found.passed and tolerance is None and half is None:
                found = _beside_all_rounding(model, small, batch, want, found)
            results.append(replace(found, inputs=shapes_of(batch)))
            if not found.passed:
                return results[-1]
    worst = max(results, key=lambda result: ratio(result.relative_error, result.tolerance))
    return replace(worst, constant=_same_for_all(expected))


def _same_for_all(expected: list[list[Tensor]]) -> bool:
    """Whether all entries of all batches are alike, of a model that gives out an entry for each."""
    several = [t for outputs in expected for t in outputs if t.dim() and len(t) > 1]
    return bool(several) and all(bool((t == t[:1]).all()) for t in several)


def _beside_all_rounding(
    model: nn.Module, small: nn.Module, batch: Inputs, want: list[Tensor], found: Verification
) -> Verification:
    """A failed comparison once more, beside the first model with another last digit in every weight, and in float64.

    Removal adds numbers of weights up and rounds the sums; where these nearly cancel, as constants in front of a small
    variance do, that is more than another last digit of the inputs shows.
    """
    others = []
    with contextlib.suppress(Exception):  # there may be no copy, or none in float64
        other = copy_structure(model, {})
        for tensor in (*other.parameters(), *other.buffers()):
            tensor.copy_(nudge(tensor))
        others.append(outputs_of(other, *batch))
        others.append(outputs_of(copy_structure(model, {}).double(), *pytree.tree_map(_in_float64, batch)))
    if not others:
        return found
    again = _compare(want, _of_small(small, batch), others, Limits(of_weights=True))
    return again if again.passed else found


def _in_float64(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def that_run(model: nn.Module, alternatives: Iterator[list[Inputs]]) -> tuple[list[Inputs], list[list[Tensor]]]:
    """Those as given, and of each of the others the first that the model takes; what it gives out for them."""
    found = list(next(alternatives))
    expected = [outputs_of(model, *found[0])]
    for several in alternatives:
        for batch in several:
            with contextlib.suppress(Exception):
                outputs = outputs_of(model, *batch)
                # view(-1, 64) takes images of another size for several: that is no use of the model.
                if _one_for_each(expected[0], found[0]) == _one_for_each(outputs, batch):
                    expected.append(outputs)
                    found.append(batch)
                    break
    return found, expected


def _one_for_each(outputs: list[Tensor], inputs: Inputs) -> list[bool]:
    """Which outputs have as many entries as the inputs have."""
    shapes = shapes_of(inputs)
    return [bool(shapes) and output.shape[:1] == shapes[0][:1] for output in outputs]


def _of_small(small: nn.Module, batch: Inputs) -> list[Tensor]:
    try:
        return outputs_of(small, *batch)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise _SmallFails(f"the small model fails where the other runs: {reason}") from error


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
        step = torch.rand(parameter.shape, generator=generator, device="cpu").sub_(0.5).mul_(torch.finfo(half).eps)
        parameter.mul_(1 + step.to(parameter.device))


def _compare(
    expected: list[Tensor], actual: list[Tensor], moved: Sequence[list[Tensor]], limits: Limits
) -> Verification:
    shapes = [tuple(t.shape) for t in expected], [tuple(t.shape) for t in actual]
    if shapes[0] != shapes[1]:
        raise VerificationError(f"the outputs have other shapes: {shapes[0]} became {shapes[1]}")
    max_error = 0.0
    parts: list[Difference] = []
    for want, got, *others in zip(expected, actual, *moved, strict=True):
        if not want.is_floating_point():
            if not torch.equal(want, got):
                raise VerificationError(f"the small model is not the same function: outputs of {want.dtype} differ")
            continue
        finite = want.isfinite()
        same = torch.allclose(want[~finite], got[~finite], rtol=0, atol=0, equal_nan=True)
        if not same or not bool(got[finite].isfinite().all()):
            raise VerificationError("the small model is not the same function: NaN or infinities are elsewhere")
        dtype = want.dtype
        want, got, *others = (
            torch.where(finite, t.double(), torch.zeros_like(t.double())) for t in (want, got, *others)
        )
        if want.numel():
            max_error = max(max_error, float((want - got).abs().max()))
            parts.append(worst_part(want, got, others, limits, dtype))
    nothing = Difference(0.0, 0.0, limits.tolerance or limits.half_floor or TOLERANCE[torch.float32])
    worst = max(parts, key=lambda part: part.excess, default=nothing)
    batch = len(expected[0]) if expected[0].dim() else 1
    return Verification(max_error, worst.relative, worst.noise, worst.allowed, (batch,), worst.where)


def outputs_of(model: nn.Module, args: Any, kwargs: Any) -> list[Tensor]:
    """What a model gives out; what it leaves in its buffers or inputs is undone, so that each call meets the same."""
    own: dict[int, Tensor] = {}  # what is given twice stays one tensor: attention asks whether it is
    args, kwargs = pytree.tree_map_only(Tensor, lambda given: own.setdefault(id(given), given.clone()), (args, kwargs))
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
