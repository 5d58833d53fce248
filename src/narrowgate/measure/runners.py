"""Ways to run a network, each as a call without arguments: eager, compiled, ONNX Runtime, CUDA graph."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Call = Callable[[], object]
Prepared = Callable[[Tensor], Call]
MODES = {"cpu": ("eager", "compiled", "onnx"), "cuda": ("eager", "compiled", "graph")}
# By the name of the exception that PyTorch's compiler raises, whatever it wraps it in.
_COMPILER_NEEDS = {
    "InvalidCxxCompiler": "torch.compile finds no C++ compiler: install g++ or clang, or set CXX to one",
    "TritonMissing": "torch.compile needs Triton on a GPU: pip install triton",
    "GPUTooOldForTriton": "Triton, which torch.compile uses, does not support a GPU this old",
}


class UnavailableError(RuntimeError):
    """A way of running that is missing here; says what to install."""


def prepare(model: nn.Module, example: Tensor, mode: str) -> Prepared:
    """A function from inputs to a call that runs the model on them, warmed up; the model is in eval mode already."""
    if mode == "onnx":
        return _onnx_runtime(model, example)
    return {"eager": _eager, "compiled": _compiled, "graph": _cuda_graph}[mode](model)


def device_or_why_not(device: str) -> str | None:
    """Why nothing can run on a device, or None."""
    if device == "cuda" and not torch.cuda.is_available():
        built = "sees no GPU" if torch.version.cuda else "was built without CUDA: install one from pytorch.org"
        return f"PyTorch {torch.__version__} {built}"
    return None


def _eager(model: nn.Module) -> Prepared:
    def on(x: Tensor) -> Call:
        def run() -> object:
            with torch.no_grad():
                return model(x)

        return run

    return on


def _compiled(model: nn.Module) -> Prepared:
    def on(x: Tensor) -> Call:
        # Anew for each batch size: a second one would make the compiler give up on constant shapes.
        run = _eager(torch.compile(model, dynamic=False))(x)  # type: ignore[arg-type]
        try:
            run()
        except Exception as error:
            raise UnavailableError(_why(error)) from error
        return run

    return on


def _why(error: BaseException) -> str:
    """What is missing, where PyTorch says so; else its own first line."""
    text = f"{type(error).__name__}: {error}"
    link: BaseException | None = error
    while link is not None:
        for name, need in _COMPILER_NEEDS.items():
            if name in type(link).__name__ or name in str(link):
                return need
        link = link.__cause__ or link.__context__
    return f"torch.compile failed: {text.splitlines()[0]}"


def _cuda_graph(model: nn.Module) -> Prepared:
    eager = _eager(model)

    def on(x: Tensor) -> Call:
        run = eager(x)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # cuDNN and the allocator settle outside the graph
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay

    return on


def _onnx_runtime(model: nn.Module, example: Tensor) -> Prepared:
    if any(each.is_floating_point() and each.dtype != torch.float32 for each in (example, *model.parameters())):
        raise UnavailableError("ONNX Runtime is timed in float32 only: choose --precision 32")
    from narrowgate.export import ExportError, write_onnx

    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "model.onnx")
        try:
            write_onnx(model, example, file)
            session = _onnx_session(file)
        except ModuleNotFoundError as error:
            raise UnavailableError(
                f'{error.name} is not installed: pip install ".[export]" in the checkout of narrowgate'
            ) from error
        except (ExportError, OSError) as error:  # of a full folder for temporary files, too
            raise UnavailableError(str(error)) from error
    name = session.get_inputs()[0].name

    def on(x: Tensor) -> Call:
        feed = {name: x.contiguous().numpy()}
        return lambda: session.run(None, feed)

    return on


def _onnx_session(file: str) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    # Threads that go on spinning after a run would take time from the other network's next one.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    try:
        return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise UnavailableError(f"ONNX Runtime can't run the network: {str(error).splitlines()[0]}") from error
