"""train_shrinking.py: the gated example with a Shrinker, a few lines more."""

import difflib
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

import narrowgate as ng

EXAMPLES = Path(__file__).parent.parent / "examples"


def run_example(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["train_shrinking.py", *map(str, arguments)])
    runpy.run_path(str(EXAMPLES / "train_shrinking.py"), run_name="__main__")


def write_digits(path, count, repeats):
    """Scikit-learn's digits, enlarged to 28 x 28, in the file that the example reads."""
    images, labels = pytest.importorskip("sklearn.datasets").load_digits(return_X_y=True)
    images = np.kron(images.reshape(-1, 8, 8) * (255 / 16), np.ones((3, 3)))
    images = np.pad(images, ((0, 0), (2, 2), (2, 2))).astype(np.uint8)
    train = {"x_train": images[:count].repeat(repeats, 0), "y_train": labels[:count].repeat(repeats)}
    np.savez(path, **train, x_test=images[1500:], y_test=labels[1500:])
    return path


def test_it_shrinks_while_it_learns(tmp_path, monkeypatch, capsys):
    file = write_digits(tmp_path / "digits.npz", 1500, 4)
    attach = ng.attach_gates_
    monkeypatch.setattr(ng, "attach_gates_", lambda model: spread(attach(model)))  # a long run in no time
    run_example(monkeypatch, "--data", file, "--epochs", 2)
    output = capsys.readouterr().out
    before, after = (int(n.replace(",", "")) for n in re.search(r"([\d,]+) -> ([\d,]+) parameters", output).groups())
    assert before == 431_080 and after < 0.7 * before
    errors = [float(percent) for percent in re.findall(r"error ([\d.]+)%", output)]
    assert len(errors) == 2 and errors[-1] < 70  # chance is 90
    removed = int(re.search(r"(\d+) are gone", output)[1])
    left = [int(count) for count in re.findall(r": (\d+)", output.splitlines()[-2])]
    assert removed > 200 and sum(left) <= 1370 - removed


def spread(gates):
    """A third of the gates is as good as closed, the others are far from it."""
    for name in gates:
        gates[name].g.data[::3] = 1e-5
    return gates


def test_without_closed_gates_nothing_is_removed(tmp_path, monkeypatch, capsys):
    file = write_digits(tmp_path / "digits.npz", 200, 1)
    run_example(monkeypatch, "--data", file, "--epochs", 1)
    output = capsys.readouterr().out
    assert "shrunk" not in output and " 0 are gone" in output


def test_without_data_it_says_how_to_get_it(monkeypatch, capsys):
    with pytest.raises(SystemExit) as stopped:
        run_example(monkeypatch)
    assert stopped.value.code == 2 and "torchvision" in capsys.readouterr().err


def test_shrinking_costs_a_few_lines():
    gated, shrinking = (
        (EXAMPLES / f"{name}.py").read_text().splitlines() for name in ("train_gated", "train_shrinking")
    )
    changes = list(difflib.unified_diff(gated, shrinking, lineterm="", n=0))[2:]
    added = [line for line in changes if line.startswith("+")]
    removed = [line for line in changes if line.startswith("-")]
    assert 0 < len(added) <= 6
    assert len(removed) <= 1
