"""Norms whose running statistics do not fit are named once, and only where held-out accuracy suffers from it."""

import math
from collections import OrderedDict

import pytest
import torch
from engine_helpers import RESNET, outcome, rows, train, write_images
from test_log import row
from test_watch import watch
from torch import nn
from torch.nn import functional as F

import narrowgate as ng
from narrowgate import models
from narrowgate.train import watch as watch_module
from narrowgate.train.step import count_hits
from narrowgate.train.variance import dropouts_before_norms

IMAGES = torch.rand(4, 3, 8, 8)


def chained(*names, **others):
    """Layers one after the other, by these names."""
    layers = {"drop": nn.Dropout(0.3), "conv": nn.Conv2d(3, 3, 1), "bn": nn.BatchNorm2d(3), "end": nn.Flatten()}
    return nn.Sequential(OrderedDict((name, (layers | others)[name]) for name in names))


class Functional(nn.Module):
    """Dropout that is no layer, beside a branch without any."""

    def __init__(self):
        super().__init__()
        self.bn1, self.bn2, self.bn3 = (nn.BatchNorm2d(3) for _ in range(3))

    def forward(self, x):
        quiet = self.bn1(x)
        noisy = F.dropout(x, 0.2, self.training)
        return self.bn3(torch.cat([quiet, self.bn2(noisy)])).mean((2, 3))


@pytest.mark.parametrize(
    "model, found",
    [
        (chained("drop", "conv", "bn", "end"), {"drop": "bn"}),
        (chained("conv", "bn", "drop", "end"), {}),
        (chained("drop", "conv", "bn", drop=nn.Dropout2d(0.1, inplace=True)), {"drop": "bn"}),
        (chained("drop", "conv", "bn", drop=nn.Dropout(0.0)), {}),
        (chained("drop", "conv", "bn", bn=nn.BatchNorm2d(3, track_running_stats=False)), {}),
        (chained("drop", "conv", "bn", bn=nn.GroupNorm(1, 3)), {}),
        (Functional(), {"the model itself": "bn2"}),
    ],
)
def test_what_the_graph_says(model, found):
    assert dropouts_before_norms(model.train(), IMAGES) == found
    assert model.training


def test_the_papers_networks():
    images = torch.rand(2, 3, 32, 32)
    assert dropouts_before_norms(models.mobilenetv2(), images) == {}
    dense = dropouts_before_norms(models.DenseNet(10), images)
    assert len(dense) == 6 and dense["blocks.0.0.dropout"] == "blocks.0.1.bn"
    resnet = models.PreActResNet(11, dropout=0.1)
    ng.attach_gates_(resnet)
    assert next(iter(dropouts_before_norms(resnet, images).items())) == ("stages.0.0.dropout", "stages.0.0.bn2")


def test_named_once_where_it_is_the_reason(tmp_path):
    model, asked = chained("drop", "conv", "bn", "end"), []

    def judge(noisy):
        asked.append(noisy)
        return 0.55

    looks = watch(tmp_path)
    far = row(3, train_accuracy=0.6, accuracy=0.25)
    (notice,) = looks.variance_shift(far, model, IMAGES, judge)
    assert notice.startswith("epoch 3: held-out accuracy is 25.0%, training accuracy 60.0%; with dropout left on, the")
    assert "is 55.0%. The dropout in drop is in front of a BatchNorm, bn:" in notice
    assert notice.endswith("Take the dropout out, or put it behind the last norm")
    assert asked == [[model.drop]]
    assert looks.variance_shift(far, model, IMAGES, judge) == [] and len(asked) == 1


def test_the_remedy_is_an_option_of_the_papers_networks(tmp_path):
    looks = watch(tmp_path, "model.name=resnet", "model.options={ depth = 11, dropout = 0.3 }")
    far = row(3, train_accuracy=0.6, accuracy=0.25)
    (notice,) = looks.variance_shift(far, models.PreActResNet(11, dropout=0.3), IMAGES, lambda noisy: 0.55)
    assert "The dropout in stages.0.0.dropout (and 2 more) is" in notice
    assert notice.endswith("Set model.options = { depth = 11, dropout = 0.0 }")


def never(noisy):
    raise AssertionError("this costs an evaluation")


@pytest.mark.parametrize("accuracy", [None, 0.5, 0.7])
def test_a_healthy_run_is_not_looked_into(tmp_path, accuracy):
    now = row(3, train_accuracy=0.6, accuracy=accuracy)
    assert watch(tmp_path).variance_shift(now, chained("drop", "conv", "bn"), IMAGES, never) == []


@pytest.mark.parametrize(
    "model",
    [chained("conv", "bn", "drop", "end"), models.mobilenetv2(10), nn.Linear(1, 1)],
    ids=["behind", "mobilenetv2", "not traced"],
)
def test_no_dropout_before_a_norm(tmp_path, model):
    assert watch(tmp_path).variance_shift(row(3, train_accuracy=0.9, accuracy=0.1), model, IMAGES, never) == []


def test_a_network_that_only_knows_its_training_images(tmp_path):
    looks, model = watch(tmp_path), chained("drop", "conv", "bn", "end")
    far = row(3, train_accuracy=1.0, accuracy=0.6)
    assert looks.variance_shift(far, model, IMAGES, lambda noisy: 0.62) == []
    assert len(looks.variance_shift(far, model, IMAGES, lambda noisy: 0.9)) == 1  # it looks again


@pytest.mark.parametrize(
    "settings, remedy",
    [
        (
            ("penalty.strength=0.01",),
            "lower penalty.strength, or set penalty.relative = true, which takes a higher one",
        ),
        (("penalty.strength=0.01", "penalty.relative=true"), "Lower optimizer.lr or optimizer.weight_decay"),
        (("penalty.strength=0.0",), "Lower optimizer.lr or optimizer.weight_decay"),
    ],
)
def test_statistics_that_lag_are_named_once(tmp_path, settings, remedy):
    model = chained("conv", "bn", "end")
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def judge(noisy):
        assert noisy == [model.bn]
        model.train()(IMAGES)  # moves the statistics
        return 0.5

    looks, lost = watch(tmp_path, *settings), row(3, train_accuracy=0.5, accuracy=0.1)
    (notice,) = looks.lagging_statistics(lost, model, judge)
    assert notice.startswith("epoch 3: held-out accuracy is 10.0%, training accuracy 50.0%; with each batch's own stat")
    assert "the former is 50.0%" in notice and notice.endswith(remedy)
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())
    assert looks.lagging_statistics(lost, model, never) == []


def test_what_is_no_lag(tmp_path):
    lost, model = row(3, train_accuracy=0.5, accuracy=0.1), chained("conv", "bn", "end")
    looks = watch(tmp_path)
    assert looks.lagging_statistics(lost, model, lambda noisy: 0.2) == []  # batches' own statistics are no better
    assert looks.lagging_statistics(lost, model, lambda noisy: math.nan) == []  # there is one image in all
    assert looks.lagging_statistics(lost, chained("conv", "end"), never) == []
    for accuracy in (None, 0.72, 0.97):  # as with overfitting
        assert looks.lagging_statistics(row(3, train_accuracy=1.0, accuracy=accuracy), model, never) == []


@pytest.mark.parametrize(("noisy", "images"), [(True, 4), (False, 5)])
def test_one_image_has_no_statistics_of_its_own(noisy, images):
    model = chained("end", "bn", bn=nn.BatchNorm1d(3 * 8 * 8))
    batches = [(IMAGES, torch.zeros(4)), (IMAGES[:1], torch.zeros(1))]
    assert count_hits(model, batches, torch.device("cpu"), False, [model.bn] if noisy else []).tolist()[1] == images


def test_statistics_are_behind_in_every_network_at_first(tmp_path):
    looks, model = watch(tmp_path, steps=60), chained("conv", "bn", "end")
    found = [
        looks.lagging_statistics(row(n, train_accuracy=0.5, accuracy=0.1), model, lambda noisy: 0.5) for n in (3, 4)
    ]
    assert [len(notices) for notices in found] == [0, 1]


def test_statistics_that_lag_in_a_run(tmp_path, monkeypatch):
    data = write_images(tmp_path / "images.npz")
    monkeypatch.setattr(watch_module, "_STEPS_TO_SETTLE", 0)
    monkeypatch.setattr(
        nn.BatchNorm2d.__init__, "__defaults__", (1e-5, 1e-4, *nn.BatchNorm2d.__init__.__defaults__[2:])
    )
    train(RESNET, tmp_path / "lags", data, *SETTINGS)
    assert train.printed.count("changes faster than their running statistics") == 1
    monkeypatch.setattr(watch_module, "_LOST", -1.0)  # looking changed no bit of the run
    train(RESNET, tmp_path / "unseen", data, *SETTINGS)
    assert outcome(tmp_path / "unseen") == outcome(tmp_path / "lags")


SETTINGS = ("penalty.strength=0.01", "train.epochs=3", "checkpoint.best=false")


def test_in_a_run(tmp_path, monkeypatch):
    data = write_images(tmp_path / "images.npz")
    noisy = (*SETTINGS, "model.options={ depth = 20, dropout = 0.7 }")
    train(RESNET, tmp_path / "noisy", data, *noisy)
    assert train.printed.count("is in front of a BatchNorm, stages.0.0.bn2") == 1
    last = rows(tmp_path / "noisy")[-1]
    assert last["accuracy"] < last["train_accuracy"] - 0.15
    train(RESNET, tmp_path / "clean", data, *SETTINGS)
    assert "dropout" not in train.printed
    monkeypatch.setattr(watch_module, "_FAR_BELOW", 2.0)  # which nothing is: looking changed no bit of the run
    train(RESNET, tmp_path / "unseen", data, *noisy)
    assert "dropout" not in train.printed
    assert outcome(tmp_path / "unseen") == outcome(tmp_path / "noisy")
