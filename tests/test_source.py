"""From what a person types to networks: runs, saved folders, names."""

import dataclasses
import json
import sys

import pytest
import torch
from engine_helpers import LENET, load_small, train, write_images
from test_show import result
from torch import nn

import narrowgate as ng
from narrowgate.models import LeNet5, ModelError
from narrowgate.source import SourceError, open_source
from narrowgate.train.finish import Result
from narrowgate.train.recipe import Recipe

RECIPE = '[model]\nname = "{name}"\n[data]\nsource = "{source}"\n[train]\nepochs = 1\n'


def small_lenet(folder):
    """A saved LeNet-5 without half of its first layer."""
    model = LeNet5()
    with torch.no_grad():
        model.conv1.weight[::2], model.conv1.bias[::2] = 0, 0
    images = torch.rand(2, 1, 28, 28)
    plan = ng.plan(model, images)
    small = ng.compact(model, plan)
    ng.save(small, plan, folder)
    return small.eval()


def run_folder(folder, source="mnist"):
    folder.mkdir()
    (folder / "recipe.toml").write_text(Recipe.from_toml(RECIPE.format(name="lenet5", source=source)).to_toml())
    return small_lenet(folder / "small")


def test_a_name_is_a_whole_network_for_its_usual_images():
    source = open_source("lenet5")
    assert isinstance(source.full, LeNet5) and source.small is None and source.network is source.full
    assert source.image_shape == (1, 28, 28) and source.example(3).shape == (3, 1, 28, 28)
    assert not source.full.training and source.full(source.example()).shape == (2, 10)
    assert torch.equal(source.full.conv1.weight, open_source("lenet5").full.conv1.weight)


def test_classes_and_image_shape_are_taken():
    source = open_source("resnet", classes=7, image_shape=(1, 8, 8))
    assert source.full(source.example()).shape == (2, 7)


def test_torchvision_and_timm_names_have_their_own_sizes():
    pytest.importorskip("torchvision")
    source = open_source("torchvision/resnet18")
    assert source.image_shape == (3, 224, 224) and source.full.fc.out_features == 1000
    pytest.importorskip("timm")
    assert open_source("timm/test_resnet").image_shape == (3, 160, 160)


@pytest.mark.parametrize("what", ["run", "run/small"])
def test_a_run_has_both_networks(tmp_path, what):
    small = run_folder(tmp_path / "run")
    source = open_source(str(tmp_path / what))
    assert source.full.conv1.out_channels == 20 and source.small.conv1.out_channels == 10
    x = source.example()
    assert torch.equal(source.network(x), small(x)) and source.plan.rows[0].total == 20


def test_a_run_says_what_its_data_was_like_or_asks(tmp_path):
    run_folder(tmp_path / "run", "npz")
    with pytest.raises(SourceError, match=r"\(npz\): add --classes N and --image-shape C,H,W"):
        open_source(str(tmp_path / "run"))
    with pytest.raises(SourceError, match=r"\(npz\): add --image-shape C,H,W"):
        open_source(str(tmp_path / "run"), classes=10)
    assert open_source(str(tmp_path / "run"), classes=10, image_shape=(1, 28, 28)).small is not None
    result(classes=10, image_shape=(1, 28, 28)).save(tmp_path / "run")
    assert open_source(str(tmp_path / "run")).image_shape == (1, 28, 28)


def test_a_run_of_ones_own_data_needs_no_argument(tmp_path):
    data = write_images(tmp_path / "28.npz", 28)
    trained = train(LENET, tmp_path / "run", data, "train.epochs=1", "penalty.strength=0.5")
    assert (trained.classes, trained.image_shape) == (4, (1, 28, 28)) and Result.load(tmp_path / "run") == trained
    source = open_source(str(tmp_path / "run"))
    assert source.network(source.example()).shape == (2, 4)
    x = source.example()
    assert torch.equal(source.network(x), load_small(tmp_path / "run")(x))


def test_a_result_of_an_older_version_is_read_and_a_damaged_one_named(tmp_path):
    result(classes=10, image_shape=(1, 28, 28)).save(tmp_path)
    written = json.loads((tmp_path / "result.json").read_text())
    old = {key: value for key, value in written.items() if key not in ("classes", "image_shape")}
    (tmp_path / "result.json").write_text(json.dumps(old))
    assert Result.load(tmp_path) == result(classes=None, image_shape=None)
    for damage in (json.dumps(old)[:-9], "[]", json.dumps({**old, "image_shape": 3}), '{"pruned": 0.5}'):
        (tmp_path / "result.json").write_text(damage)
        with pytest.raises(ng.StorageError, match=r"result.json is damaged .*: delete it, and narrowgate train"):
            Result.load(tmp_path)


def test_a_run_that_is_not_finished_says_so(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.toml").write_text(RECIPE.format(name="lenet5", source="mnist"))
    with pytest.raises(SourceError, match="no small network yet; finish the run with narrowgate train"):
        open_source(str(tmp_path / "run"))


def test_a_saved_folder_needs_the_name_of_its_network(tmp_path):
    small = small_lenet(tmp_path / "mine")
    with pytest.raises(SourceError, match="add --model NAME"):
        open_source(str(tmp_path / "mine"))
    source = open_source(str(tmp_path / "mine"), model="lenet5")
    assert torch.equal(source.network(source.example()), small(source.example()))


def test_a_function_of_ones_own_makes_the_network(tmp_path, monkeypatch):
    small_lenet(tmp_path / "mine")
    (tmp_path / "my_own_networks.py").write_text(
        "from narrowgate.models import LeNet5\nnumber = 3\n\n\ndef make():\n    return LeNet5()\n"
    )
    monkeypatch.chdir(tmp_path)
    source = open_source("mine", model="my_own_networks:make", image_shape=(1, 28, 28))
    assert source.small.conv1.out_channels == 10
    assert isinstance(open_source("my_own_networks:make", image_shape=(1, 28, 28)).full, nn.Module)
    with pytest.raises(SourceError, match="add --image-shape C,H,W"):
        open_source("my_own_networks:make")
    with pytest.raises(SourceError, match="my_own_networks:mkae can't be imported"):
        open_source("my_own_networks:mkae", image_shape=(1, 28, 28))
    with pytest.raises(SourceError, match="is a int; it must be a function"):
        open_source("my_own_networks:number", image_shape=(1, 28, 28))
    with pytest.raises(SourceError, match="nowhere:make can't be imported"):
        open_source("nowhere:make", image_shape=(1, 28, 28))


@pytest.mark.parametrize("shape", [(10,), (1, 64), (3, 4, 8, 8)])
def test_a_network_of_ones_own_takes_inputs_of_any_shape(tmp_path, monkeypatch, shape):
    (tmp_path / "shaped_networks.py").write_text(
        f"from torch import nn\nmake = lambda: nn.Sequential(nn.Flatten(), nn.Linear({torch.Size(shape).numel()}, 2))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "shaped_networks", raising=False)
    source = open_source("shaped_networks:make", image_shape=shape)
    assert source.example().shape == (2, *shape) and source.full(source.example()).shape == (2, 2)
    if len(shape) != 3:
        with pytest.raises(SourceError, match="images have channels, height and width"):
            open_source("lenet5", image_shape=shape)


@pytest.mark.parametrize("name", ["./mine", "mine.py", "../folder/mine.py", "folder/mine", "/folder/mine.py"])
def test_the_path_of_a_file_in_place_of_a_module_is_named(name):
    with pytest.raises(SourceError, match=rf"{name}:make names a file: .* such as mine:make in the folder"):
        open_source(f"{name}:make", image_shape=(1, 28, 28))


def test_images_are_in_the_numbers_of_the_network():
    source = open_source("lenet5")
    assert source.example().dtype == torch.float32
    half = dataclasses.replace(source, full=source.full.half())
    assert half.example().dtype == torch.float16 and half.network(half.example()).shape == (2, 10)
    assert dataclasses.replace(source, full=nn.Flatten()).example().dtype == torch.float32


_ODD = """import torch
from torch import nn
from narrowgate.models import LeNet5

made = LeNet5()
sized = lambda size: LeNet5()
nothing = lambda: None
lazy = lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(3))
def meta():
    with torch.device("meta"):
        return LeNet5()
"""


def test_what_a_function_or_its_module_raises_is_told_with_its_line(tmp_path, monkeypatch):
    (tmp_path / "failing_networks.py").write_text("def make():\n    import torch\n    return torch.zeros(-1)\n")
    (tmp_path / "failing_module.py").write_text("x = 1\nx / 0\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        SourceError, match=r"failing_networks:make failed: RuntimeError: .*failing_networks\.py, line 3\)"
    ):
        open_source("failing_networks:make", image_shape=(1, 28, 28))
    with pytest.raises(SourceError, match=r"can't be imported: ZeroDivisionError: .*failing_module\.py, line 2\)"):
        open_source("failing_module:make", image_shape=(1, 28, 28))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("made", "is a LeNet5; it must be a function that makes the network"),
        ("sized", r"can't be called without arguments \(missing a required argument: 'size'\)"),
        ("nothing", "returned a NoneType; it must return the network"),
        ("lazy", "'1.weight' of odd_networks:lazy has no shape yet; run the network on an example"),
        ("meta", "'conv1.weight' of odd_networks:meta is on the meta device"),
    ],
)
def test_a_function_that_makes_no_network_is_named(tmp_path, monkeypatch, name, message):
    (tmp_path / "odd_networks.py").write_text(_ODD)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError, match=message):
        open_source(f"odd_networks:{name}", image_shape=(1, 28, 28))


def test_a_module_with_a_mistake_is_named_with_its_line(tmp_path, monkeypatch):
    (tmp_path / "mistaken_networks.py").write_text("def make(:\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError, match=r"can't be imported: .*mistaken_networks\.py, line 1"):
        open_source("mistaken_networks:make", image_shape=(1, 28, 28))


def test_an_interrupted_save_of_a_run_is_found(tmp_path):
    run_folder(tmp_path / "run")
    (tmp_path / "run" / "small").rename(tmp_path / "run" / ".small.previous")
    with pytest.warns(UserWarning, match="was interrupted"):
        source = open_source(str(tmp_path / "run"))
    assert source.small.conv1.out_channels == 10


def test_what_is_nothing_is_said_to_be_nothing(tmp_path):
    with pytest.raises(SourceError, match=r"no folder runs/first, and networks are called lenet5, .*torchvision/NAME"):
        open_source("runs/first")
    with pytest.raises(SourceError, match=r"neither a run \(no recipe.toml\) nor a saved network"):
        open_source(str(tmp_path))
    with pytest.raises(SourceError, match="no folder lenet6, and there is no network 'lenet6'; did you mean lenet5"):
        open_source("lenet6")
    with pytest.raises(SourceError, match=r"there is no network 'ResNet50'; did you mean torchvision/resnet50\?"):
        open_source("ResNet50")
    (tmp_path / "model.onnx").touch()
    with pytest.raises(SourceError, match=r"model\.onnx is a file: give the folder .* --modes onnx"):
        open_source(str(tmp_path / "model.onnx"))
    with pytest.raises(ModelError, match="lenet5 takes images of 1x28x28"):
        open_source("lenet5", image_shape=(3, 32, 32))


def test_zeroed_is_smaller_and_only_for_whole_networks(tmp_path):
    source = open_source("lenet5")
    half = source.zeroed(0.5)
    assert half.small.conv1.out_channels == 10 and half.full is source.full and source.full.conv1.weight.all()
    assert source.zeroed(0.5, round_to=8).small.conv1.out_channels == 16
    with pytest.raises(SourceError, match="holds a small network already"):
        half.zeroed(0.5)
