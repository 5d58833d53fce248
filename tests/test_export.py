"""Exported files: they compute what the network does at any batch size, or they are not written."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import narrowgate as ng
from narrowgate import export as module
from narrowgate.export import SUFFIXES, ExportError, export, write_torch
from narrowgate.flow.layers import IndexedLayer

FORMATS = ("onnx", "torch")


class Residual(nn.Module):
    """Two layers of one stream, which each need other channels of it."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.branch = nn.Conv2d(8, 8, 3, padding=1)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x)
        x = F.relu(x + self.branch(F.relu(x)))
        return self.head(self.drop(x.mean((2, 3))))


EXAMPLE = torch.rand(2, 3, 6, 6)


@pytest.fixture(scope="module")
def scattered():
    """A network of the scatter layout, with index operations on both sides of a layer."""
    torch.manual_seed(0)
    model = Residual().eval()
    with torch.no_grad():
        for layer, dead in ((model.stem, slice(0, 4)), (model.branch, slice(2, 6))):
            layer.weight[dead], layer.bias[dead] = 0, 0
        model.branch.weight[:, 6] = 0
    small = ng.compact(model, ng.plan(model, EXAMPLE, layout="scatter"))
    assert any(isinstance(layer, IndexedLayer) and layer.scatter is not None for layer in small.modules())
    assert any(isinstance(layer, IndexedLayer) and layer.gather is not None for layer in small.modules())
    return small


def skip_without(format):
    if format == "onnx":
        for package in ("onnx", "onnxruntime", "onnxscript"):
            pytest.importorskip(package)


def outputs(path, format, x):
    """What the file computes, by the plainest way to run it."""
    if format == "torch":
        return torch.export.load(path).module()(x)
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


@pytest.mark.parametrize("format", FORMATS)
def test_the_file_computes_the_same_at_any_batch_size(tmp_path, scattered, format):
    skip_without(format)
    path = tmp_path / "new" / f"model.{'onnx' if format == 'onnx' else 'pt2'}"
    done = export(scattered, EXAMPLE, path, format=format)
    for batch in (1, 2, 9):
        x = torch.rand(batch, 3, 6, 6)
        torch.testing.assert_close(outputs(path, format, x), scattered(x).detach(), rtol=1e-4, atol=1e-6)
    assert (done.path, done.format, done.bytes, done.batches) == (str(path), format, path.stat().st_size, (2, 5))
    assert done.proof.passed and done.proof.relative_error < 1e-4
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert f"{path}: {format}, " in str(done) and "same function" in str(done) and "batch 2 and 5" in str(done)


def test_index_operations_survive_in_onnx(tmp_path, scattered):
    skip_without("onnx")
    import onnx

    export(scattered, EXAMPLE, tmp_path / "model.onnx")
    graph = onnx.load(tmp_path / "model.onnx").graph
    kinds = [node.op_type for node in graph.node]
    assert any(kind.startswith("Gather") for kind in kinds) and any(kind.startswith("Scatter") for kind in kinds)
    sizes = {tuple(tensor.dims) for tensor in graph.initializer}
    assert tuple(scattered.branch.weight.shape) in sizes and (8, 8, 3, 3) not in sizes
    assert graph.input[0].type.tensor_type.shape.dim[0].dim_param  # a name, not a number


def test_index_operations_survive_in_torch(tmp_path, scattered):
    export(scattered, EXAMPLE, tmp_path / "model.pt2", format="torch")
    names = [str(node.target) for node in torch.export.load(tmp_path / "model.pt2").graph.nodes]
    assert any("index_select" in name for name in names) and any("index_copy" in name for name in names)


def test_dropout_is_off_and_the_mode_is_given_back(tmp_path):
    model = Residual().train()
    export(model, EXAMPLE, tmp_path / "model.pt2", format="torch")
    assert model.training and model.drop.training
    run = torch.export.load(tmp_path / "model.pt2").module()
    assert torch.equal(run(EXAMPLE), run(EXAMPLE))
    torch.testing.assert_close(run(EXAMPLE), model.eval()(EXAMPLE))


def test_one_sample_is_enough(tmp_path):
    done = export(Residual(), EXAMPLE[:1], tmp_path / "model.pt2", format="torch")
    assert done.batches == (2, 5)
    assert outputs(tmp_path / "model.pt2", "torch", torch.rand(4, 3, 6, 6)).shape == (4, 5)


def test_a_file_that_computes_something_else_is_not_written(tmp_path, monkeypatch):
    path = tmp_path / "model.pt2"
    path.write_bytes(b"the old one")
    other = Residual()
    monkeypatch.setattr(module, "write_torch", lambda model, x, to: write_torch(other, x, to))
    with pytest.raises(ExportError, match=r"the torch file is not the same function as the model: .*DIFFERENT"):
        export(Residual(), EXAMPLE, path, format="torch")
    assert path.read_bytes() == b"the old one" and len(list(tmp_path.iterdir())) == 1


FULL = """
import resource, sys
import torch
from narrowgate.export import ExportError, export

resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))  # in place of a disk that is full
try:
    export(torch.nn.Linear(100, 100), torch.rand(2, 100), sys.argv[1], format=sys.argv[2])
except ExportError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="it has no such limits")
@pytest.mark.parametrize("format", ["onnx", "torch"])
def test_a_full_disk_is_told_with_the_file(tmp_path, format):
    path = tmp_path / ("model" + SUFFIXES[format])
    done = subprocess.run([sys.executable, "-c", FULL, path, format], capture_output=True, text=True, check=True)
    assert done.stdout == f"can't write {path}: File too large; choose another --out\n"
    assert not list(tmp_path.iterdir())


def test_a_network_for_one_batch_size_is_refused(tmp_path):
    class Fixed(Residual):
        def forward(self, x):
            return super().forward(x.reshape(2, 3, 6, 6))

    with pytest.raises(ExportError, match="can't trace Fixed for any batch size"):
        export(Fixed(), EXAMPLE, tmp_path / "model.pt2", format="torch")
    assert not list(tmp_path.iterdir())


def test_a_batch_size_that_len_fixed_is_named(tmp_path):
    """``len(x)`` is a number, not the size of an axis that may differ; nobody would guess it from torch.export."""

    class Measured(Residual):
        def forward(self, x):
            return super().forward(x) + torch.zeros(1, 5).expand(len(x), -1)

    class Sized(Residual):
        def forward(self, x):
            return super().forward(x) + torch.zeros(1, 5).expand(x.shape[0], -1)

    with pytest.raises(ExportError, match=r"len\(x\) or int\(\.\.\.\) where x\.shape\[0\] would not"):
        export(Measured(), EXAMPLE, tmp_path / "model.pt2", format="torch")
    assert export(Sized(), EXAMPLE, tmp_path / "model.pt2", format="torch").proof.passed


def test_a_wrapper_for_several_gpus_is_named(tmp_path):
    with pytest.raises(ExportError, match=r"export needs the model inside DataParallel: pass model\.module"):
        export(nn.DataParallel(Residual()), EXAMPLE, tmp_path / "model.pt2", format="torch")


@pytest.mark.parametrize("format", FORMATS)
def test_outputs_that_a_file_can_not_hold_are_said_in_a_line(tmp_path, format):
    skip_without(format)

    class Talking(Residual):
        def forward(self, x):
            return super().forward(x), "done"

    with pytest.raises(ExportError) as stopped:
        export(Talking(), EXAMPLE, tmp_path / "model", format=format)
    assert "\x1b" not in str(stopped.value) and "\n" not in str(stopped.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("example", "path", "format", "message"),
    [
        (EXAMPLE, "model.onnx", "onxx", "unknown format 'onxx'; choose one of onnx, torch"),
        ((EXAMPLE,), "model.onnx", "onnx", "one tensor"),
        (torch.rand(3), "model.onnx", "onnx", "first axis is the batch"),
        (EXAMPLE[:0], "model.onnx", "onnx", "one sample or more"),
        (EXAMPLE, "model.onnx", "torch", r"another format's file; write .*model\.pt2 for torch"),
        (EXAMPLE, "", "torch", r"is a folder; give the name of a file, such as .*model\.pt2"),
    ],
)
def test_wrong_arguments_are_named(tmp_path, example, path, format, message):
    with pytest.raises(ExportError, match=message):
        export(Residual(), example, tmp_path / path, format=format)


def test_without_onnx_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ModuleNotFoundError) as stopped:
        export(Residual(), EXAMPLE, tmp_path / "model.onnx")
    assert stopped.value.name in ("onnx", "onnxruntime", "onnxscript") and not list(tmp_path.iterdir())


@pytest.mark.parametrize("format", FORMATS)
def test_a_compiled_network_is_exported_as_the_one_inside(tmp_path, format):
    skip_without(format)
    model = Residual().train()
    done = export(torch.compile(model, backend="eager"), EXAMPLE, tmp_path / "model", format=format)
    assert done.bytes == (tmp_path / "model").stat().st_size and model.training


def test_what_onnx_runtime_cannot_run_is_said_in_a_line(tmp_path):
    skip_without("onnx")
    with pytest.raises(ExportError, match=r"ONNX Runtime can't run the file: .*model\.float\(\)"):
        export(Residual().bfloat16(), EXAMPLE.bfloat16(), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("takes", ["words", "numbers"])
def test_results_or_inputs_that_numpy_has_no_type_for(tmp_path, takes):
    """ONNX Runtime loads such a file and can't be handed the numbers."""
    skip_without("onnx")
    model = nn.Embedding(9, 4).bfloat16() if takes == "words" else nn.Flatten()
    example = torch.arange(6).view(2, 3) if takes == "words" else torch.randn(2, 3, 4).bfloat16()
    with pytest.raises(ExportError, match=r"ONNX Runtime can't run the file: .*(?i:bfloat16).*model\.float\(\)"):
        export(model, example, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


class Remembers(nn.Module):
    """Keeps a table that it makes in its first call."""

    table = None

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 5)

    def forward(self, x):
        if self.table is None:
            self.table = torch.linspace(-1, 1, 6)
        return self.layer(x * self.table)


@pytest.mark.parametrize("format", FORMATS)
def test_what_a_model_keeps_for_its_next_call_has_numbers(format, tmp_path):
    skip_without(format)
    model, x = Remembers().eval(), torch.rand(3, 6)
    path = tmp_path / f"model{module.SUFFIXES[format]}"
    export(model, x, path, format=format)
    wanted = model.layer(x * torch.linspace(-1, 1, 6))
    torch.testing.assert_close(model(x), wanted)
    torch.testing.assert_close(outputs(path, format, x), wanted)
