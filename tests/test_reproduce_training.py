"""``narrowgate reproduce --train``: the paper's rows that have no result file are run, kept, and not run again."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning")
pytest.importorskip("typer")

from engine_helpers import rows, write_images
from typer.testing import CliRunner

from narrowgate import cli
from narrowgate.reproduce import training
from narrowgate.reproduce.record import RecordError
from narrowgate.reproduce.runs import load_runs
from narrowgate.reproduce.training import RECIPES, Options, missing
from narrowgate.train.watch import TrainingError

ROOT = Path(__file__).parent.parent
PAPERS = ROOT / "recipes"
SHORT = ("train.epochs=2", "train.batch=40", "lr.drops=[]", "checkpoint.every=1")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("images") / "mnist.npz", side=28, classes=10)


@pytest.fixture
def reproduce(images, tmp_path):
    """The command with short runs on a few images; its files go to ``tmp_path``."""

    def run(*arguments):
        words = ["reproduce", "mnist", "--train", "--data", images, "--recipes", str(PAPERS), "--accelerator", "cpu"]
        words += ["--results", str(tmp_path / "results"), "--runs", str(tmp_path / "runs")]
        words += [word for setting in SHORT for word in ("--set", setting)]
        return CliRunner().invoke(cli.build_app(), [*words, *arguments])

    return run


def test_all_rows_of_one_seed_come_before_the_next_seed(tmp_path):
    jobs = missing("mnist", tmp_path, Options(recipes=PAPERS, seeds=2))
    assert [(job.base.stem, job.recipe.train.seed) for job in jobs] == [
        (name, seed) for seed in (0, 1) for name in RECIPES["mnist"]
    ]
    assert jobs[0].record == tmp_path / "mnist" / "l2-exp-5e-4-seed0.json"


@pytest.mark.parametrize("what", RECIPES)
def test_every_row_can_be_run(what, tmp_path):
    jobs = missing(what, tmp_path, Options(recipes=PAPERS))
    assert [job.base.stem for job in jobs] == RECIPES[what] and len({job.record for job in jobs}) == len(jobs)


def test_rows_with_a_result_file_are_not_missing():
    there = missing("mnist", ROOT / "results", Options(recipes=PAPERS, seeds=3))
    assert not there and len(missing("mnist", ROOT / "results", Options(recipes=PAPERS, seeds=4))) == 4
    names = [job.record.name for job in missing("cifar100", ROOT / "results", Options(recipes=PAPERS))]
    assert "densenet40-baseline-seed0.json" in names and "mobilenetv2-l1-exp-seed0.json" not in names


def test_some_rows_in_the_order_asked_for(tmp_path):
    only = ("resnet164-l1-lin*", "densenet40-baseline", "resnet164-l1-*")
    jobs = missing("cifar100", tmp_path, Options(recipes=PAPERS, only=only))
    assert [job.folder.name.removesuffix("-seed0") for job in jobs] == [
        "resnet164-l1-lin", "resnet164-l1-lin-scheduled", "densenet40-baseline", "resnet164-l1-exp",
        "resnet164-l1-exp-scheduled",
    ]  # fmt: skip


def test_what_can_not_be_run_is_said_before_anything_runs(tmp_path):
    with pytest.raises(RecordError, match=r"no row 'resnet18'; its rows: .*resnet164-baseline"):
        missing("cifar100", tmp_path, Options(recipes=PAPERS, only=("resnet18",)))
    with pytest.raises(RecordError, match=r"no recipe .*mnist-lenet5-l2-exp-5e-4.toml; give the folder .* --recipes"):
        missing("mnist", tmp_path, Options(recipes=tmp_path))


def test_runs_are_kept_and_not_made_again(reproduce, tmp_path):
    done = reproduce("--only", "l1-exp-1e-3", "--curve")
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "results" / "mnist" / "l1-exp-1e-3-seed0.json").read_text())
    assert record["command"].startswith("narrowgate train recipes/mnist-lenet5-l1-exp-1e-3.toml --set ")
    assert record["dataset"] == "mnist" and len(record["curve"]["threshold"]) > 10
    (run,) = load_runs(tmp_path / "results")
    assert (run.epochs, run.seed) == (2, 0)
    assert "1 of 1: mnist-lenet5-l1-exp-1e-3, seed 0" in done.output and "Table 1" in done.output
    again = reproduce("--only", "l1-exp-1e-3")
    assert again.exit_code == 0 and "no run of mnist is missing" in again.output


def test_a_stopped_run_goes_on(reproduce, tmp_path, monkeypatch):
    run = training.run

    def stopped(recipe, folder, **options):
        run(recipe, folder, **options)
        (folder / "result.json").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "run", stopped)
    assert reproduce("--only", "l1-exp-1e-3").exit_code == 130
    assert not (tmp_path / "results").exists()
    monkeypatch.setattr(training, "run", run)
    assert reproduce("--only", "l1-exp-1e-3").exit_code == 0
    assert [row["epoch"] for row in rows(tmp_path / "runs" / "mnist" / "l1-exp-1e-3-seed0")] == [1, 2]


def test_a_run_that_fails_does_not_stop_the_rest(reproduce, tmp_path, monkeypatch):
    run = training.run

    def collapsing(recipe, folder, **options):
        if "bounded" in folder.name:
            raise TrainingError("the loss is nan")
        return run(recipe, folder, **options)

    monkeypatch.setattr(training, "run", collapsing)
    done = reproduce("--only", "bounded-l1-exp-3e-3", "--only", "l1-exp-1e-3", "--runs", str(tmp_path / "[mine]"))
    assert "[mine]/mnist/bounded" in done.output.replace("\n", "")  # not taken for a colour
    assert done.exit_code == 1 and "bounded-l1-exp-3e-3-seed0 failed: the loss is nan" in done.output
    assert done.stderr == "failed: bounded-l1-exp-3e-3-seed0\n"
    assert [path.name for path in (tmp_path / "results" / "mnist").iterdir()] == ["l1-exp-1e-3-seed0.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["all", "--train"], "say which rows: mnist, cifar100, imagenet, not all"),
        (["mnist", "--seeds", "3"], "nothing is trained without it"),
    ],
)
def test_options_of_training_need_it(arguments, message):
    result = CliRunner().invoke(cli.build_app(), ["reproduce", *arguments])
    assert result.exit_code == 2 and message in " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_told_once(reproduce):
    done = reproduce("--accelerator", "cuda")
    assert done.exit_code == 1 and "sees no GPU" in done.stderr
    assert "failed" not in done.output


def test_missing_images_stop_all(tmp_path):
    words = ["reproduce", "mnist", "--train", "--recipes", str(PAPERS), "--results", str(tmp_path / "results")]
    done = CliRunner().invoke(cli.build_app(), [*words, "--data", str(tmp_path / "no.npz"), "--runs", str(tmp_path)])
    assert done.exit_code == 2 and "no.npz does not exist" in done.stderr
