"""The logs of a run: valid JSON whatever the numbers are, and one line an epoch however often it was killed."""

import dataclasses
import errno
import json
import os
import subprocess
import sys
from math import inf, nan
from pathlib import Path

import pytest
import torch
from helpers import gates_at

from narrowgate.train.log import EpochRow, RunLog


def row(epoch=1, epochs=4, **changes):
    values = EpochRow(
        epoch=epoch,
        epochs=epochs,
        lr=0.1,
        strength=1e-4,
        sigma=2.0,
        train_loss=1 / epoch,
        train_accuracy=0.5,
        accuracy=0.25,
        closed=0.125,
        parameters=1000,
        multiply_adds=2000,
        seconds=1.5,
        images_per_second=1e4,
    )
    return dataclasses.replace(values, **changes)


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_line_an_epoch_is_in_the_file_at_once(tmp_path):
    log = RunLog(tmp_path / "run", tensorboard=False)
    assert not (tmp_path / "run").exists()
    for epoch in (1, 2):
        log.epoch(row(epoch, event="shrunk 10 -> 5" if epoch == 2 else ""), None)
        assert [line["epoch"] for line in lines(tmp_path / "run")] == list(range(1, epoch + 1))
    assert lines(tmp_path / "run")[1] == dataclasses.asdict(row(2, event="shrunk 10 -> 5"))
    log.close()
    log.close()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full device")
def test_a_full_disk_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    log = RunLog(tmp_path, tensorboard=False)
    with pytest.raises(OSError, match="No space left") as caught:
        log.epoch(row(), None)
    assert caught.value.filename == str(tmp_path / "metrics.jsonl")
    log.close()


@pytest.mark.parametrize("full", ["add_scalar", "close"])
def test_a_full_disk_is_named_for_tensorboard_too(tmp_path, monkeypatch, full):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")

    def no_space(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    log = RunLog(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(tensorboard.SummaryWriter, full, no_space)
        with pytest.raises(OSError, match="No space left") as caught:
            log.epoch(row(), None)
            log.close()
    assert caught.value.filename == str(tmp_path / "tensorboard")
    log.close()


def test_numbers_that_json_does_not_have_are_null(tmp_path):
    log = RunLog(tmp_path, tensorboard=False)
    log.epoch(row(train_loss=nan, lr=inf, accuracy=None, sigma=-inf), None)
    log.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    line = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert [line[key] for key in ("train_loss", "lr", "accuracy", "sigma")] == [None] * 4
    assert line["closed"] == 0.125


@pytest.mark.parametrize("torn", ["", '{"epoch": 4, "epo', '{"epoch": 4}\n[]\n\x00\x00'])
def test_rewinding_drops_epochs_that_run_again(tmp_path, torn):
    log = RunLog(tmp_path, tensorboard=False)
    for epoch in (1, 2, 3):
        log.epoch(row(epoch), None)
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    log = RunLog(tmp_path, tensorboard=False)
    log.rewind(2)
    assert [line["epoch"] for line in lines(tmp_path)] == [1, 2]
    log.epoch(row(3, train_loss=7.0), None)
    assert [line["train_loss"] for line in lines(tmp_path)] == [1.0, 0.5, 7.0]
    log.rewind(0)
    assert lines(tmp_path) == []
    log.epoch(row(1), None)
    log.close()
    assert [line["epoch"] for line in lines(tmp_path)] == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_rewinding_what_does_not_exist(tmp_path):
    RunLog(tmp_path / "run").rewind(3)
    assert not (tmp_path / "run").exists()


def snapshots(folder):
    return [json.loads(line) for line in (folder / "gates.jsonl").read_text().splitlines()]


def test_gates_are_counted_by_order_of_magnitude(tmp_path):
    gates = gates_at(0.0, 1e-5, 2e-3, 1.0, 1.0, 9.0, dtype=torch.float32)  # values 0, 0, 4e-6, 0.63, 0.63, 1
    log = RunLog(tmp_path, tensorboard=False)
    log.epoch(row(1), gates)
    log.close()
    (taken,) = snapshots(tmp_path)
    closed, *counts = taken["layers"]["0"]
    edges = taken["edges"]
    assert (edges[0], edges[-1], len(edges), len(counts)) == (1e-8, 1.0, 25, 25)
    assert closed == 2
    assert {i: count for i, count in enumerate(counts) if count} == {7: 1, 23: 2, 24: 1}
    assert edges[7] < 4e-6 < edges[8] and edges[23] < 0.632 < edges[24]


@pytest.mark.parametrize(
    "epochs, expected",
    [(3, [1, 2, 3]), (59, [1, *range(2, 59, 2), 59]), (240, [1, *range(8, 241, 8)])],
)
def test_some_thirty_snapshots_of_the_gates_a_run(tmp_path, epochs, expected):
    gates = gates_at(0.0, 1.0, dtype=torch.float32)
    log = RunLog(tmp_path, tensorboard=False)
    for epoch in range(1, epochs + 1):
        log.epoch(row(epoch, epochs), gates)
        assert (epoch in expected) == (snapshots(tmp_path)[-1]["epoch"] == epoch)  # in the file at once
    log.close()
    assert [line["epoch"] for line in snapshots(tmp_path)] == expected


def test_rewinding_drops_snapshots_too(tmp_path):
    log = RunLog(tmp_path, tensorboard=False)
    for epoch in (1, 2, 3):
        log.epoch(row(epoch), gates_at(1.0, dtype=torch.float32))
    log.close()
    with (tmp_path / "gates.jsonl").open("a") as file:
        file.write('{"epoch":4,"ed')
    log = RunLog(tmp_path, tensorboard=False)
    log.rewind(2)
    assert [line["epoch"] for line in snapshots(tmp_path)] == [1, 2]
    log.epoch(row(3), gates_at(0.0, dtype=torch.float32))
    log.close()
    assert [line["epoch"] for line in snapshots(tmp_path)] == [1, 2, 3]
    assert snapshots(tmp_path)[-1]["layers"]["0"][0] == 1


def events(folder):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(folder / "tensorboard"), {"histograms": 0, "scalars": 0})
    found.Reload()
    return found


def test_tensorboard_has_scalars_histograms_and_one_value_an_epoch(tmp_path):
    pytest.importorskip("tensorboard")
    gates = gates_at(0.0, 1.0, 2.0, dtype=torch.float32)
    log = RunLog(tmp_path)
    for epoch in range(1, 51):
        accuracy = None if epoch % 2 else epoch / 100
        log.epoch(row(epoch, epochs=100, accuracy=accuracy, event="shrunk" if epoch == 9 else ""), gates)
    log.close()
    log = RunLog(tmp_path)
    log.rewind(40)
    for epoch in (41, 42):
        log.epoch(row(epoch, epochs=100, train_loss=7.0), gates)
    log.close()
    found = events(tmp_path)
    loss = {event.step: event.value for event in found.Scalars("loss/train")}
    assert list(loss) == list(range(1, 43)) and loss[40] == pytest.approx(1 / 40) and loss[41] == 7.0
    assert [event.step for event in found.Scalars("accuracy/held_out")] == [*range(2, 41, 2), 41, 42]
    assert {"gates/closed", "size/parameters", "size/multiply_adds", "schedule/lr"} <= set(found.Tags()["scalars"])
    (name,) = found.Tags()["histograms"]
    assert name == "gates/0"
    histograms = found.Histograms(name)
    assert [event.step for event in histograms] == list(range(5, 41, 5))
    assert histograms[0].histogram_value.num == 3 and histograms[0].histogram_value.min == 0


def test_no_tensorboard_is_said_once(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    log = RunLog(tmp_path)
    with pytest.warns(UserWarning, match="tensorboard is not installed.*pip install tensorboard") as caught:
        for epoch in (1, 2):
            log.epoch(row(epoch), gates_at(1.0))
    log.close()
    assert len(caught) == 1
    assert len(lines(tmp_path)) == 2 and not (tmp_path / "tensorboard").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="no bytes of another locale in the names of files")
def test_a_folder_that_tensorboard_would_write_elsewhere_is_said_once(tmp_path):
    folder = tmp_path / "run\udcc3\udcbc"  # two bytes that Python's encoding of file names lacks, as with LC_ALL=C
    log = RunLog(folder)
    with pytest.warns(
        UserWarning, match=r"TensorBoard can't write to a path .* only metrics\.jsonl is written"
    ) as caught:
        for epoch in (1, 2):
            log.epoch(row(epoch), gates_at(1.0))
    log.close()
    assert len(caught) == 1 and len(lines(folder)) == 2 and not (folder / "tensorboard").exists()


def test_importing_the_log_does_not_import_tensorboard():
    program = "import sys, narrowgate.train.log; sys.exit('tensorboard' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
