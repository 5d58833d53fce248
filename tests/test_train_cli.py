"""``narrowgate train``: exit codes and messages."""

import json
import re
import subprocess
import sys

import pytest
import torch
from engine_helpers import LENET, write_images
from typer.testing import CliRunner

from narrowgate.cli import build_app


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("data") / "28.npz", 28)


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "lenet-small.toml"
    path.write_text(LENET)
    return path


def narrowgate(*arguments):
    return CliRunner().invoke(build_app(), [str(argument) for argument in arguments])


def refused(*arguments, code=2):
    """What the command says when it ends with this status, on one line and without a traceback."""
    result = narrowgate("train", *arguments)
    assert result.exit_code == code, result.output
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.stderr.startswith("narrowgate: ") and result.stderr.count("\n") == 1
    return result.stderr


def test_train_and_resume(tmp_path, recipe, images):
    out = tmp_path / "run"
    arguments = (recipe, "--data", images, "--out", out, "--accelerator", "cpu", "--set", "train.epochs=1")
    first = narrowgate("train", *arguments, "--set", "penalty.strength=0.5")
    assert first.exit_code == 0, first.output
    assert "test accuracy" in first.stdout
    result = json.loads((out / "result.json").read_text())
    assert result["epochs"] == 1 and (out / "small" / "model.safetensors").exists()
    assert "strength = 0.5" in (out / "recipe.toml").read_text()
    assert f"{out} holds a run: go on with --resume, or choose another folder with --out" in refused(*arguments)
    other = refused(*arguments, "--resume")
    assert "is not the recipe given (penalty.strength is 0.5 there and 0.8 here)" in other
    again = narrowgate("train", *arguments, "--set", "penalty.strength=0.5", "--resume")
    assert again.exit_code == 0, again.output
    assert "epoch" not in again.stdout  # nothing was trained
    assert f"{result['accuracy']:.2%}" in again.stdout


def test_the_default_folder_is_named_after_the_recipe(tmp_path, recipe, images, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = (recipe, "--data", images, "--accelerator", "cpu", "--set", "train.epochs=1")
    assert narrowgate("train", *arguments).exit_code == 0
    assert (tmp_path / "runs" / "lenet-small" / "result.json").exists()


def test_the_recipe_that_a_run_wrote_down_stands_for_its_folder(tmp_path, recipe, images, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ("--data", images, "--accelerator", "cpu")
    assert narrowgate("train", recipe, *options, "--out", "first", "--set", "train.epochs=1").exit_code == 0
    assert "first holds a run: go on with --resume" in refused("first/recipe.toml", *options)
    again = narrowgate("train", "first/recipe.toml", *options, "--resume")
    assert again.exit_code == 0 and "first is finished" in again.stdout, again.output
    assert not (tmp_path / "runs").exists()


def test_what_is_wrong_is_said_in_one_line_and_nothing_is_written(tmp_path, recipe, images):
    out = tmp_path / "run"
    where = ("--out", out, "--accelerator", "cpu")
    good = ("--data", images, *where)
    near = refused(tmp_path / "lenet-smal.toml", *good)
    assert "lenet-smal.toml: no such recipe; did you mean lenet-small.toml?" in near
    wrong = tmp_path / "wrong.toml"
    wrong.write_text(LENET.replace("strength", "strenght"))
    assert re.search(r"wrong\.toml: .*penalty\.strenght.*did you mean.*strength", refused(wrong, *good))
    wrong.write_text("[train\n")
    assert "wrong.toml: not valid TOML" in refused(wrong, *good)
    assert re.search(r"--set train\.epochs=0.*train\.epochs = 0.*1", refused(recipe, *good, "--set", "train.epochs=0"))
    assert "train.epoch" in refused(recipe, *good, "--set", "train.epoch=2")
    assert "epochs" in refused(recipe, *good, "--set", "epochs")
    assert "none.npz does not exist" in refused(recipe, "--data", tmp_path / "none.npz", *where)
    assert "set data.path or pass --data PATH" in refused(recipe, *where)
    assert "lower train.batch" in refused(recipe, *good, "--set", "train.batch=1000")
    assert "there is no network 'lenet'" in refused(recipe, *good, "--set", "model.name=lenet")
    assert "BatchNorm" in refused(recipe, *good, "--set", "gates.kind=linear")
    assert f"{tmp_path}: can't be read as a recipe: it is a folder; give a file in it" in refused(tmp_path, *good)
    if not torch.cuda.is_available():
        no_gpu = refused(recipe, "--data", images, "--out", out, "--accelerator", "cuda", code=1)
        assert "sees no GPU: train with accelerator 'cpu'" in no_gpu
    typo = refused(recipe, *good, "--set", 'gates.skip=["conv*", "fcc1"]')
    assert 'gates.skip has "fcc1", and lenet5 has no layer of that name; did you mean "fc1"?' in typo
    assert 'gates.inputs has "fcc1"' in refused(recipe, *good, "--set", 'gates.inputs=["fcc1"]')
    little = refused(recipe, *good, "--set", "budget.target=params: 0.01%")
    assert "budget.target: the target 'params: 0.01%' is out of reach" in little
    model = ("--set", "model.name=mobilenetv2", "--set", "gates.groups=['heads']")
    assert "gates of the recipe don't fit the network" in refused(recipe, *good, *model)
    assert not out.exists()
    out.write_text("a file")
    assert f"{out} is a file: choose a folder with --out" in refused(recipe, *good)


def test_trouble_in_training_is_said_in_one_line(tmp_path, recipe, images):
    good = (recipe, "--data", images, "--accelerator", "cpu", "--set", "train.epochs=1")
    closed = refused(*good, "--out", tmp_path / "closed", "--set", "penalty.strength=6.0", code=1)
    assert "every channel of conv1 is constant" in closed
    rate = ("--set", "optimizer.kind=sgd", "--set", "optimizer.lr=1e9", "--set", "penalty.strength=0")
    assert "the training loss of epoch 1 is nan" in refused(*good, "--out", tmp_path / "nan", *rate, code=1)
    tuning = ("--set", "finish.finetune_epochs=1", "--set", "finish.finetune_lr=1e30")
    tuned = refused(*good, "--out", tmp_path / "tuned", *tuning, code=1)
    assert "the loss of epoch 1 of fine-tuning is nan" in tuned and "a lower finish.finetune_lr (it is 1e+30)" in tuned
    assert not (tmp_path / "tuned" / "result.json").exists()
    threshold = refused(*good, "--out", tmp_path / "threshold", "--set", "finish.threshold=0.99", code=1)
    assert "every channel of conv1 is constant. That is after finish.threshold = 0.99" in threshold
    norm = ("--set", "train.batch=1", "--set", "model.options.norm=true")
    single = refused(*good, "--out", tmp_path / "single", *norm, code=1)
    assert "train.batch = 1: Expected more than 1 value per channel" in single and "a higher one" in single


def test_help_names_every_option_and_the_default_folder():
    result = narrowgate("train", "--help")
    assert result.exit_code == 0
    text = " ".join(re.sub(r"[│╭╰╮╯─]", " ", result.stdout).split())
    for option in ("--data", "--out", "--set", "--resume", "--download", "--accelerator", "--devices", "--num-nodes"):
        assert option in text
    assert "runs/ and the recipe's name" in text
    assert "A run that was killed goes on with --resume." in text


def test_wrong_options_are_usage_errors(recipe):
    assert narrowgate("train").exit_code == 2
    assert narrowgate("train", recipe, "--devices", "0").exit_code == 2
    sundial = narrowgate("train", recipe, "--accelerator", "sundial")
    assert sundial.exit_code == 2 and all(word in sundial.stderr for word in ("sundial", "auto", "cpu", "cuda"))
    assert narrowgate("train", recipe, "--resme").exit_code == 2


def test_help_does_not_load_the_engine():
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom narrowgate.cli import build_app\n"
        "CliRunner().invoke(build_app(), ['train', '--help'])\n"
        "print([name for name in ('torch', 'lightning', 'torchvision') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
