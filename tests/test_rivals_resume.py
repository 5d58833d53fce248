"""Rival methods that hold state of their own: a run that was killed ends at the same bits as one that was not."""

import pytest
from engine_helpers import outcome, train, write_images
from safetensors.numpy import load_file
from test_engine_resume import train_until
from test_rivals_engine import SETTINGS, TINY, text_of

SMALLER = ("shrink.when='during'", "shrink.every=1", "shrink.share=0.0", "shrink.layout='aligned'")
CASES = {
    "sparse-selection, shrinking": ("penalty.strength=0.04", "train.epochs=7", *SMALLER),
    "ista, shrinking": ("train.epochs=3", *SMALLER),
    "group-lasso": ("train.epochs=3", "checkpoint.best=false"),
}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("data") / "28.npz", 28, test=40)


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_goes_on_ends_at_the_same_bits(tmp_path, monkeypatch, images, case):
    method = case.partition(",")[0]
    settings = (*TINY, *SETTINGS[method], *CASES[case])
    text, at = text_of(method), 6 if method == "sparse-selection" else 2
    train(text, tmp_path / "whole", images, *settings)
    train_until(monkeypatch, at, text, tmp_path / "killed", images, *settings)
    train(text, tmp_path / "killed", images, *settings, resume=True)
    assert f"going on after epoch {at}" in train.printed
    whole, killed = outcome(tmp_path / "whole"), outcome(tmp_path / "killed")
    assert killed == whole
    assert whole["result"]["parameters"] < whole["result"]["parameters_full"]
    if "shrinking" in case:
        assert any(whole["cuts"][:at])


def test_a_checkpoint_holds_the_momentum_of_the_factors(tmp_path, images):
    settings = (*TINY, "penalty.strength=0.04", "train.epochs=2")
    train(text_of("sparse-selection"), tmp_path / "run", images, *settings)
    tensors = load_file(tmp_path / "run" / "checkpoints" / "epoch-000002" / "tensors.safetensors")
    momentum = {name: array for name, array in tensors.items() if name.endswith(".g/momentum_buffer")}
    assert len(momentum) == 4 and all(abs(array).max() > 1e-4 for array in momentum.values())
