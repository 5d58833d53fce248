"""The paired examples: they run on any .npz file, and differ in the few lines that gates cost."""

import difflib
import re
import runpy
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parent.parent
EXAMPLES = ("train_plain", "train_gated")
MNIST = ROOT.parent / "shared" / "data" / "mnist.npz"

needs_mnist = pytest.mark.skipif(not MNIST.is_file(), reason="real MNIST is not at ../shared/data/mnist.npz")


def run_example(name, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")


def errors(output):
    return [float(percent) for percent in re.findall(r"epoch +\d+  error ([\d.]+)%", output)]


def snippet(name):
    """The lines that an example shows to someone who has no data."""
    message = runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["NO_DATA"]
    return "\n".join(line.strip() for line in message.splitlines() if line.startswith("    "))


class SmallMNIST:
    """torchvision's MNIST as the snippet uses it, with scikit-learn's digits enlarged to 28 x 28."""

    def __init__(self, root, train, download=False):
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = np.kron(digits.images * (255 / 16), np.ones((3, 3))).reshape(-1, 24, 24)
        images = np.pad(images, ((0, 0), (2, 2), (2, 2))).astype(np.uint8)
        part = slice(0, 1500) if train else slice(1500, None)
        repeats = 8 if train else 1  # one epoch of 1,500 images is too short to learn from
        self.data = torch.from_numpy(images[part]).repeat(repeats, 1, 1)
        self.targets = torch.from_numpy(digits.target[part]).repeat(repeats)


@pytest.fixture(scope="module")
def small_file(tmp_path_factory):
    """The file that the examples' own instructions make."""
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp("data")
    datasets = types.ModuleType("torchvision.datasets")
    datasets.MNIST = SmallMNIST
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
        patch.setitem(sys.modules, "torchvision.datasets", datasets)
        patch.chdir(folder)
        exec(snippet("train_plain"), {})
    return folder / "mnist.npz"


def test_the_file_has_the_four_arrays(small_file):
    with np.load(small_file) as file:
        assert {key: file[key].shape for key in file} == {
            "x_train": (12000, 28, 28),
            "y_train": (12000,),
            "x_test": (297, 28, 28),
            "y_test": (297,),
        }
        assert file["x_train"].dtype == np.uint8
        assert file["x_train"].max() == 255


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_learns_in_one_epoch(name, small_file, monkeypatch, capsys):
    run_example(name, monkeypatch, "--data", small_file, "--epochs", 1)
    output = capsys.readouterr().out
    (error,) = errors(output)
    assert error < 60  # chance is 90
    assert ("left:" in output) == (name == "train_gated")


@needs_mnist
@pytest.mark.slow
def test_gated_example_learns_on_real_mnist(tmp_path, monkeypatch, capsys):
    with np.load(MNIST) as file:
        part = {key: file[key][: 12000 if "train" in key else 1000] for key in file}
    np.savez(tmp_path / "part.npz", **part)
    run_example("train_gated", monkeypatch, "--data", tmp_path / "part.npz", "--epochs", 1)
    output = capsys.readouterr().out
    (error,) = errors(output)
    assert error < 20
    left = [int(count) for count in re.findall(r": (\d+)", output.splitlines()[-1])]
    assert len(left) == 4
    assert 0 < sum(left) <= 20 + 50 + 800 + 500


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("arguments", [(), ("--data", "nowhere.npz")])
def test_without_data_the_example_says_how_to_get_it(name, arguments, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stopped:
        run_example(name, monkeypatch, *arguments)
    message = capsys.readouterr().err
    assert stopped.value.code == 2
    for word in ("x_train", "y_train", "x_test", "y_test", "torchvision", *arguments[1:]):
        assert word in message


def test_gates_cost_a_few_lines():
    plain, gated = ((ROOT / "examples" / f"{name}.py").read_text().splitlines() for name in EXAMPLES)
    changes = list(difflib.unified_diff(plain, gated, lineterm="", n=0))[2:]
    added = [line for line in changes if line.startswith("+")]
    removed = [line for line in changes if line.startswith("-")]
    assert 0 < len(added) <= 8
    assert len(removed) <= 1
