"""The simulation of many GPUs: its model by hand, its file from what was measured, its page from its file."""

import json
import re
import sys
from pathlib import Path

import pytest
from page_helpers import ROOT, prose, text_of

sys.path.insert(0, str(ROOT / "benchmarks"))  # where the benchmark's modules find each other

import _scale_model as model
import _scale_page as page
import scale

FOUND = json.loads((ROOT / "benchmarks" / "scale.json").read_text())


def test_a_ring_by_hand():
    assert model.all_reduce(1, 1e9, 1e-6, 1e9) == 0
    # Two GPUs: each sends one half and gets one half back, twice a latency.
    assert model.all_reduce(2, 100.0, 3.0, 10.0) == pytest.approx(2 * 3 + 2 * 50 / 10)
    # Four: six messages of a quarter each.
    assert model.all_reduce(4, 100.0, 3.0, 10.0) == pytest.approx(6 * 3 + 6 * 25 / 10)
    assert model.sent(2, 100.0) == 100 and model.sent(4, 100.0) == 150 and model.sent(1, 100.0) == 0


def test_a_step_by_hand():
    phase = model.Phase(epochs=1, parameters=25, step=8.0)  # 100 bytes of gradients
    assert model.step_time(phase, 2, (3.0, 10.0), overlap=False) == 8 + 16
    assert model.step_time(phase, 2, (3.0, 10.0), overlap=True) == 16
    assert model.step_time(phase, 2, (3.0, 10.0), overlap=False, micro_steps=3) == 24 + 16
    assert model.step_time(phase, 1, (3.0, 10.0), overlap=True) == 8


def test_a_run_by_hand():
    phases = model.Phase(2, 25, 8.0), model.Phase(3, 5, 2.0)
    network = model.Network("two sizes", 2 * model.BATCH * 10 + 5, phases, cut_seconds=7.0)  # ten steps on two GPUs
    at = 3.0, 10.0
    assert model.run_time(network, True, 2, at) == 2 * 10 * (8 + 16) + 3 * 10 * (2 + 6 + 2) + 7
    assert model.run_time(network, False, 2, at) == 5 * 10 * (8 + 16)
    assert model.saved(network, 2, at, False) == pytest.approx(1 - 787 / 1200)
    assert model.bytes_of_run(network, True, 2) == 10 * (2 * 100 + 3 * 20)


def test_steps_end_where_both_ways_to_scale_meet():
    for one in FOUND["networks"].values():
        last = one["scaling"][-1]
        assert last["gpus"] == 64 and last["whole_step_ms"] == last["whole_global_step_ms"]
        for row in one["scaling"]:
            assert row["small_step_ms"] < row["whole_step_ms"]


def test_the_file_follows_from_what_was_measured():
    assert FOUND["assumed"] == model.ASSUMED
    assert json.loads(json.dumps(scale.simulate(FOUND["sizes"]))) == {
        key: FOUND[key] for key in ("networks", "saved_by_forwards_per_step")
    }
    assert scale.logged_run()[1] == FOUND["log"]
    assert scale.full_size() == FOUND["full_size"]


@pytest.mark.parametrize("name", ["mobilenet_v2"])
def test_the_sizes_are_counted_on_the_networks(name):
    pytest.importorskip("torchvision")
    assert scale.compacted(name) == FOUND["sizes"][name]


def test_on_one_gpu_the_model_gives_the_logged_run_back():
    rows = [json.loads(line) for line in (ROOT / scale.LOG).read_text().splitlines()]
    network, _ = scale.logged_run()
    logged = sum(row["seconds"] for row in rows[1:])  # the first epoch compiles for both
    # What is left are evaluations and checkpoints, which the model leaves out.
    assert 0.9 * logged < model.run_time(network, True, 1, model.link()) < logged
    assert [phase.epochs for phase in network.phases] == [56, 8, 8, 8, 8, 8, 121]


def test_another_network_than_the_one_timed_is_refused():
    sizes = {**FOUND["sizes"], "resnet50": {**FOUND["sizes"]["resnet50"], "multiply_adds_small": 1}}
    with pytest.raises(AssertionError, match="not the network that was timed"):
        scale.simulate(sizes)


# --- the page


def test_the_page_has_the_figures_of_the_file():
    text = text_of("docs/scale.md")
    assert page.fill(text, FOUND) == text, "run: python benchmarks/scale.py"
    changed = json.loads(json.dumps(FOUND))
    changed["networks"]["ResNet-50, ImageNet"]["links"][0]["saved"] += 0.1
    assert page.fill(text, changed) != text


def test_the_page_says_what_it_is_and_names_every_assumption():
    text = text_of("docs/scale.md")
    assert "**This is a simulation.**" in text and "nothing here ran on 64 GPUs" in text
    assert "What would show it wrong" in text
    rows = {row.split(" | ")[0].removeprefix("| "): row for row in text.splitlines() if row.startswith("| ")}
    assumed = FOUND["assumed"]
    for row, numbers in {
        "β, bytes a second that a GPU sends": [assumed["beta_gb_per_s"], *assumed["betas_gb_per_s"][::3]],
        "α, latency of a message": [assumed["alpha_us"], *assumed["alphas_us"][::2]],
        "a training step, in forward passes": [assumed["forwards_per_step"], *assumed["forwards_range"][::2]],
        "an ImageNet run": [assumed["imagenet_epochs"]],
    }.items():
        for number in numbers:
            assert re.search(rf"\b{number:g}\b", rows[row]), (row, number)


def test_no_measured_number_hides_in_prose():
    # The range of assumptions, in their table.
    assert set(re.findall(r"\d+\.\d+|\d+ ?%", prose("docs/scale.md"))) == {"1.25", "2.5"}


def test_what_the_prose_says_in_words():
    log, steps = FOUND["log"], [phase["step"] for phase in FOUND["networks"]["MobileNetV2, CIFAR-100"]["phases"]]
    assert len(log["cuts_at_epochs"]) == 6  # "shrank six times"
    assert log["multiply_adds"][-1] / log["multiply_adds"][0] == pytest.approx(0.25, abs=0.02)  # "a quarter"
    assert round(steps[-1] / steps[0], 2) == 0.76  # "three quarters of the time"
    assert log["cuts_at_epochs"][-1] / log["epochs_planned"] == 0.4  # "two fifths of its epochs"
    assert all(
        row["small_run_h"] > row["whole_run_h"] for row in FOUND["networks"]["MobileNetV2, CIFAR-100"]["scaling"]
    )


def test_the_figure_is_the_same_every_time(tmp_path):
    pytest.importorskip("matplotlib")
    first, second = (page.draw(FOUND, tmp_path / name) for name in ("a", "b"))
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]
    assert b"<dc:date>" not in first[1].read_bytes() and b"matplotlib.org" not in first[1].read_bytes()
    other = json.loads(json.dumps(FOUND))
    other["networks"]["ResNet-50, ImageNet"]["phases"][0]["step"] *= 2
    assert page.draw(other, tmp_path / "c")[1].read_bytes() != first[1].read_bytes()
    assert all(Path(f"{page.FIGURE}{suffix}").is_file() for suffix in (".png", ".svg"))
