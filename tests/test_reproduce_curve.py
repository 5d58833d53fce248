"""Figure 3's data: what is left at each threshold, from a model and from a run's last checkpoint."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("lightning")
pytest.importorskip("typer")
pytest.importorskip("sklearn")

from engine_helpers import LENET, train, write_images
from typer.testing import CliRunner

import narrowgate as ng
from narrowgate import cli
from narrowgate.models import LeNet5
from narrowgate.reproduce.curve import curve_of_run, threshold_curve
from narrowgate.reproduce.record import RecordError
from narrowgate.train.recipe import Recipe

DIGITS = """
[model]
name = "resnet"
options = { depth = 11, dropout = 0.0 }
[data]
source = "digits"
[gates]
placement = "after-norm"
lr_factor = 3.0
[penalty]
strength = 0.02
proximal = true
[optimizer]
lr = 0.1
[train]
epochs = 3
batch = 128
[shrink]
when = "during"
every = 2
"""


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A finished run that lost channels on the way."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(DIGITS, folder, None)
    return folder


def lenet():
    """Ten gates of fc1 closed, ten near 0, the rest open."""
    torch.manual_seed(0)
    model = LeNet5()
    gates = ng.attach_gates_(model, where=lambda name, module: name == "fc1")
    with torch.no_grad():
        gates["fc1"].g[:10] = 0.0
        gates["fc1"].g[10:20] = 0.01  # a value of 1e-4
    return model.eval(), gates


def test_rescaled_scales_are_measured_as_at_the_end_of_the_run(tmp_path):
    path = write_images(tmp_path / "images.npz", 28, test=40)
    settings = ("model.options.norm=true", "gates.kind=linear", "gates.rescale=0.1", "finish.threshold=0.4")
    others = ("penalty.strength=0.0", "gates.lr_factor=1.0", "train.epochs=2")
    result = train(LENET, tmp_path / "run", path, *settings, *others)
    assert result.closed_by_threshold > 0 and result.parameters < 0.9 * result.parameters_full
    curve = curve_of_run(tmp_path / "run", path, [0.0, 0.4])
    assert curve["parameters"][1] == result.parameters < curve["parameters"][0]


def test_each_threshold_closes_what_is_below_it_on_a_copy():
    model, gates = lenet()
    before = copy.deepcopy(model.state_dict())
    seen = []
    image = torch.rand(2, 1, 28, 28)

    def evaluate(small):
        seen.append(sum(p.numel() for p in small.parameters()))
        return 0.5

    points = threshold_curve(model, gates, evaluate, (2e-4, 0.0, 1e-6), image, layout="aligned")
    assert [(p.threshold, p.closed) for p in points] == [(0.0, 10), (1e-6, 10), (2e-4, 20)]
    one_neuron = 800 + 1 + 10
    assert [431_080 - p.parameters for p in points] == [10 * one_neuron, 10 * one_neuron, 20 * one_neuron]
    assert seen == [points[0].parameters, points[2].parameters]  # the second is the first again
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_threshold_above_all_gates_leaves_nothing():
    model, gates = lenet()
    last = threshold_curve(model, gates, lambda small: 0.1, (0.9,), torch.rand(2, 1, 28, 28))[-1]
    assert (last.parameters, last.closed, last.accuracy) == (None, 1300, 0.1)  # fc1's neurons and its inputs


def test_linear_gates_are_taken_by_their_size():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 2))
    gates = ng.attach_gates_(model, "linear")
    with torch.no_grad():
        model[1].weight[:4] = torch.tensor([0.0, -1e-5, 1e-5, -0.2])
    image = torch.rand(2, 3, 8, 8)
    points = threshold_curve(model.eval(), gates, lambda small: 0.0, (0.0, 1e-4, 0.3), image, layout="aligned")
    channel = 27 + 2 + 2 * 36
    whole = sum(p.numel() for p in model.parameters())
    assert [(p.closed, (whole - p.parameters) // channel) for p in points] == [(1, 1), (3, 3), (4, 4)]


def test_gates_of_another_model_are_refused():
    with pytest.raises(ValueError, match="not the model's"):
        threshold_curve(lenet()[0], lenet()[1], lambda small: 0.0, (0.0,), torch.rand(2, 1, 28, 28))


def test_curve_of_a_run_begins_at_its_result(digits):
    result = json.loads((digits / "result.json").read_text())
    curve = curve_of_run(digits, thresholds=(0.0, 1e-2, 0.9))
    assert curve["parameters"][0] == result["parameters"] < result["parameters_full"]
    assert curve["accuracy"][0] == pytest.approx(result["accuracy"], abs=1e-6)
    assert curve["pruned"][0] == pytest.approx(1 - result["parameters"] / result["parameters_full"], abs=1e-6)
    assert curve["parameters"][1] < curve["parameters"][0] and curve["parameters"][2] is None
    assert curve["pruned"][2] == 1 and curve["accuracy"][2] < 0.2


def test_record_takes_the_curve_along(digits, tmp_path):
    out = tmp_path / "results" / "digits.json"
    result = CliRunner().invoke(cli.build_app(), ["record", str(digits), "--out", str(out), "--curve"])
    assert result.exit_code == 0 and "parameters" in result.output
    assert json.loads(out.read_text())["curve"]["threshold"][:3] == [0.0, 1e-8, 3e-8]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_named(digits):
    for device in ("cuda", "sundial"):
        with pytest.raises(RecordError, match=f"can't compute on --device {device}: "):
            curve_of_run(digits, device=device)


def test_filters_have_no_curve(digits, tmp_path):
    folder = Path(shutil.copytree(digits, tmp_path / "run"))
    settings = ["gates.kind=filter-l2", "gates.placement=before-norm", "penalty.proximal=false", "shrink.when=end"]
    (folder / "recipe.toml").write_text(Recipe.load(digits / "recipe.toml", settings).to_toml())
    with pytest.raises(RecordError, match="measured filters, which are no gates: leave out --curve"):
        curve_of_run(folder)


def test_a_folder_without_checkpoints_is_named(digits, tmp_path):
    (tmp_path / "recipe.toml").write_text((digits / "recipe.toml").read_text())
    with pytest.raises(RecordError, match="not a finished run with a checkpoint"):
        curve_of_run(tmp_path)
