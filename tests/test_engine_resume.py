"""A run that was stopped anywhere ends at the same bits as one that was not."""

import os
import shutil
import subprocess
import sys

import pytest
from engine_helpers import LENET, RESNET, Killed, outcome, rows, train, train_until, write_images

from narrowgate.train import engine
from narrowgate.train.checkpoint import TENSORS, Checkpoints
from narrowgate.train.lock import LockedError
from narrowgate.train.recipe import RecipeError
from narrowgate.train.watch import TrainingError


@pytest.fixture(scope="module")
def small_images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("data") / "8.npz", train=80)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("data") / "28.npz", 28)


SGD = ("optimizer.kind='sgd'", "optimizer.lr=0.05", "optimizer.nesterov=true", "gates.lr_factor=1.0")
CASES = {
    "adamw, proximal": (LENET, ()),
    "sgd, step": (LENET, (*SGD, "penalty.strength=0.1", "lr.drops=[1, 3]", "optimizer.weight_decay=1e-3")),
    "penalty in the loss": (LENET, (*SGD, "penalty.proximal=false", "penalty.strength=1e-3", "checkpoint.every=2")),
    "cosine, warm-up": (LENET, ("lr.schedule='cosine'", "lr.warmup=1.5", "data.augment='crop-flip'")),
    "schedule of strength": (
        LENET,
        ("penalty.strength={ schedule = 'stepped', values = [0.2, 0.9, 1.5], at = [1, 3] }",),
    ),
    "hard-concrete": (
        LENET,
        ("gates.kind='hard-concrete'", "penalty.kind='l0'", "penalty.proximal=false", "penalty.strength=0.01"),
    ),
    "budget": (LENET, ("budget.target='params: 60%'",)),
    "budget, shrinking": (
        LENET,
        ("budget.target='params: 60%'", "shrink.when='during'", "shrink.every=1", "shrink.share=0.0"),
    ),
    "shrinking": (LENET, ("shrink.when='during'", "shrink.every=1", "shrink.share=0.0", "penalty.strength=1.2")),
    "shrinking, growing batches": (
        LENET,
        (
            *SGD,
            "budget.target='flops: 40%'",
            "budget.arrive=0.5",
            "penalty.strength=1e-3",
            "shrink.when='during'",
            "shrink.every=1",
            "shrink.share=0.0",
            "shrink.batch=32",
            "finish.finetune_epochs=1",
        ),
    ),
    "shrinking, norms, dropout": (
        RESNET,
        (
            "model.options={ depth = 11, dropout = 0.2 }",
            "shrink.when='during'",
            "shrink.every=1",
            "shrink.share=0.0",
            "penalty.strength=2.0",
        ),
    ),
    "bf16, fine-tuning": (LENET, ("train.precision='bf16'", "finish.finetune_epochs=1", "finish.threshold=0.1")),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_goes_on_ends_at_the_same_bits(tmp_path, monkeypatch, images, small_images, case):
    text, settings = CASES[case]
    data = images if text == LENET else small_images
    train(text, tmp_path / "whole", data, *settings)
    train_until(monkeypatch, 4 if "shrinking" in case else 3, text, tmp_path / "killed", data, *settings)
    assert not (tmp_path / "killed" / "result.json").exists()
    train(text, tmp_path / "killed", data, *settings, resume=True)
    assert "going on after epoch" in train.printed
    whole, killed = outcome(tmp_path / "whole"), outcome(tmp_path / "killed")
    assert killed == whole
    if "shrinking" in case:
        cut = [bool(event) for event in whole["cuts"]]
        assert any(cut[:4]) and whole["plan"] != "{}"


def test_another_seed_ends_at_other_bits(tmp_path, images):
    for seed in (0, 1):
        train(LENET, tmp_path / str(seed), images, "train.epochs=1", f"train.seed={seed}")
    ours, theirs = outcome(tmp_path / "0"), outcome(tmp_path / "1")
    assert ours["tensors"]["small/conv1.weight"] != theirs["tensors"]["small/conv1.weight"]


@pytest.mark.parametrize("damage", ["cut off", "removed"])
def test_a_damaged_last_checkpoint_costs_one_epoch(tmp_path, monkeypatch, images, damage):
    settings = ("shrink.when='during'", "shrink.every=1", "train.epochs=4")
    train(LENET, tmp_path / "whole", images, *settings)
    folder = tmp_path / "killed"
    train_until(monkeypatch, 3, LENET, folder, images, *settings)
    file = folder / "checkpoints" / "epoch-000003" / TENSORS
    if damage == "removed":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="damaged: .*epoch-000003.*going back to .*epoch-000002"):
        train(LENET, folder, images, *settings, resume=True)
    assert "going on after epoch 2" in train.printed
    assert outcome(folder) == outcome(tmp_path / "whole")
    assert Checkpoints(folder / "checkpoints", 2).epochs() == [4, 3]


def test_killed_before_the_first_checkpoint_or_after_the_last(tmp_path, monkeypatch, images):
    settings = ("train.epochs=2",)
    train(LENET, tmp_path / "whole", images, *settings)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "save", lambda *_: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            train(LENET, tmp_path / "early", images, *settings)
    assert len(rows(tmp_path / "early")) == 1  # of an epoch that will run again
    train_until(monkeypatch, 2, LENET, tmp_path / "late", images, *settings)
    for name in ("early", "late"):
        train(LENET, tmp_path / name, images, *settings, resume=True)
        assert outcome(tmp_path / name) == outcome(tmp_path / "whole")


def test_a_finished_run_is_not_run_again(tmp_path, monkeypatch, images):
    folder = tmp_path / "run"
    result = train(LENET, folder, images, "train.epochs=1")
    with pytest.raises(FileExistsError, match="holds a run: go on with --resume"):
        train(LENET, folder, images, "train.epochs=1")
    with pytest.raises(RecipeError, match="is not the recipe given"):
        train(LENET, folder, images, "train.epochs=2", resume=True)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "Training", lambda *_: pytest.fail("a finished run was trained again"))
        assert train(LENET, folder, images, "train.epochs=1", "checkpoint.keep=5", resume=True) == result
    shutil.rmtree(folder / "checkpoints")
    (folder / "result.json").unlink()
    assert train(LENET, folder, images, "train.epochs=1", resume=True).accuracy == result.accuracy


def test_a_run_whose_recipe_was_lost_goes_on_with_no_other(tmp_path, monkeypatch, images):
    folder, settings = tmp_path / "run", ("train.epochs=2",)
    train(LENET, tmp_path / "whole", images, *settings)
    train_until(monkeypatch, 1, LENET, folder, images, *settings)
    (folder / "recipe.toml").unlink()
    with pytest.raises(FileExistsError, match="holds a run: go on with --resume"):
        train(LENET, folder, images, *settings)
    with pytest.raises(RecipeError, match=r"epoch-000001 is not .* \(optimizer.lr is 0.002 there and 0.5 here"):
        train(LENET, folder, images, *settings, "optimizer.lr=0.5", resume=True)
    train(LENET, folder, images, *settings, resume=True)
    assert outcome(folder) == outcome(tmp_path / "whole")


def test_what_killed_processes_left_half_written_is_removed(tmp_path, monkeypatch, images):
    folder, settings = tmp_path / "run", ("train.epochs=2",)
    train_until(monkeypatch, 1, LENET, folder, images, *settings)
    clean = {path.name for path in folder.iterdir()}
    (folder / ".metrics.jsonl.0123abcd.new").touch()
    (folder / ".small.89abcdef.new").mkdir()
    (folder / ".small.89abcdef.new" / "model.safetensors").touch()
    (folder / ".notes.0123abcd.new").touch()  # somebody's own
    train(LENET, folder, images, *settings, resume=True)
    assert {path.name for path in folder.iterdir()} == clean | {"small", "result.json", ".notes.0123abcd.new"}


def test_a_finished_run_whose_small_network_was_lost_ends_once_more(tmp_path, images):
    train(LENET, tmp_path / "run", images, "train.epochs=1")
    before = outcome(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "small")
    train(LENET, tmp_path / "run", images, "train.epochs=1", resume=True)
    assert outcome(tmp_path / "run") == before
    shutil.rmtree(tmp_path / "run" / "small")
    shutil.rmtree(tmp_path / "run" / "checkpoints")  # to have room: that is no reason to train it again
    train(LENET, tmp_path / "run", images, "train.epochs=1", resume=True)
    assert not (tmp_path / "run" / "small").exists()


def test_fine_tuning_that_went_wrong_is_done_anew(tmp_path, images):
    """Its settings may change until there is a result, and lead to what a run with them from the start has."""
    settings = ("train.epochs=2", "finish.finetune_epochs=1")
    with pytest.raises(TrainingError, match=r"Go on with --resume and a lower finish\.finetune_lr"):
        train(LENET, tmp_path / "run", images, *settings, "finish.finetune_lr=1e30")
    lower = (*settings, "finish.finetune_lr=1e-3")
    assert train(LENET, tmp_path / "run", images, *lower, resume=True).recipe_digest
    train(LENET, tmp_path / "whole", images, *lower)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
    with pytest.raises(RecipeError, match=r"not the recipe given \(finish\.finetune_lr is 0\.001 there"):
        train(LENET, tmp_path / "run", images, *settings, "finish.finetune_lr=1e-2", resume=True)


@pytest.mark.parametrize(("processes", "told"), [(2, True), (1, False)])
def test_a_run_that_goes_on_with_fewer_processes_says_so(tmp_path, monkeypatch, images, processes, told):
    train_until(monkeypatch, 1, LENET, tmp_path, images, "train.epochs=2")
    kept = Checkpoints(tmp_path / "checkpoints", 2)
    saved = kept.latest()
    kept.save(saved.epoch, saved.tensors, saved.meta | {"processes": processes})
    train(LENET, tmp_path, images, "train.epochs=2", resume=True)
    assert ("this run had 2 processes and goes on with 1: each takes train.batch" in train.printed) == told


HOLD = """
import sys
from pathlib import Path
from narrowgate.train.lock import alone_in
with alone_in(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(os.name == "nt", reason="there is no lock on Windows")
def test_a_run_that_another_process_trains_is_left_alone(tmp_path, monkeypatch, images):
    train_until(monkeypatch, 2, LENET, tmp_path / "run", images)
    before = rows(tmp_path / "run")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "run")], **pipes) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(LockedError, match=f"run is in use: process {other.pid} on .* trains there. Wait for it"):
            train(LENET, tmp_path / "run", images, resume=True)
        assert rows(tmp_path / "run") == before
        other.kill()  # the system lets go of what it held
    train(LENET, tmp_path / "run", images, resume=True)
    assert [row["epoch"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4, 5]
