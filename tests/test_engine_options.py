"""Every option of a recipe changes what it should, and the run still ends in a network that loads."""

import numpy as np
import pytest
from engine_helpers import LENET, RESNET, count, load_small, outcome, rows, train, write_images
from helpers import compiles, needs_cpp_compiler

from narrowgate.train.checkpoint import Checkpoints
from narrowgate.train.data import DataError
from narrowgate.train.training import Training


@pytest.fixture(scope="module")
def small_images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("data") / "8.npz")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("data") / "28.npz", 28)


def test_linear_gates_close_by_threshold_and_fine_tuning_keeps_the_plan(tmp_path, small_images):
    settings = ("gates.kind='linear'", "gates.placement='before-norm'", "finish.threshold=0.2", "train.epochs=2")
    tuned = ("finish.finetune_epochs=2", "finish.finetune_lr=0.01")
    plain = train(RESNET, tmp_path / "plain", small_images, *settings)
    after = train(RESNET, tmp_path / "tuned", small_images, *settings, *tuned)
    assert plain.closed_by_threshold == after.closed_by_threshold > 0
    assert plain.parameters == after.parameters < plain.parameters_full
    ours, theirs = outcome(tmp_path / "plain"), outcome(tmp_path / "tuned")
    assert ours["plan"] == theirs["plan"] and ours["log"] == theirs["log"]
    assert ours["tensors"]["small/conv1.weight"] != theirs["tensors"]["small/conv1.weight"]
    assert "fine-tuned 2 of 2" in train.printed
    load_small(tmp_path / "tuned", "resnet", (1, 8, 8), depth=11)


def test_closed_gates_are_those_that_closed_in_training(tmp_path, small_images):
    result = train(
        RESNET, tmp_path / "run", small_images, "finish.threshold=0.3", "penalty.strength=0.4", "train.epochs=2"
    )
    assert result.closed == rows(tmp_path / "run")[-1]["closed"]
    assert result.closed_by_threshold > 0


@pytest.fixture(scope="module")
def plain(tmp_path_factory, images):
    """A run of three epochs, to compare others with."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    return train(LENET, folder, images, "train.epochs=3"), rows(folder)


@pytest.mark.parametrize(
    "settings",
    [
        ("gates.kind='none'", "penalty.strength=0.0"),
        ("train.precision='bf16'",),
        ("train.label_smoothing=0.2",),
        ("data.augment='crop-flip'", "penalty.strength=0.2"),
        ("data.augment='warp'", "penalty.strength=0.2"),
        ("gates.kind='hard-concrete'", "penalty.kind='l0'", "penalty.strength=0.01", "penalty.proximal=false"),
        ("gates.skip=['conv*']", "shrink.when='during'", "shrink.every=1", "shrink.layout='scatter'"),
        ("shrink.constants='fold'", "shrink.round_to=4", "penalty.strength=0.9"),
    ],
    ids=lambda settings: settings[0],
)
def test_options_change_the_run_and_end_in_a_network_that_loads(tmp_path, images, plain, settings):
    result = train(LENET, tmp_path / "run", images, "train.epochs=3", *settings)
    assert result.parameters == count(load_small(tmp_path / "run"))
    assert result.accuracy > 0.4
    assert rows(tmp_path / "run")[-1]["train_loss"] != plain[1][-1]["train_loss"]


def test_how_often_it_evaluates_and_saves_leaves_the_numbers_alone(tmp_path, images, plain):
    settings = ("train.evaluate_every=2", "checkpoint.every=2", "checkpoint.best=false", "train.deterministic=true")
    result = train(LENET, tmp_path / "run", images, "train.epochs=3", *settings)
    assert result.accuracy == plain[0].accuracy
    assert [row["train_loss"] for row in rows(tmp_path / "run")] == [row["train_loss"] for row in plain[1]]
    assert [row["accuracy"] is None for row in rows(tmp_path / "run")] == [True, False, False]
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", 2)
    assert checkpoints.epochs() == [3, 2] and checkpoints.best() is None


@compiles
@needs_cpp_compiler
@pytest.mark.slow
def test_a_compiled_run_ends_alike(tmp_path, images):
    settings = ("train.epochs=1", "penalty.strength=2.0")
    compiled = train(LENET, tmp_path / "compiled", images, *settings, "train.compile=true")
    eager = train(LENET, tmp_path / "eager", images, *settings)
    assert compiled.parameters == eager.parameters
    losses = [rows(tmp_path / name)[0]["train_loss"] for name in ("compiled", "eager")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert "compile = true" in (tmp_path / "compiled" / "recipe.toml").read_text()
    load_small(tmp_path / "compiled")


def test_a_run_shows_the_size_that_its_layout_will_have_at_the_end(tmp_path, small_images):
    settings = ("shrink.when='during'", "shrink.every=1", "train.epochs=4")
    scatter = train(RESNET, tmp_path / "scatter", small_images, *settings, "shrink.layout='scatter'")
    aligned = train(RESNET, tmp_path / "aligned", small_images, *settings, "shrink.layout='aligned'")
    assert scatter.parameters < aligned.parameters
    shown = rows(tmp_path / "scatter")[-1]
    assert (shown["parameters"], shown["multiply_adds"]) == (scatter.parameters, scatter.multiply_adds)
    assert rows(tmp_path / "aligned")[-1]["parameters"] >= aligned.parameters


def test_a_budget_is_met(tmp_path, images):
    result = train(LENET, tmp_path / "run", images, "budget.target='params: 40%'", "train.epochs=8")
    assert result.parameters / result.parameters_full == pytest.approx(0.4, abs=0.02)


def test_the_log_has_the_strength_that_an_epoch_was_trained_with(tmp_path, images, monkeypatch):
    used, run_epoch = [], Training.run_epoch

    def noting(training, *args):
        used.append(training.parts.penalty.strength)
        return run_epoch(training, *args)

    monkeypatch.setattr(Training, "run_epoch", noting)
    train(LENET, tmp_path / "run", images, "budget.target='params: 40%'")
    assert [row["strength"] for row in rows(tmp_path / "run")] == used and len(set(used)) > 2 and used[-1] == 0


def test_image_folders(tmp_path):
    from PIL import Image

    draw = np.random.default_rng(0)
    for part, number in (("train", 12), ("val", 4)):
        for name, level in (("dark", 40), ("light", 200)):
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(number):
                pixels = draw.integers(level - 30, level + 30, (10, 12, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(tmp_path / part / name / f"{i}.png")
    settings = ("data.source='folder'", "data.size=8", "data.workers=0", "data.augment='imagenet'", "train.epochs=2")
    result = train(RESNET, tmp_path / "run", str(tmp_path), *settings, "penalty.strength=0.0", "lr.schedule='constant'")
    assert result.parameters == result.parameters_full
    assert rows(tmp_path / "run")[-1]["train_accuracy"] > 0.8
    with pytest.raises(DataError, match="a batch of 25 is more than the 24 training images"):
        train(RESNET, tmp_path / "other", str(tmp_path), *settings, "train.batch=25")
    assert not (tmp_path / "other").exists()
