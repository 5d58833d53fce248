"""The other examples run on tiny data, remove something, and leave a network that computes the same."""

import re
import runpy
import sys
from pathlib import Path

import pytest

import narrowgate as ng

EXAMPLES = Path(__file__).parent.parent / "examples"

pytestmark = [
    # Lightning 2.6 with torch 2.14; and its advice on small loaders, checkpoints and loggers.
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*(not have many workers|number of training batches|not empty).*"),
]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run an example in an empty folder; what it printed."""
    monkeypatch.chdir(tmp_path)

    def run_example(name, *arguments):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run_example


def sizes(output):
    """Each "before -> after parameters" of an output."""
    found = re.findall(r"([\d,]+) -> ([\d,]+) parameters", output)
    return [tuple(int(number.replace(",", "")) for number in pair) for pair in found]


def functions_of(name):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def test_remove_only(run):
    pytest.importorskip("sklearn")
    output = run("remove_only", "--smoke")
    (whole, pruned), (_, slimmed) = sizes(output)
    assert whole == 56_554 and pruned < 0.4 * whole and slimmed < 0.5 * whole
    assert output.count("same function") == 2
    for with_zeros, without in re.findall(r"accuracy ([\d.]+%) with zeros, ([\d.]+%) without", output):
        assert with_zeros == without
    output = run("remove_only", "--smoke", "--share", 0)  # the negative control
    assert [before - after for before, after in sizes(output)] == [0, 0]


def test_prune_resnet50_folder(run, tmp_path):
    torchvision = pytest.importorskip("torchvision")
    output = run("prune_resnet50_folder", "--smoke", "--budget", "params: 60%", "--out", tmp_path / "out")
    ((before, after),) = sizes(output)
    assert 0.57 < after / before < 0.63 and "same function" in output

    def build():
        return torchvision.models.ResNet(torchvision.models.resnet.Bottleneck, [1, 1, 1, 1], num_classes=2)

    assert sum(p.numel() for p in ng.load(tmp_path / "out", build).parameters()) == after


def test_timm_model(run, tmp_path):
    timm = pytest.importorskip("timm")
    output = run("timm_model", "--smoke", "--model", "test_resnet", "--budget", "params: 50%")
    ((before, after),) = sizes(output)
    assert 0.47 < after / before < 0.53 and "same function" in output
    small = ng.load(tmp_path / "small", lambda: timm.create_model("test_resnet", num_classes=2))
    assert sum(p.numel() for p in small.parameters()) == after


def test_timm_model_on_a_folder(run, tmp_path):
    pytest.importorskip("timm")
    functions_of("prune_resnet50_folder")["write_smoke_images"](tmp_path / "images")
    folder = ("--data", tmp_path / "images" / "train", "--workers", 0, "--batch", 8, "--epochs", 2)
    output = run("timm_model", "--model", "test_resnet", "--budget", "params: 70%", *folder)
    ((before, after),) = sizes(output)
    assert 0.67 < after / before < 0.73


@pytest.mark.parametrize("name", ["lightning_callback", "transformers_callback"])
def test_callbacks(run, name):
    pytest.importorskip(name.partition("_")[0])
    pytest.importorskip("sklearn")
    output = run(name, "--smoke")
    ((before, after),) = sizes(output)
    assert 0.47 < after / before < 0.53 and "same function" in output
    assert re.search(r"accuracy \d+\.\d%", output)
    assert int(re.search(r"saved in small: ([\d,]+) parameters", output)[1].replace(",", "")) == after


@pytest.mark.parametrize("name", ["prune_resnet50_folder", "timm_model"])
@pytest.mark.parametrize("arguments", [(), ("--data", "nowhere")])
def test_without_data_an_example_says_what_it_wants(run, capsys, name, arguments):
    pytest.importorskip("torchvision")
    pytest.importorskip("timm")
    with pytest.raises(SystemExit) as stopped:
        run(name, *arguments)
    assert stopped.value.code == 2
    assert "--smoke" in capsys.readouterr().err


def test_the_table_has_every_example():
    table = (EXAMPLES / "README.md").read_text()
    named = set(re.findall(r"^\| \[(\w+)\.py\]\(\1\.py\)", table, re.MULTILINE))
    assert named == {path.stem for path in EXAMPLES.glob("*.py")}
