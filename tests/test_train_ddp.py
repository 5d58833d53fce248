"""Two processes end where one with the doubled batch does, whoever starts them; each test takes some ten seconds."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest
import torch.distributed as dist
from engine_helpers import LENET, rows, write_images
from safetensors.numpy import load_file
from typer.testing import CliRunner

from narrowgate.cli import build_app

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="no gloo in this build of torch"),
]
NARROWGATE = ("-m", "narrowgate")
SHRINKING = ("--set", "shrink.when=during", "--set", "shrink.every=1", "--set", "shrink.share=0.01")
ALONE = ("--set", "train.batch=16")
TWO = ("--set", "train.batch=8", "--devices", "2")


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    (folder / "lenet.toml").write_text(LENET)
    data = write_images(folder / "28.npz", 28)
    return ("train", str(folder / "lenet.toml"), "--data", data, "--accelerator", "cpu", *SHRINKING)


def start(*command, **options):
    kept = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "WORLD_SIZE", "RANK")}
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        env={**kept, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        **options,
    )


def finish(*command):
    process = start(*command)
    try:
        output, _ = process.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, output


def assert_finished(*command):
    status, output = finish(*command)
    assert status == 0, output
    assert "Warning" not in output and "Traceback" not in output, output


@pytest.fixture(scope="module")
def alone(arguments, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone") / "run"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # those too that pyproject.toml lets pass
        done = CliRunner().invoke(build_app(), [*arguments, *ALONE, "--out", str(folder)])
    assert done.exit_code == 0, done.output
    assert "Warning" not in done.output and "Traceback" not in done.output, done.output
    assert sum(bool(row["event"]) for row in rows(folder)) >= 2
    return folder


def assert_same_ending(ours, theirs, processes=2):
    result, expected = (json.loads((folder / "result.json").read_text()) for folder in (ours, theirs))
    assert result["processes"] == processes and expected["processes"] == 1
    for key in ("parameters", "multiply_adds", "accuracy", "closed"):
        assert result[key] == expected[key], key
    assert result["parameters"] < 0.8 * result["parameters_full"]
    networks = [load_file(folder / "small" / "model.safetensors") for folder in (ours, theirs)]
    assert networks[0].keys() == networks[1].keys()
    for name, array in networks[0].items():
        np.testing.assert_allclose(array, networks[1][name], rtol=1e-3, atol=2e-4, err_msg=name)
    losses = [[row["train_loss"] for row in rows(folder)] for folder in (ours, theirs)]
    np.testing.assert_allclose(*losses, rtol=1e-4)
    cuts = [[row["event"].partition(" in ")[0] for row in rows(folder)] for folder in (ours, theirs)]
    assert cuts[0] == cuts[1]


def test_two_processes_that_fabric_starts(tmp_path, arguments, alone):
    assert_finished(*NARROWGATE, *arguments, *TWO, "--out", tmp_path / "run")
    assert_same_ending(tmp_path / "run", alone)


def test_two_processes_that_torchrun_starts(tmp_path, arguments, alone):
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-port", free_port())
    assert_finished(*torchrun, *NARROWGATE, *arguments, *TWO[:2], "--out", tmp_path / "run")
    assert_same_ending(tmp_path / "run", alone)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_two_killed_processes_go_on(tmp_path, arguments, alone):
    folder = tmp_path / "run"
    process = start(*NARROWGATE, *arguments, *TWO, "--out", folder)
    deadline = time.monotonic() + 300
    while not (folder / "checkpoints" / "epoch-000003").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (folder / "result.json").exists()
    assert_finished(*NARROWGATE, *arguments, *TWO, "--out", folder, "--resume")
    assert_same_ending(folder, alone)


def test_of_two_processes_one_says_what_is_wrong_and_none_waits(tmp_path, arguments, alone):
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "checkpoints").touch()
    for wrong, message, ends_with in (  # 1 for what fails, 2 for what was called wrongly
        (("--out", blocked), "can't write the checkpoint", 1),
        (("--data", tmp_path / "none.npz", "--out", tmp_path / "run"), "none.npz does not exist", 2),
        (("--out", alone), "holds a run", 2),
    ):
        status, output = finish(*NARROWGATE, *arguments, *TWO, *wrong)
        assert status == ends_with
        assert output.count(message) == 1 and "Traceback" not in output, output
    assert not (tmp_path / "run").exists()
