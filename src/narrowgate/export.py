"""Write a network for somewhere else, ONNX or torch.export, and prove that the written file computes the same."""

from __future__ import annotations

import contextlib
import io
import os
import re
import uuid
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import ConstantArgument
from torch.nn import functional as F
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.overrides import TorchFunctionMode

from narrowgate.flow.trace import exporting, in_mode
from narrowgate.flow.verify import Verification, VerificationError, verify
from narrowgate.weights import uncompiled

SUFFIXES = {"onnx": ".onnx", "torch": ".pt2"}
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # for a terminal, which PyTorch puts into messages


class ExportError(RuntimeError):
    """A network that can't be written as asked, or a file that does not compute what the network does."""


class TargetError(ExportError):
    """A file that is not to be written under this name."""


@dataclass(frozen=True)
class Exported:
    """A written file: where, how large, and how far its outputs are from the network's at ``batches`` sizes."""

    path: str
    format: str
    bytes: int
    batches: tuple[int, int]
    proof: Verification

    def __str__(self) -> str:
        sizes = " and ".join(map(str, self.batches))
        return f"{self.path}: {self.format}, {self.bytes / 1e6:.2f} MB; at batch {sizes}, {self.proof}"


def export(model: nn.Module, example: Tensor, path: str | Path, *, format: str = "onnx") -> Exported:
    """Write the model in eval mode, for any batch size; the file is loaded, run and compared before it is put there.

    Args:
        example: inputs of the shape that the file will take; only their first axis, the batch, may differ later.
        format: ``onnx`` (for ONNX Runtime and others) or ``torch`` (for ``torch.export.load``).
    """
    if format not in SUFFIXES:
        raise ExportError(f"unknown format {format!r}; choose one of {', '.join(SUFFIXES)}")
    if not isinstance(example, Tensor) or example.dim() < 2 or not len(example):
        raise ExportError("the example must be one tensor whose first axis is the batch, of one sample or more")
    target = Path(path)
    if target.is_dir():
        raise TargetError(
            f"{target} is a folder; give the name of a file, such as {target / 'model'}{SUFFIXES[format]}"
        )
    if target.suffix != SUFFIXES[format] and target.suffix in SUFFIXES.values():
        raise TargetError(
            f"{target} is named as another format's file; write {target.with_suffix(SUFFIXES[format])} for {format}"
        )
    model = uncompiled(model)
    if isinstance(model, (DataParallel, DistributedDataParallel)):
        raise ExportError(f"export needs the model inside {type(model).__name__}: pass model.module")
    write, open_ = (write_onnx, _open_onnx) if format == "onnx" else (write_torch, _open_torch)
    inputs = _at_least_two(example)
    target.parent.mkdir(parents=True, exist_ok=True)
    # The suffix stays last: torch.export warns about files of another name.
    new = target.with_name(f".{uuid.uuid4().hex[:8]}.new{SUFFIXES[format]}")
    try:
        new.touch()  # to fail now where no file can be written, not after a minute of tracing
        write(model, inputs, new)
        try:
            proof = verify(model, _File(open_(new)), inputs, other_sizes=False)
        except VerificationError as error:
            raise ExportError(f"the {format} file is not the same function as the model: {error}") from error
        size = new.stat().st_size
        os.replace(new, target)
    except OSError as error:
        raise ExportError(f"can't write {target}: {error.strerror or error}; choose another --out") from error
    finally:
        with contextlib.suppress(OSError):  # where nothing can be written, nothing can be removed
            new.unlink(missing_ok=True)
    return Exported(str(target), format, size, (len(inputs), 2 * len(inputs) + 1), proof)


def write_torch(model: nn.Module, example: Tensor, path: str | Path) -> None:
    """Write a ``.pt2`` file, unchecked."""
    packed = io.BytesIO()  # on a full disk PyTorch's own writer ends the process
    torch.export.save(_program(model, example), packed)
    Path(path).write_bytes(packed.getbuffer())


def write_onnx(model: nn.Module, example: Tensor, path: str | Path) -> None:
    """Write an ONNX file, weights inside, unchecked."""
    _need_onnx()
    with _Norms():
        program = _program(model, example)
    given = [spec.arg for spec in program.graph_signature.output_specs]
    if other := [arg.value for arg in given if isinstance(arg, ConstantArgument) and arg.value is not None]:
        raise ExportError(
            f"an ONNX file can't hold {other[0]!r}, which the network gives out: let it give tensors alone"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter about itself
        try:
            onnx_program = torch.onnx.export(program, dynamo=True, verbose=False, dynamic_shapes=_any_batch())
            assert onnx_program is not None
            onnx_program.save(str(path), external_data=False)
        except OSError:  # of the file
            raise
        except Exception as error:
            raise ExportError(f"PyTorch's ONNX exporter failed: {_first_line(error)}") from error


class _Norms(TorchFunctionMode):
    """BatchNorm as sums and products for PyTorch 2.6, whose ONNX exporter fails on it with today's onnxscript."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        use = _batch_norm if func is F.batch_norm and torch.__version__ < "2.7" else func
        return use(*args, **(kwargs or {}))


def _batch_norm(
    x: Tensor,
    mean: Tensor | None,
    variance: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if training or mean is None or variance is None:
        return F.batch_norm(x, mean, variance, weight, bias, training, momentum, eps)
    along = (-1, *[1] * (x.dim() - 2))
    y = (x - mean.reshape(along)) * torch.rsqrt(variance + eps).reshape(along)
    y = y if weight is None else y * weight.reshape(along)
    return y if bias is None else y + bias.reshape(along)


def _need_onnx() -> None:
    import onnx  # noqa: F401
    import onnxruntime  # noqa: F401
    import onnxscript  # noqa: F401


def _program(model: nn.Module, example: Tensor) -> Any:
    model = uncompiled(model)
    with in_mode(model, False), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inputs = (_at_least_two(example),)
        try:
            with exporting(model):
                return torch.export.export(model, inputs, dynamic_shapes=_any_batch(), strict=False)
        except Exception as error:
            raise ExportError(
                f"torch.export can't trace {type(model).__name__} for any batch size: {_first_line(error)}. "
                "Its forward must not branch on tensor values, nor fix the batch size, as a number in a view does, and "
                "len(x) or int(...) where x.shape[0] would not"
            ) from error


def _any_batch() -> tuple[dict[int, Any]]:
    return ({0: torch.export.Dim("batch")},)


def _at_least_two(example: Tensor) -> Tensor:
    """torch.export takes a batch of one for a constant; the second sample differs, or outputs would have no spread."""
    return example if len(example) > 1 else torch.cat([example, example.flip(-1)])


def _first_line(error: BaseException) -> str:
    lines = [line for line in _COLOURS.sub("", str(error)).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__


class _File(nn.Module):
    """A written file as a module, so that it can be verified like one."""

    def __init__(self, run: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.run = (run,)  # in a tuple: an exported module refuses eval() and must not become a child

    def forward(self, x: Tensor) -> Any:
        return self.run[0](x)


def _open_torch(path: Path) -> Callable[[Tensor], Any]:
    try:
        run: Callable[[Tensor], Any] = torch.export.load(path).module()
    except Exception as error:
        raise ExportError(
            f"torch.export can't read the file that it wrote: {_first_line(error)}. Let the network give out tensors "
            "alone, in tuples, lists or dicts, and no text"
        ) from error
    return run


def _open_onnx(path: Path) -> Callable[[Tensor], Any]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise _cannot_run(error) from error
    name = session.get_inputs()[0].name

    def run(x: Tensor) -> list[Tensor]:
        try:
            results = session.run(None, {name: x.detach().cpu().numpy()})
        except Exception as error:  # NumPy has no bfloat16, for one
            raise _cannot_run(error) from error
        return [torch.from_numpy(y).to(x.device) for y in results]

    return run


def _cannot_run(error: Exception) -> ExportError:
    return ExportError(
        f"ONNX Runtime can't run the file: {_first_line(error)}. If the network is not in float32, convert it with "
        "model.float()"
    )
