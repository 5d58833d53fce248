"""What a training run leaves behind, what ends it, and what it gives back."""

import json
import random
import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from engine_helpers import LENET, RESNET, count, load_small, rows, train, write_images
from helpers import assert_same

from narrowgate import models
from narrowgate.flow import CollapseError
from narrowgate.train import training
from narrowgate.train.checkpoint import Checkpoints
from narrowgate.train.data import DataError, load_data
from narrowgate.train.engine import run
from narrowgate.train.feed import Place, held_out_batches
from narrowgate.train.finish import Result
from narrowgate.train.recipe import Recipe, RecipeError
from narrowgate.train.step import count_hits
from narrowgate.train.watch import TrainingError

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def small_images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("data") / "8.npz")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("data") / "28.npz", 28)


def share_right(model, recipe, split):
    batches = held_out_batches(load_data(recipe.data), split, Place(CPU))
    hits, images = count_hits(model, batches, CPU, False).tolist()
    return hits / images


def test_a_run_leaves_a_small_network_that_does_what_the_result_says(tmp_path, images):
    recipe = Recipe.from_toml(LENET, [f"data.path='{images}'", "data.validation=30"])
    folder = tmp_path / "run"
    result = train(LENET, folder, None, f"data.path='{images}'", "data.validation=30")
    small = load_small(folder)
    assert result.accuracy == share_right(small, recipe, "test") > 0.7
    assert result.validation_accuracy == share_right(small, recipe, "held-out")
    assert result.parameters == count(small) < 0.8 * result.parameters_full
    assert result.parameters_full == count(models.LeNet5(4))
    assert result.closed > 0.2 and result.max_error < 1e-5
    assert Result.load(folder) == result
    assert json.loads((folder / "result.json").read_text())["pruned"] == pytest.approx(result.pruned, abs=1e-6)
    assert Recipe.load(folder / "recipe.toml") == recipe
    assert [row["epoch"] for row in rows(folder)] == [1, 2, 3, 4, 5]
    assert rows(folder)[-1]["parameters"] == result.parameters
    assert len(list((folder / "tensorboard").glob("events*"))) == 1
    assert Checkpoints(folder / "checkpoints", 2).epochs() == [5, 4]
    assert Checkpoints(folder / "checkpoints", 2).best().epoch in (3, 4, 5)
    assert "test accuracy" in train.printed and "conv1" in train.printed


def test_validation_images_are_evaluated_and_test_images_reported(tmp_path):
    path = write_images(tmp_path / "data.npz", 28)
    arrays = dict(np.load(path))
    arrays["y_test"] = (arrays["y_test"] + 1) % 4  # the test images contradict the others
    np.savez(path, **arrays)
    result = train(LENET, tmp_path / "run", path, "data.validation=30", "train.epochs=4", "penalty.strength=0.0")
    assert rows(tmp_path / "run")[-1]["accuracy"] == result.validation_accuracy > 0.9
    assert result.accuracy < 0.1


SHRINKING = (
    *("optimizer.kind='sgd'", "optimizer.lr=0.05", "gates.lr_factor=1.0", "penalty.strength=1e-3"),
    *("shrink.when='during'", "shrink.every=1", "shrink.share=0.0", "budget.target='flops: 22%'", "budget.arrive=0.5"),
)


def test_batches_grow_as_the_network_shrinks(tmp_path, images):
    """As many images as the full network has multiply-adds for, and the learning rate along with them."""
    result = train(LENET, tmp_path / "free", images, *SHRINKING, "shrink.batch=70")  # in steps of 4: 68 at most
    batches, batch = [], 16
    for row, next_row in pairwise(rows(tmp_path / "free")):
        grown = min(68, 16 * result.multiply_adds_full // row["multiply_adds"] // 4 * 4)
        assert (f"batches of {grown}" in row["event"]) == (grown != batch)
        batch = grown
        assert next_row["lr"] == pytest.approx(0.05 * grown / 16)
        batches.append(batch)
    assert batches[0] == 16 and batches[-1] == 68
    assert any(batch % 16 for batch in batches)
    assert "longer steps" not in train.printed  # a proximal step stops gates at zero, however long it is
    train(LENET, tmp_path / "few", images, *SHRINKING, "shrink.batch=19")
    assert {row["lr"] for row in rows(tmp_path / "few")} == {0.05}


def test_batches_grow_no_larger_than_the_data(tmp_path):
    data = write_images(tmp_path / "28.npz", 28, train=40)
    train(LENET, tmp_path / "run", data, *SHRINKING, "shrink.batch=1000", "penalty.proximal=false")
    assert max(row["lr"] for row in rows(tmp_path / "run")) == pytest.approx(0.05 * 40 / 16)
    assert train.printed.count("take longer steps, in which the penalty carries gates") == 1


def test_shrinking_during_at_the_end_or_never_trains_the_same_network(tmp_path, images, monkeypatch):
    monkeypatch.setattr(training, "_LOOKS", 2)  # every second epoch, and the last of five
    results, networks = {}, {}
    for when in ("during", "end", "off"):
        folder = tmp_path / when
        results[when] = train(LENET, folder, images, f"shrink.when='{when}'", "shrink.every=1", "shrink.share=0.01")
        networks[when] = load_small(folder)
    cuts = [row["event"] for row in rows(tmp_path / "during") if row["event"]]
    assert len(cuts) >= 2 and cuts[0].startswith("shrunk 428,074 -> ")
    assert not any(row["event"] for row in rows(tmp_path / "end"))
    during, end, off = (results[when] for when in ("during", "end", "off"))
    assert during.parameters == end.parameters < 0.8 * off.parameters
    assert off.parameters == off.parameters_full and off.max_error is None
    for when in ("end", "off"):
        last = rows(tmp_path / when)[-1]
        assert last["parameters"] == results[when].parameters
        assert last["multiply_adds"] == results[when].multiply_adds
    assert during.accuracy == end.accuracy == off.accuracy
    assert end.closed == off.closed > 0.2
    assert during.closed == pytest.approx(end.closed, abs=0.01)  # a removed channel takes open gates behind it along
    x = torch.randn(8, 1, 28, 28)
    outputs = [networks[when](x) for when in ("during", "end", "off")]
    assert_same(outputs[0], outputs[1], rtol=1e-3, atol=1e-3)
    assert_same(outputs[1], outputs[2], rtol=1e-5, atol=1e-5)
    assert outputs[0].std() > 0.1
    state = Checkpoints(tmp_path / "during" / "checkpoints", 2).latest().tensors
    assert state["optimizer/fc1.weight/exp_avg"].shape == networks["during"].fc1.weight.shape


def test_norms_and_their_statistics_go_along(tmp_path, small_images):
    settings = ("shrink.every=3", "shrink.share=0.01", "train.epochs=4")
    train(RESNET, tmp_path / "end", small_images, *settings)
    train(RESNET, tmp_path / "during", small_images, *settings, "shrink.when='during'")
    during, end = rows(tmp_path / "during"), rows(tmp_path / "end")
    assert [bool(row["event"]) for row in during] == [False, False, True, False]
    assert during[2]["train_loss"] == end[2]["train_loss"]
    # The shift of a dead channel's norm goes on learning where it stays, and is a constant where it went.
    assert during[3]["train_loss"] == pytest.approx(end[3]["train_loss"], rel=0.1)
    state = Checkpoints(tmp_path / "during" / "checkpoints", 2).latest().tensors
    small = load_small(tmp_path / "during", "resnet", (1, 8, 8), depth=11)
    left, full = (
        {name: norm.num_features for name, norm in model.named_modules() if isinstance(norm, torch.nn.BatchNorm2d)}
        for model in (small, models.build("resnet", 4, image_shape=(1, 8, 8), depth=11))
    )
    widths = {name: len(state[f"model/{name}.running_mean"]) for name in full}
    assert all(left[name] <= widths[name] == len(state[f"optimizer/{name}.weight/exp_avg"]) for name in full)
    assert any(widths[name] < full[name] for name in full)  # which ones is up to the CPU's rounding


@pytest.mark.parametrize("when", ["in an epoch", "at its last step"])
@pytest.mark.parametrize("kind", ["exponential", "none"])
def test_a_loss_that_is_no_number_ends_the_run_and_leaves_its_checkpoints(tmp_path, images, monkeypatch, kind, when):
    breaks = 2.0 if when == "in an epoch" else 2.85  # of 10 steps an epoch
    monkeypatch.setattr(Recipe, "lr_at", lambda self, progress: 1e-3 if progress < breaks else 1e45)
    settings = (f"gates.kind='{kind}'", "optimizer.kind='sgd'", "penalty.strength=0.0", "train.epochs=3")
    folder = tmp_path / "run"
    with pytest.raises(TrainingError, match=r"loss of epoch 3 is nan; .* of epoch 2, is in .* a lower optimizer\.lr"):
        train(LENET, folder, images, *settings)
    saved = Checkpoints(folder / "checkpoints", 2).latest()
    assert saved.epoch == 2 and all(tensor.isfinite().all() for tensor in saved.tensors.values())
    assert len(rows(folder)) == 2 and not (folder / "small").exists()
    monkeypatch.undo()
    train(LENET, folder, images, *settings, resume=True)
    assert [row["epoch"] for row in rows(folder)] == [1, 2, 3]


def test_a_network_that_collapsed_is_named_and_its_checkpoint_kept(tmp_path, images):
    with pytest.raises(CollapseError, match=r"every channel of conv1 .*penalty"):
        train(LENET, tmp_path / "run", images, "penalty.strength=3.0", "train.epochs=3")
    assert "all gates are closed on" in train.printed
    assert Checkpoints(tmp_path / "run" / "checkpoints", 2).latest().epoch == 3
    assert not (tmp_path / "run" / "result.json").exists()


def test_what_can_not_be_run_is_refused_before_the_folder_is_made(tmp_path, images):
    folder = tmp_path / "run"
    with pytest.raises(DataError, match="a batch of 161 is more than the 160 training images"):
        train(LENET, folder, images, "train.batch=161")
    with pytest.raises(DataError, match="does not exist"):
        train(LENET, folder, str(tmp_path / "none.npz"))
    with pytest.raises(RecipeError, match="BatchNorm"):
        train(LENET, folder, images, "gates.kind='linear'")
    with pytest.raises(models.ModelError, match="did you mean"):
        train(LENET, folder, images, "model.name='lenet6'")
    coloured = dict(np.load(images))
    coloured |= {key: np.stack([coloured[key][:, :4, :8]] * 3, 1) for key in ("x_train", "x_test")}
    np.savez(tmp_path / "coloured.npz", **coloured)
    with pytest.raises(models.ModelError, match=r"squeezenet1_1 can't take images of 3x4x8: .*too small"):
        train(LENET, folder, str(tmp_path / "coloured.npz"), "model.name=torchvision/squeezenet1_1")
    with pytest.raises(TrainingError, match="accelerator 'sundial'"):
        run(Recipe.from_toml(LENET), folder, data_path=images, accelerator="sundial")
    assert not folder.exists()
    assert train(LENET, folder, images, "train.epochs=1").epochs == 1


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_callers_settings_are_given_back(tmp_path, images, deterministic):
    torch.use_deterministic_algorithms(True, warn_only=True)
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    try:
        before = settings_of_the_process()
        train(LENET, tmp_path / "run", images, "train.epochs=1", f"train.deterministic={str(deterministic).lower()}")
        assert settings_of_the_process() == before
        with pytest.raises(TrainingError):
            train(LENET, tmp_path / "bad", images, "optimizer.kind='sgd'", "optimizer.lr=1e9", "penalty.strength=0.0")
        assert settings_of_the_process() == before
    finally:
        torch.use_deterministic_algorithms(False)


def settings_of_the_process():
    return {
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "benchmark": torch.backends.cudnn.benchmark,
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
        "warnings": [str(entry) for entry in warnings.filters],
    }
