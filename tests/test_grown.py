"""A dense block that grows in place computes what copies of it do. Triton's interpreter runs the kernels on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels are Triton's")


@pytest.fixture(scope="module")
def trial() -> dict[str, Any]:
    script = Path(__file__).with_name("grown_trial.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_kernels_agree_with_float64(trial: dict[str, Any]) -> None:
    assert len(trial["kernels"]) == 4
    for case, apart in {**trial["kernels"], "other tiles": trial["tiles"]}.items():
        # Outputs, all gradients and running statistics; the batches lie at 20 +- 1.
        assert len(apart) >= 7 and max(apart) < 2e-5, case


def test_kernels_are_tried_before_they_are_used(trial: dict[str, Any]) -> None:
    assert trial["works"] == [True, True]
    assert trial["mistaken"]  # kernels that give other numbers are not used


def test_dropout_is_the_same_forward_and_backward(trial: dict[str, Any]) -> None:
    found = trial["dropout"]
    assert found["worst"] < 2e-5
    # 12,960 numbers a mask, 30 % of them dropped: no two masks agree by more than chance.
    assert 0.28 < found["least"] <= found["most"] < 0.32
    assert found["alike"] < 0.7 * 0.7 + 0.3 * 0.3 + 0.02


@pytest.mark.parametrize(
    ("network", "grew"),
    [
        pytest.param("dense", 2 * 6, id="dense"),
        pytest.param("odd", 2 * 3, id="odd widths"),
        pytest.param("long", 2 * 51, id="more layers than a block has room for"),
        pytest.param("traps", 2 * 7, id="maps that are read elsewhere too"),
    ],
)
def test_a_network_that_grows_in_place_is_the_same(trial: dict[str, Any], network: str, grew: int) -> None:
    found = trial[network]
    assert max(found["outputs"], found["gradients"], found["buffers"]) < 2e-5
    assert found["grew"] == grew  # in two steps


def test_maps_that_are_overwritten_are_not_those_of_a_block(trial: dict[str, Any]) -> None:
    found = trial["in place"]
    assert found["grew"] == 2  # before it was noticed; from then on the network runs plainly
    assert (found["outputs"], found["gradients"], found["buffers"]) == (0, 0, 0)


def test_a_second_backward_is_refused(trial: dict[str, Any]) -> None:
    assert "twice" in trial["twice"]
