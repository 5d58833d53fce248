"""The comparison of methods: its runs, its verdicts, its scripts and its page."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from engine_helpers import count, write_images
from torch import nn

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))  # where the benchmark's modules find each other

import _compare_lines as lines  # noqa: E402
import _compare_methods as methods  # noqa: E402
import _compare_page as page  # noqa: E402
import _compare_summary as summary  # noqa: E402
import compare  # noqa: E402
from _compare_methods import FAMILIES, NETWORKS, RATIO, Job  # noqa: E402
from _compare_runner import Work, WorkError  # noqa: E402

import narrowgate as ng  # noqa: E402
from narrowgate.reproduce.page import between_markers  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("data") / "28.npz", 28, train=256, test=40, classes=10)


# --- what is compared


@pytest.mark.parametrize("network", NETWORKS)
def test_all_methods_have_the_same_budget(network):
    shared = set()
    for name, method in NETWORKS[network].methods.items():
        for size in range(len(method.values)):
            recipe = methods.recipe_of(Job(network, name, size, 3), 20)
            assert recipe.train.seed == 3 and recipe.data.validation == 0
            shared.add(repr((recipe.model, recipe.data, recipe.optimizer, recipe.lr, recipe.train)))
            assert 1 <= methods.cut_epoch(Job(network, name, size, 0), 20) <= 20
    assert len(shared) == 1


@pytest.mark.parametrize("network", NETWORKS)
def test_sizes_reach_the_recipe(network):
    for name, method in NETWORKS[network].methods.items():
        recipes = {methods.recipe_of(Job(network, name, size, 0), 20).digest() for size in range(len(method.values))}
        assert len(recipes) == (1 if method.key in ("", RATIO) else len(method.values))
        assert 3 <= len(method.values) <= 5 or name == "dense"


def test_a_penalty_may_end_early_and_a_size_be_asked_for():
    early = methods.recipe_of(Job("lenet5", "narrowgate-l1", 0, 0), 20)
    assert [early.strength_schedule()(epoch) > 0 for epoch in (0, 7, 8, 19)] == [True, True, False, False]
    assert methods.recipe_of(Job("mobilenetv2", "narrowgate-l1", 1, 0), 20).budget.target == "params: 30%"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_beginning_of_the_jobs_is_fair(family):
    jobs = methods.jobs_of(family, [0, 1])
    assert len(jobs) == len(set(jobs)) == 2 * len(methods.jobs_of(family, [5]))
    everyone = {(network, name) for network in FAMILIES[family] for name in NETWORKS[network].methods}
    assert {(job.network, job.method) for job in jobs[: len(everyone)]} == everyone
    assert all(job.seed == 0 for job in jobs[: len(jobs) // 2])
    assert {job.size for job in jobs[: len(everyone)] if job.method != "dense"} == {1}
    assert methods.jobs_of(family, [0], sizes=1) == jobs[: len(everyone)]
    assert methods.middle_first(4) == [1, 2, 0, 3] and methods.middle_first(3) == [1, 0, 2]


def test_the_rivals_are_all_there():
    everyone = {name for network in NETWORKS.values() for name in network.methods}
    from narrowgate.rivals.methods import METHODS

    ours = {"narrowgate-l1", "narrowgate-bounded-l1"}
    assert everyone == {*METHODS, "group-lasso-steps", "dense", "torch-pruning", *ours} - {"bounded-l1"}


# --- runs


def job_of(network, method):
    return Job(network, method, methods.middle_first(len(NETWORKS[network].methods[method].values))[0], 0)


def run(method, images, folder, network="lenet5", epochs=3):
    from _compare_job import Budget, run_job

    return run_job(job_of(network, method), Budget(epochs, images=200, validation=0), images, folder)


@pytest.mark.slow
def test_magnitude_changes_the_network_when_it_cuts_and_its_removal_does_not(images, tmp_path):
    record, small, _ = run("magnitude", images, tmp_path)
    assert record["parameters"] == count(small) < 0.2 * record["parameters_full"]
    assert record["removal"]["whole_step"]["largest_change"] > 1e-3
    assert record["removal"]["zeros_only"]["largest_change"] < 1e-4
    assert record["removal"]["zeros_only"]["predictions_changed"] == 0
    assert small(torch.rand(1, 1, 28, 28)).shape == (1, 10) and record["cut_after_epochs"] == 2


@pytest.mark.slow
def test_torch_pruning_cuts_the_same_network(images, tmp_path):
    pytest.importorskip("torch_pruning")
    record, small, _ = run("torch-pruning", images, tmp_path)
    assert record["parameters"] == count(small) < 0.2 * record["parameters_full"]
    assert "zeros_only" not in record["removal"] and record["removal"]["whole_step"]["images"] == 40


def test_a_network_is_kept_by_its_shapes_where_no_plan_made_it(tmp_path):
    from _compare_job import plan_by_shapes

    def net(width):
        deep = nn.Conv2d(width, width, 3, groups=width)
        return nn.Sequential(nn.Conv2d(3, width, 1), deep, nn.BatchNorm2d(width), nn.Conv2d(width, 4, 1)).eval()

    full, small, x = net(8), net(5), torch.rand(2, 3, 6, 6)
    ng.save(small, plan_by_shapes(full, small), tmp_path / "small")
    kept = ng.load(tmp_path / "small", lambda: net(8)).eval()
    assert torch.equal(kept(x), small(x)) and kept[1].groups == 5 and count(kept) == count(small) < count(full)


def test_every_method_starts_from_the_same_weights(images, tmp_path):
    from _compare_job import Alone

    from narrowgate.train.data import load_data
    from narrowgate.train.feed import Place
    from narrowgate.train.show import Show
    from narrowgate.train.training import Training

    starts = []
    for name in NETWORKS["lenet5"].methods:
        recipe = methods.recipe_of(job_of("lenet5", name), 2)
        data = load_data(recipe.data, images)
        training = Training(recipe, tmp_path, data, Place(torch.device("cpu")), Alone(), Show(None, 2, quiet=True))
        training.feed.start(0)
        starts.append((training.parts.model.conv2.weight.detach().clone(), training.feed.batch()[0]))
    for weights, batch in starts[1:]:
        assert torch.equal(weights, starts[0][0]) and torch.equal(batch, starts[0][1])


@pytest.mark.slow
def test_mobilenet_takes_the_same_way(tmp_path):
    path = tmp_path / "32.npz"
    import numpy as np

    draw = np.random.default_rng(0)
    arrays = {f"x_{part}": draw.integers(0, 255, (size, 32, 32, 3), dtype=np.uint8) for part, size in SIZES.items()}
    np.savez(path, **arrays, **{f"y_{part}": np.arange(size) % 100 for part, size in SIZES.items()})
    record, small, _ = run("magnitude", str(path), tmp_path / "run", "mobilenetv2")
    assert record["parameters"] == count(small) < record["parameters_full"]


SIZES = {"train": 200, "test": 100}


@pytest.mark.slow
def test_calls_go_on_where_they_were_and_a_deadline_stops_them(images, tmp_path, capsys, monkeypatch):
    base = ["compare.py", "--network", "lenet5", "--epochs", "2", "--seeds", "0", "--sizes", "1"]
    base += ["--methods", "magnitude", "--work", str(tmp_path / "work")]
    call = [*base, "--data", images, "--workers", "2", "--seconds", "0.05"]

    def main(*arguments):
        monkeypatch.setattr(sys, "argv", list(arguments))
        compare.main()
        return capsys.readouterr().out

    assert "0 runs done now" in main(*call, "--deadline", "0") and not (tmp_path / "work" / "jobs").exists()
    assert "3 runs done now, 3 of 3 in all" in (first := main(*call)) and "all done" in first
    assert "0 runs done now, 3 of 3 in all" in main(*call)
    (tmp_path / "work" / "jobs" / "lenet5_dense_0_seed0.json").unlink()
    main(*base, "--collect", "--out", str(tmp_path / "out"))
    made = json.loads((tmp_path / "out" / "compare_lenet5.json").read_text())
    assert list(made["missing"]) == ["lenet5_dense_0_seed0"] and made["runs"] == 2
    (point,) = made["networks"]["lenet5"]["points"]
    assert point["latency"]["batch 1"]["ratio"][1] > 0 and made["lines"]["with_narrowgate"] > 0
    text = (tmp_path / "out" / "compare_lenet5.md").read_text()
    assert "Not run: `lenet5_dense_0_seed0`" in text and "| magnitude | close 0.8 |" in text
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".json", ".md", ".png", ".svg"}
    with pytest.raises(SystemExit, match="choose another folder"):
        main(*call, "--epochs", "3")
    (tmp_path / "work" / "jobs" / "lenet5_magnitude_1_seed0.json").unlink()
    main(*call)  # both again
    (tmp_path / "work" / "jobs" / "lenet5_magnitude_1_seed0.json").unlink()
    result = tmp_path / "out" / "compare_lenet5.json"
    point["date"] = "2026-01-02"  # as one that was kept before
    result.write_text(json.dumps(made))
    main(*base, "--collect", "--keep", "--out", str(tmp_path / "out"))
    kept = json.loads((tmp_path / "out" / "compare_lenet5.json").read_text())
    assert [point["method"] for point in kept["networks"]["lenet5"]["points"]] == ["dense", "magnitude"]
    assert kept["networks"]["lenet5"]["points"][1] == point and kept["runs"] == 3 and not kept["missing"]
    assert f"Runs are of 2026-01-02 and {made['about']['date'][:10]}." in result.with_suffix(".md").read_text()
    with pytest.raises(SystemExit, match="to keep points of: leave --keep out"):
        main(*base, "--collect", "--keep", "--out", str(tmp_path / "nothing"))
    Work(tmp_path / "other").settings({**made["settings"], "epochs": 3})
    with pytest.raises(SystemExit, match="has epochs = 2, the new runs 3: nothing is kept"):
        main(*base, "--collect", "--keep", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "other"))


def test_a_folder_of_other_runs_is_refused(tmp_path):
    Work(tmp_path).settings({"epochs": 2})
    Work(tmp_path).settings({"epochs": 2})
    with pytest.raises(WorkError, match="holds runs with"):
        Work(tmp_path).settings({"epochs": 3})


# --- verdicts


def point(accuracy, parameters, method="l0", deviation=None):
    return {
        "method": method,
        "value": 0.0,
        "accuracy": accuracy,
        "parameters": parameters,
        "accuracy_deviation": deviation,
    }


def test_fewer_parameters_at_equal_accuracy_wins():
    ours = [point(0.99, 100), point(0.98, 50)]
    found = summary.duel([point(0.99, 200), point(0.98, 100)], ours, 0.0)
    assert found["verdict"] == "narrowgate" and found["ratio"] == pytest.approx(0.5)
    assert (found["we_keep_fewer_at"], found["they_keep_fewer_at"]) == (2, 0)


def test_a_loss_is_a_loss():
    found = summary.duel([point(0.99, 40)], [point(0.99, 100), point(0.98, 50)], 0.0)
    assert found["verdict"] == "rival" and found["ratio"] == pytest.approx(2.5) and found["they_keep_fewer_at"] == 2
    better = summary.duel([point(0.995, 40)], [point(0.99, 30)], 0.0)
    assert better["verdict"] == "mixed" and better["at_their_accuracy"][0]["by"] is None
    assert summary.duel([point(0.995, 40)], [point(0.99, 30)], 0.006)["verdict"] == "narrowgate"


def test_one_lost_point_is_no_win():
    found = summary.duel([point(0.99, 200), point(0.97, 10)], [point(0.99, 100)], 0.0)
    assert found["verdict"] == "mixed" and found["we_keep_fewer_at"] == 1
    assert summary.duel([], [point(0.99, 1)], 0.0)["verdict"] == "not compared"


def test_noise_is_the_median_deviation():
    points = [point(0.9, 1, deviation=d) for d in (0.001, 0.002, 0.5, None)]
    assert summary.noise_of(points) == 0.002 and summary.noise_of(points[3:]) is None


def test_a_front_has_no_beaten_points():
    best, beaten, small = point(0.99, 100), point(0.98, 120), point(0.9, 10)
    assert summary.front([best, beaten, small]) == [best, small]


def test_means_over_seeds_leave_failures_out_and_name_them():
    change = {"largest_change": 1.0, "predictions_changed": 2, "images": 10}
    one = {
        "accuracy": 0.9,
        "accuracy_after_removal": 0.8,
        "parameters": 10,
        "parameters_full": 100,
        "multiply_adds": 5,
        "multiply_adds_full": 50,
        "removal": {"whole_step": change, "scale": 1.0},
        "seconds": 1.0,
        "cut_after_epochs": 1,
    }
    runs = {
        Job("lenet5", "l0", 1, 0): one,
        Job("lenet5", "l0", 1, 1): one | {"accuracy": 0.8, "parameters": 30},
        Job("lenet5", "l0", 1, 2): {"failure": "collapsed"},
    }
    (found,) = summary.points_of("lenet5", runs, {})
    assert found["accuracy"] == pytest.approx(0.85) and found["parameters"] == 20 and found["seeds"] == [0, 1]
    assert found["accuracy_deviation"] == pytest.approx(0.0707, abs=1e-4) and found["failed_seeds"] == [2]


# --- lines of code


def snippet(name):
    spec = importlib.util.spec_from_file_location(f"snippet_{name}", lines.FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SHARED_OUT = ("with_torch_pruning", "rival_magnitude", "rival_slimming", "rival_ista")  # smaller after a few steps


@pytest.mark.parametrize("name", ["plain", *lines.names()])
def test_every_script_runs(name):
    """Gates that have to close by themselves need more steps than a test has: tests of the engine see to that."""
    if name == "with_torch_pruning":
        pytest.importorskip("torch_pruning")
    labels = torch.arange(256) % 10
    images = torch.randn(10, 1, 28, 28)[labels] + 0.5 * torch.randn(256, 1, 28, 28)
    options = {"strength": 0.02} if name == "rival_ista" else {}
    small = snippet(name).train(images, labels, 6, **options)
    assert isinstance(small, nn.Module) and small(images[:3]).shape == (3, 10) and not small.training
    assert not [module for module in small.modules() if "gated" in type(module).__module__]
    dense = count(snippet("plain").train(images[:2], labels[:2], 0))
    assert count(small) < 0.8 * dense if name in SHARED_OUT else count(small) == dense


def test_lines_are_counted_without_words_about_them():
    head = '"""Doc\nstring."""\n\nimport a  # why\n\n\n'
    source = head + 'def f(x):\n    """Says."""\n    # not code\n    return {\n        x\n    }\n'
    assert lines.code_lines(source) == ["import a", "def f(x):", "    return {", "        x", "    }"]
    assert lines.code_lines('x = """a\nb"""\n') == ['x = """a', 'b"""']


def test_every_method_has_a_script():
    wanted = {name.replace("-", "_") for network in NETWORKS.values() for name in network.methods}
    wanted -= {"dense", "narrowgate_l1", "narrowgate_bounded_l1", "torch_pruning"}
    assert set(lines.names()) == {"with_narrowgate", "with_torch_pruning", *(f"rival_{name}" for name in wanted)}
    assert all(0 < count < 20 for count in lines.lines_added().values())


# --- the page


def test_the_page_is_up_to_date_with_the_results():
    text = page.PAGE.read_text(encoding="utf-8")
    assert between_markers(text, page.blocks()) == text, "run: python benchmarks/compare.py --network NAME --collect"


def test_a_page_without_results_says_so_and_needs_its_markers(tmp_path):
    found = page.blocks(tmp_path)
    assert found["lenet5"] == found["mobilenetv2"] == "No run yet.\n"
    with pytest.raises(ValueError, match="0 places for 'lines'"):
        between_markers("text", found)
