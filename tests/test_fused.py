"""A step in fewer kernels computes what PyTorch's own do. Triton's interpreter runs the kernels on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are Triton's")


@pytest.fixture(scope="module")
def trial() -> dict[str, Any]:
    script = Path(__file__).with_name("fused_trial.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_kernels_agree_with_float64(trial: dict[str, Any]) -> None:
    assert trial["trial"] == ""
    assert len(trial["kernels"]) == 15
    for case, (y, dx, d_weight, d_bias, mean, var) in trial["kernels"].items():
        # The batches lie at 50 +- 2: plain sums of squares in float32 would miss the variance by a part in 1e4.
        assert max(y, dx) < 5e-5, case
        assert max(d_weight, d_bias) < 2e-4, case
        assert max(mean, var) < 1e-5, case


def test_convolutions_of_each_channel_agree_with_float64(trial: dict[str, Any]) -> None:
    assert trial["works"] == [True, True] and trial["noticed"]
    assert len(trial["depthwise"]) == 25
    for case, (y, dx, d_weight) in trial["depthwise"].items():
        assert max(y, dx, d_weight) < 1e-6, case


def test_a_look_is_as_near_as_half_precision_can_be(trial: dict[str, Any]) -> None:
    assert trial["looks"]["ours"] == 2
    assert trial["looks"]["apart"] < 0.02


def test_every_use_of_a_norm_gets_its_result(trial: dict[str, Any]) -> None:
    uses = trial["uses"]
    assert max(uses["outputs"], uses["gradients"], uses["buffers"]) < 1e-5
    # Of six norms, one with ReLU, one with ReLU6, one both with ReLU and plain, and three plain, in two steps.
    assert uses["fused"] == [8, 4, 2]


def test_a_norm_and_its_activation_are_one(trial: dict[str, Any]) -> None:
    sequence = trial["sequence"]
    assert max(sequence["outputs"], sequence["gradients"], sequence["buffers"]) < 1e-5
    assert sequence["fused"] == [0, 2, 0]


def test_what_a_norm_and_a_sum_both_read_gets_one_gradient(trial: dict[str, Any]) -> None:
    for network, added in (("residual", 2 * 3), ("dense", 2 * 3), ("uses", 2)):
        found = trial[network]
        assert max(found["outputs"], found["gradients"], found["buffers"]) < 1e-5, network
        assert found["added"] == added, network  # in two steps


def test_dropout_behind_a_norm_is_dropout(trial: dict[str, Any]) -> None:
    found = trial["dropout"]
    assert found["gradients"] < 5e-5
    # 49,766 numbers a mask, 30 % of them dropped: no two masks of 8 agree by more than chance.
    assert 0.29 < found["least"] <= found["most"] < 0.31
    assert found["alike"] < 0.7 * 0.7 + 0.3 * 0.3 + 0.01


@pytest.mark.parametrize("network", ["odd", "odd dense", "odd inverted"])
def test_even_widths_change_nothing(trial: dict[str, Any], network: str) -> None:
    found = trial[network]
    assert max(found["outputs"], found["gradients"], found["buffers"]) < 1e-5
    # Convolutions of each channel for itself, in two steps, by kernels of our own.
    assert found["convolved"] == {"odd": 2 * 2, "odd dense": 0, "odd inverted": 2 * 2}[network]


def test_shortcuts_are_not_taken_where_they_would_be_wrong(trial: dict[str, Any]) -> None:
    # y = 2 x the first time, 4 x the second; the norm without gradients adds none, and must not take x's away.
    assert trial["traps"] == {"gradient": 4.0, "weight": 4.0}


def test_half_precision_is_as_near_as_it_can_be(trial: dict[str, Any]) -> None:
    found = trial["half"]
    assert max(found["outputs"], found["gradients"], found["buffers"]) < 0.03


def test_a_model_that_hides_a_norm_from_it_is_run_plainly(trial: dict[str, Any]) -> None:
    assert len(trial["escapes"]["notices"]) == 1
    assert "PyTorch's own kernels" in trial["escapes"]["notices"][0]
    assert trial["escapes"]["gradient"] > 0


def test_a_batch_that_changes_before_its_norm_is_used_is_noticed(trial: dict[str, Any]) -> None:
    assert len(trial["overwritten"]["notices"]) == 1 and "in place" in trial["overwritten"]["notices"][0]
    assert trial["overwritten"]["difference"] < 1e-5


def test_where_it_cannot_be_the_reason_is_told() -> None:
    from narrowgate.train.norm_activation import why_not

    if torch.cuda.is_available():
        pytest.skip("there is a GPU, where it can be")
    assert why_not(torch.device("cpu")) != ""  # no interpreter here
