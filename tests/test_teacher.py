"""Learning from a trained network beside the labels."""

import dataclasses
import json
import re
import shutil

import pytest
import torch
from engine_helpers import RESNET, train, train_until, write_images
from torch import nn
from torch.nn import functional as F

from narrowgate.reproduce.record import collect
from narrowgate.reproduce.runs import load_runs
from narrowgate.sweep.command import _anywhere
from narrowgate.train.finish import Result
from narrowgate.train.recipe import Recipe, RecipeError
from narrowgate.train.step import Step
from narrowgate.train.teacher import Teacher

NO_GATES = ("gates.kind=none", "gates.placement=before-norm", "penalty.strength=0", "penalty.proximal=false")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("images") / "images.npz")


@pytest.fixture(scope="module")
def taught(tmp_path_factory, data):
    """A folder with a teacher's run, and one that learned from it."""
    folder = tmp_path_factory.mktemp("runs")
    train(RESNET, folder / "teacher", data, "train.epochs=2", "train.seed=7", *NO_GATES)
    train(RESNET, folder / "student", data, "train.epochs=2", f'teacher.run="{folder / "teacher"}"')
    return folder


def one_step(teacher):
    """A student's weights after one step of plain SGD."""
    torch.manual_seed(0)
    student = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    images, labels = torch.randn(5, 3, 2, 2), torch.tensor([0, 1, 2, 0, 1])
    before = student[1].weight.detach().clone()
    step = Step(student, torch.optim.SGD(student.parameters(), 1.0), None, torch.device("cpu"), teacher=teacher)
    step(images, labels)
    return before, student[1].weight.detach(), images, labels


def test_the_step_is_that_of_both_losses():
    torch.manual_seed(1)
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).eval()
    before, after, images, labels = one_step(Teacher(network, 0.7, 3.0, {}))
    weight = before.clone().requires_grad_()
    torch.manual_seed(0)
    bias = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))[1].bias.detach()
    logits = images.flatten(1) @ weight.T + bias
    soft = F.softmax(network(images) / 3, 1)
    distance = (soft * (soft.log() - F.log_softmax(logits / 3, 1))).sum(1).mean() * 9
    (0.3 * F.cross_entropy(logits, labels) + 0.7 * distance).backward()
    torch.testing.assert_close(after, (before - weight.grad))


def test_a_student_of_its_own_answers_alone_does_not_move():
    torch.manual_seed(0)
    same = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).eval()
    before, after, *_ = one_step(Teacher(same, 1.0, 2.0, {}))
    torch.testing.assert_close(after, before)


def test_a_teacher_is_not_trained_and_its_answers_take_no_gradient():
    network = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(12), nn.Linear(12, 3)).eval()
    kept = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    one_step(Teacher(network, 0.9, 4.0, {}))
    assert all(torch.equal(kept[name], tensor) for name, tensor in network.state_dict().items())
    assert all(p.grad is None for p in network.parameters())


def test_a_run_with_a_teacher_says_so(taught):
    result = Result.load(taught / "student")
    assert result.teacher["model"]["name"] == Recipe.load(taught / "teacher" / "recipe.toml").model.name
    assert result.teacher["accuracy"] == Result.load(taught / "teacher").accuracy
    assert Result.load(taught / "teacher").teacher is None
    record = collect(taught / "student")
    assert record["teacher"] == result.teacher
    assert record["recipe"]["teacher"]["run"] == "teacher"  # where it lay is nobody's business
    assert "teacher" not in collect(taught / "teacher")


def test_another_teacher_is_noticed_when_a_run_goes_on(taught, data, tmp_path, monkeypatch):
    train(RESNET, tmp_path / "teacher", data, "train.epochs=1", "train.seed=7", *NO_GATES)
    settings = ("train.epochs=2", f'teacher.run="{tmp_path / "teacher"}"')
    train_until(monkeypatch, 1, RESNET, tmp_path / "student", data, *settings)
    shutil.copytree(tmp_path / "student", tmp_path / "other")
    train(RESNET, tmp_path / "student", data, *settings, resume=True)
    assert "going on after epoch 1" in train.printed and "is another one than when this run began" not in train.printed
    shutil.rmtree(tmp_path / "teacher")
    shutil.copytree(taught / "teacher", tmp_path / "teacher")
    train(RESNET, tmp_path / "other", data, *settings, resume=True)
    assert f"the network in {tmp_path / 'teacher'} is another one than when this run began" in train.printed


def test_what_was_taught_is_told_apart_in_the_tables(taught, tmp_path):
    for name in ("teacher", "student"):
        (tmp_path / f"{name}.json").write_text(json.dumps(collect(taught / name, dataset="cifar100")))
    student, teacher = load_runs(tmp_path)
    assert (student.taught, teacher.taught) == (True, False)
    assert "taught by" in student.settings and f"{100 * teacher.accuracy:.2f} %" in student.settings
    assert student.config != teacher.config


def test_the_student_learned_something_else(taught, data, tmp_path):
    alone = train(RESNET, tmp_path / "alone", data, "train.epochs=2")
    rows = [(folder / "metrics.jsonl").read_text().splitlines() for folder in (taught / "student", tmp_path / "alone")]
    losses = [json.loads(lines[0])["train_loss"] for lines in rows]
    assert losses[0] != losses[1] and alone.teacher is None


@pytest.mark.parametrize("missing", ["recipe.toml", "result.json"])
def test_an_unfinished_run_is_no_teacher(taught, data, tmp_path, missing):
    for name in ("recipe.toml", "result.json"):
        if name != missing:
            (tmp_path / name).write_bytes((taught / "teacher" / name).read_bytes())
    with pytest.raises(RecipeError, match=rf"teacher\.run.*not the folder of a finished run.*{re.escape(missing)}"):
        train(RESNET, tmp_path / "student", data, f'teacher.run="{tmp_path}"')
    with pytest.raises(RecipeError, match=r"there is no such folder; the path begins at the current folder, /"):
        train(RESNET, tmp_path / "student", data, 'teacher.run="runs/gone"')
    assert not (tmp_path / "student").exists()


def test_a_teacher_of_other_classes_is_refused(taught, tmp_path):
    other = write_images(tmp_path / "other.npz", classes=5)
    with pytest.raises(RecipeError, match="trained for classes 4, and the data has 5"):
        train(RESNET, tmp_path / "student", other, f'teacher.run="{taught / "teacher"}"')


def test_a_damaged_teacher_is_refused_by_name(taught, data, tmp_path):
    shutil.copytree(taught / "teacher", tmp_path / "teacher")
    weights = tmp_path / "teacher" / "small" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(RecipeError, match=r"teacher\.run.*can't be loaded.*model\.safetensors"):
        train(RESNET, tmp_path / "student", data, f'teacher.run="{tmp_path / "teacher"}"')


def test_a_sweep_finds_the_teacher_from_anywhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    recipe = Recipe.from_toml(RESNET, ["teacher.run=runs/teacher"])
    assert _anywhere(recipe).teacher.run == str(tmp_path / "runs" / "teacher")
    assert _anywhere(dataclasses.replace(recipe, teacher=type(recipe.teacher)())).teacher.run == ""
