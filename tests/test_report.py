"""The report's data and its page, without a browser."""

import base64
import dataclasses
import hashlib
import html
import json
import os
import random
import re
import sys
from math import nan
from pathlib import Path

import pytest
import torch
from report_helpers import LATENCY, add_event, change_json, copy_run, interrupt, make_run, report
from torch import nn
from typer.testing import CliRunner

import narrowgate as ng
import narrowgate.report
from narrowgate.cli import build_app
from narrowgate.flow.cuts import Edit
from narrowgate.flow.plan import Plan
from narrowgate.report import ReportError, write_report
from narrowgate.report.data import Constants, Histograms, Layer, Numbers, RunData, clean, describe, facts
from narrowgate.report.folder import plan_parts
from narrowgate.report.page import render
from narrowgate.report.read import fronts, read_run, read_runs
from narrowgate.reproduce.record import WHAT, collect, write_record
from narrowgate.train.recipe import Recipe, RecipeError


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "first")


@pytest.fixture
def run(trained, tmp_path):
    return copy_run(trained, tmp_path / "run")


def data_of(page):
    """What the page's script reads."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_a_finished_run_is_told_as_its_files_tell_it(trained):
    found = read_run(trained)
    result = json.loads((trained / "result.json").read_text())
    plan = json.loads((trained / "small" / "plan.json").read_text())
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert (found.finished, found.done, found.epochs, found.name) == (True, 5, 5, "first")
    assert found.before.parameters == result["parameters_full"] > found.after.parameters == result["parameters"]
    assert found.after.multiply_adds == result["multiply_adds"] < found.before.multiply_adds
    assert found.after.accuracy == pytest.approx(result["accuracy"], rel=1e-5)
    assert found.course["parameters"] == [row["parameters"] for row in rows]
    assert found.course["epoch"] == [1, 2, 3, 4, 5]
    assert found.events == [(row["epoch"], row["event"]) for row in rows if row["event"]] != []
    assert all(" parameters in " in event for _, event in found.events)
    assert [(layer.name, layer.kept, layer.total) for layer in found.layers] == [
        (row["layer"], row["kept"], row["total"]) for row in plan["rows"]
    ]
    assert sum(entry.folded for entry in found.constants) == sum(len(edit["folded"]) for edit in plan["edits"].values())
    assert found.has_plan and found.walls == []
    assert found.network == "resnet (depth 11, dropout 0.0)" and found.method.startswith("exponential gates, l1")
    assert found.facts["torch version"] and found.facts["Gates closed by training"] == f"{result['closed']:.2%}"
    assert "images.npz" not in found.recipe and 'path = ""' in found.recipe  # where the data lay stays at home


class Walled(nn.Module):
    """Two convolutions around a norm that counts every channel; the first one's dead channels are constants there."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 8, 1), nn.GroupNorm(2, 8), nn.Conv2d(8, 6, 1)
        self.bn, self.head = nn.BatchNorm2d(6), nn.Conv2d(6, 4, 1)
        with torch.no_grad():
            self.last.weight[:2] = 0
            self.last.bias[:2] = 0
            self.bn.bias += 1

    def forward(self, x):
        return self.head(self.bn(self.last(self.norm(self.first(x)))))


def test_a_report_says_who_taught_a_run():
    teacher = {"model": {"name": "resnet", "options": {}}, "parameters": 12345, "accuracy": 0.5}
    found = facts({"closed": 0.1, "device": "cpu", "teacher": teacher}, {}, 0, None)
    assert found["Learned from"] == "resnet, 12,345 parameters, 50.00%"
    assert "Learned from" not in facts({"closed": 0.1, "device": "cpu", "teacher": None}, {}, 0, None)


def of_recipe(*settings):
    return describe(Recipe.from_toml("model.name = 'resnet'\ndata.source = 'npz'\ntrain.epochs = 1", settings).tables())


def test_a_method_without_a_penalty_is_told_by_its_share():
    assert of_recipe("penalty.strength=0.1")["method"] == "exponential gates, l1 penalty, strength 0.1"
    assert of_recipe("method.name=magnitude")["method"] == "filter-l1 gates, no penalty, 50% closed at the end"


def test_accuracies_by_epoch_are_of_the_test_images_only_where_that_is_known():
    assert [of_recipe(f"data.source={source}")["held_out"] for source in ("npz", "folder")] == ["test", "held-out"]
    assert of_recipe("data.source=folder", "data.validation=10")["held_out"] == "validation"


def test_constants_and_walls_of_a_plan():
    parts = plan_parts(ng.plan(Walled().eval(), torch.rand(2, 3, 5, 5)))
    (wall,) = parts["walls"]
    assert (wall.layers, parts["has_plan"]) == (("norm",), True) and "norm" in wall.op and "channels" in wall.why
    assert [(entry.layer, entry.folded) for entry in parts["constants"]] == [("head", 2)]
    assert [(layer.name, layer.kept, layer.total) for layer in parts["layers"]][:2] == [("first", 8, 8), ("last", 4, 6)]
    edit = Edit("x", "x.weight", None, 1, False, rows={0: 0.0, 1: 2.0}, folded={3: 1.0}, carried={4: 1.0, 5: 2.0})
    zero = Edit("y", "y.weight", None, 1, False, rows={0: 0.0})
    made = Plan("aligned", "exact", {}, {"x": edit, "y": zero}, [], [], {}, 1, 1)
    assert plan_parts(made)["constants"] == [Constants("x", folded=1, carried=2, rows=1)]
    assert plan_parts(None) == {"layers": [], "constants": [], "walls": [], "has_plan": False}


def test_histograms_count_every_gate_at_every_time(trained):
    gates = read_run(trained).gates
    assert gates.epochs == (1, 2, 3, 4, 5)
    lines = [json.loads(line) for line in (trained / "gates.jsonl").read_text().splitlines()]
    for line, snapshot in zip(lines, gates.counts, strict=True):
        for name, (closed, first, *counts) in zip(gates.layers, snapshot, strict=True):
            whole = [0] * first + counts
            assert [closed, *whole, *[0] * (len(gates.edges) - len(whole))] == line["layers"][name]
    assert any(closed for closed, *_ in gates.counts[-1])
    left = [sum(sum(layer) - layer[1] for layer in snapshot) for snapshot in gates.counts]
    assert left[0] == sum(gates.totals) > left[-1]  # cuts took gates away


def test_an_unfinished_run_says_so(run):
    found = read_run(interrupt(run, 3))
    assert (found.finished, found.done, found.epochs) == (False, 3, 5)
    assert found.before == Numbers(None, max(found.course["parameters"]), max(found.course["multiply_adds"]))
    assert found.after.parameters == found.course["parameters"][2]
    assert found.gates.epochs == (1, 2, 3)
    assert (found.layers, found.has_plan, found.latency, found.curve) == ([], False, None, None)
    assert data_of(render([found]))["runs"][0]["finished"] is False


def test_a_run_without_an_epoch(run):
    interrupt(run, 0)
    (run / "gates.jsonl").unlink()
    found = read_run(run)
    assert (found.done, found.after, found.gates) == (0, Numbers(None, None, None), None)
    assert data_of(render([found]))["runs"][0]["course"]["epoch"] == []


def test_numbers_that_are_none(run):
    change_json(run / "result.json", max_error=nan, accuracy=nan)
    found = read_run(run)
    assert found.after.accuracy is None
    assert data_of(render([found]))["runs"][0]["after"]["accuracy"] is None


def test_a_snapshot_with_other_bins_is_left_out(run):
    lines = (run / "gates.jsonl").read_text().splitlines()
    other = json.dumps({"epoch": 1, "edges": [0.5], "layers": {"x": [1, 2]}})
    (run / "gates.jsonl").write_text("\n".join([other, *lines[1:]]) + "\n")
    gates = read_run(run).gates
    assert gates.epochs == (2, 3, 4, 5) and "x" not in gates.layers


@pytest.mark.parametrize(("name", "which"), [("gates.jsonl", "line 2"), ("metrics.jsonl", "line 2")])
def test_damaged_lines_are_told(run, name, which):
    lines = (run / name).read_text().splitlines()
    (run / name).write_text("\n".join([lines[0], "%&$", *lines[2:]]) + "\n")
    with pytest.warns(UserWarning, match=rf"{name}: {which} can't be read"):
        read_run(run)


def test_a_last_line_that_was_cut_off_is_passed_over(run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 6, "lo')
    read_run(run)  # a warning would be an error here


def test_nothing_of_a_run_is_read_as_html(trained, tmp_path):
    hostile = "<img src=x onerror=hacked()>"
    folder = copy_run(trained, tmp_path / hostile)
    event = "</script><script>hacked()</script><!-- & 'x' \"y\""
    add_event(folder, event)
    page = report(folder, out=tmp_path / "page.html")
    assert "<img" not in page and "hacked()</script>" not in page and page.count("<script") == 2
    assert f"<title>{html.escape(hostile)}" in page
    (found,) = data_of(page)["runs"]
    assert found["name"] == hostile and found["events"][0] == [1, event]


def test_the_page_asks_for_nothing_and_runs_only_its_own_script(trained, tmp_path):
    page = report(trained, out=tmp_path / "page.html")
    addresses = set(re.findall(r"\w+://[^\s\"'<]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, which no browser asks for
    (script,) = re.findall(r'<script type="module">(.*?)</script>', page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in page
    parts = Path(narrowgate.report.__file__).parent / "parts"
    scripts = "".join(path.read_text() for path in parts.glob("*.js"))
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", scripts)
    assert all(path.read_text().strip() in script for path in parts.glob("*.js"))


def test_latency_and_curve_are_found_whatever_their_files_are_called(run):
    (run / "times.json").write_text(json.dumps(LATENCY))
    record = collect(run)
    record["curve"] = {"threshold": [0.0, 1e-4], "parameters": [9, None], "pruned": [0.1, 1.0], "accuracy": [0.9, nan]}
    write_record(run / "any.json", record)
    (run / "notes.json").write_text('["somebody else\'s"]')
    (run / "torn.json").write_text('{"timings": [')
    (run / "folder.json").mkdir()
    (run / "gone.json").symlink_to("nowhere")
    (run / "old.json").write_text(json.dumps({**LATENCY, "format": 7}))
    found = read_run(run)
    assert [row["verdict"] for row in found.latency["timings"]] == ["faster", "faster", "slower"]
    assert found.latency["devices"] == {"cpu": "some processor"}
    assert found.curve == {**record["curve"], "accuracy": [0.9, None]}


def test_a_record_is_a_run_that_knows_less(trained, tmp_path):
    write_record(tmp_path / "kept.json", collect(trained))
    folder, record = read_run(trained), read_run(tmp_path / "kept.json")
    assert record.name == "kept" and record.gates is None and not record.has_plan
    for key in ("finished", "done", "epochs", "network", "data", "method", "before", "after", "events", "recipe"):
        assert getattr(record, key) == getattr(folder, key), key
    assert [(layer.name, layer.kept) for layer in record.layers] == [
        (layer.name, layer.kept) for layer in folder.layers
    ]
    assert record.course["parameters"] == folder.course["parameters"]
    assert record.course["accuracy"] == pytest.approx(folder.course["accuracy"], abs=1e-5)
    assert record.facts == folder.facts | {"Time": record.facts["Time"]}
    render([folder, record])


def test_a_record_knows_the_accuracy_on_validation_images(run, tmp_path):
    change_json(run / "result.json", validation_accuracy=0.5)
    write_record(tmp_path / "kept.json", collect(run))
    assert read_run(tmp_path / "kept.json").facts["Accuracy on validation images"] == "50.00%"


@pytest.mark.parametrize("changes", [{"architecture": {"conv": [1]}}, {"events": {"x": "cut"}}, {"course": None}])
def test_a_damaged_record_is_named(run, tmp_path, changes):
    path = tmp_path / "r.json"
    write_record(path, collect(run))
    change_json(path, **changes)
    with pytest.raises(ReportError, match=r"r\.json can't be read as a record"):
        read_run(path)


def test_records_of_array_files_are_of_different_data(trained, tmp_path):
    for name in ("mnist", "cifar100"):
        write_record(tmp_path / f"{name}.json", collect(trained, dataset=name))
    found = read_runs([tmp_path / "mnist.json", tmp_path / "cifar100.json"])
    assert [run.data for run in found] == ["mnist", "cifar100"] and fronts(found, "parameters") == []


def test_the_page_does_not_say_where_things_lie(run):
    recipe = (run / "recipe.toml").read_text()
    (run / "recipe.toml").write_text(re.sub(r"(?m)^run = .*", 'run = "/home/me/runs/teacher"', recipe))
    found = read_run(run).recipe
    assert 'run = "teacher"' in found and 'path = ""' in found


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have names of letters alone")
def test_a_name_of_any_bytes(trained, tmp_path):
    made = copy_run(trained, tmp_path / os.fsdecode(b"a\xff"))
    assert "<title>a? · narrowgate</title>" in report(made, out=tmp_path / "page.html")


def test_runs_of_one_name_are_told_apart(trained, tmp_path):
    for place in ("left", "right"):
        copy_run(trained, tmp_path / place / "run")
    copy_run(trained, tmp_path / "alone")
    names = [run.name for run in read_runs([tmp_path / "left/run", tmp_path / "right/run", tmp_path / "alone"])]
    assert names == ["left/run", "right/run", "alone"]


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda run: (run / "recipe.toml").unlink(), r"run is not a run, it has no recipe\.toml: give .* runs/NAME"),
        (lambda run: (run / "result.json").write_text("{"), r"result\.json is not JSON"),
        (lambda run: (run / "result.json").write_text("[]"), r"result\.json holds a list"),
        (lambda run: change_json(run / "result.json", parameters=None), r"can't be read as a run \(KeyError.*param"),
        (lambda run: (run / "small/plan.json").write_text("{}"), r"plan\.json: not a narrowgate plan"),
        (lambda run: (run / "recipe.toml").write_text("[modle]"), r"modle"),
    ],
)
def test_what_is_wrong_is_said(run, damage, message):
    read_run(run)
    damage(run)
    with pytest.raises((ReportError, RecipeError), match=message):
        read_run(run)


def test_a_folder_of_runs_stands_for_them(run, tmp_path):
    for name in ("sweep/strength=0.2", "sweep/strength=0.1", "alone"):
        copy_run(run, tmp_path / "runs" / name)
    (tmp_path / "runs" / "sweep" / "other").mkdir()
    found = read_runs([tmp_path / "runs" / "alone", tmp_path / "runs" / "sweep"])
    assert [each.name for each in found] == ["alone", "strength=0.1", "strength=0.2"]


def test_a_path_that_is_no_run(run, tmp_path):
    with pytest.raises(ReportError, match=r"there is no .*nowhere"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(ReportError, match=r"holds some \(run\): give .*/\*/$"):
        read_run(tmp_path)
    with pytest.raises(ReportError, match="neither a run's folder nor a file that narrowgate record wrote"):
        read_run(run / "result.json")
    with pytest.raises(ReportError, match="neither a run's folder nor a record"):
        read_run(run / "recipe.toml")
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "sweep.json").write_text("{}")
    with pytest.raises(ReportError, match="a folder that narrowgate train wrote"):
        read_run(tmp_path / "records")
    (tmp_path / "records" / "l1-seed0.json").write_text(json.dumps({"what": WHAT}))
    with pytest.raises(ReportError, match=r"but holds records: give their files, .*records/\*\.json"):
        read_run(tmp_path / "records")
    with pytest.raises(ReportError, match=r"is a folder: .*report\.html"):
        write_report([run], tmp_path)
    with pytest.raises(ReportError, match="at least one"):
        write_report([], tmp_path / "page.html")


def made_up(name="x", accuracy=0.9, parameters=10, finished=True, data="digits", multiply_adds=10, **changes):
    run = RunData(
        name=name, finished=finished, done=1, epochs=1, network="n", data=data, method="m", held_out="test",
        before=Numbers(0.9, 100, 100), after=Numbers(accuracy, parameters, multiply_adds), facts={}, course={},
        events=[], layers=[], constants=[], walls=[], has_plan=False, gates=None, latency=None, curve=None, recipe="",
    )  # fmt: skip
    return dataclasses.replace(run, **changes)


def test_numbers_are_not_rounded_twice():
    accuracy = clean(581 / 599)  # 96.99499 %, which six digits would make 96.995
    assert f"{accuracy:.2%}" == f"{581 / 599:.2%}" == "96.99%"


def test_the_front_is_what_no_other_run_beats():
    runs = [
        made_up(accuracy=0.90, parameters=50, multiply_adds=1),
        made_up(accuracy=0.80, parameters=10, multiply_adds=9),
        made_up(accuracy=0.85, parameters=50, multiply_adds=5),  # larger and worse than the first
        made_up(accuracy=0.80, parameters=20, multiply_adds=9),  # larger and no better than the second
        made_up(accuracy=0.99, parameters=5, finished=False),
        made_up(accuracy=None, parameters=5),
        made_up(accuracy=0.95, parameters=60, multiply_adds=2),
        made_up(accuracy=0.10, parameters=1, data="alone"),
    ]
    assert fronts(runs, "parameters") == [[1, 0, 6]]
    assert fronts(runs, "multiply_adds") == [[0, 6]]
    assert fronts([*runs, runs[0]], "parameters") == [[1, 0, 8, 6]]  # as small and as good is not beaten


def test_the_page_of_a_long_run_of_a_deep_network_is_light():
    draw = random.Random(0)
    layers, snapshots, epochs = 170, 31, 240
    names = tuple(f"stages.{i // 60}.{i // 3 % 18}.conv{i % 3}" for i in range(layers))
    counts = tuple(
        tuple((draw.randrange(256), 0, *(draw.randrange(100) for _ in range(25))) for _ in names)
        for _ in range(snapshots)
    )  # every bin is used, which is as bad as it gets
    course = {key: [draw.random() for _ in range(epochs)] for key in ("accuracy", "closed", "parameters")}
    run = made_up(
        gates=Histograms(tuple(range(snapshots)), tuple(range(25)), names, (256,) * layers, counts),
        layers=[Layer(name, 256, 100, 50, "50 for other layers of the stream") for name in names],
        course=course,
    )
    assert len(render([run]).encode()) < 600_000
    assert len(render([run] * 10).encode()) < 6_000_000


def test_the_command(run, tmp_path):
    done = CliRunner().invoke(build_app(), ["report", str(run), "--out", str(tmp_path / "new/page.html")])
    assert done.exit_code == 0, done.output
    assert re.search(r"page\.html: \d+ kB", done.output) and (tmp_path / "new/page.html").is_file()
    failed = CliRunner().invoke(
        build_app(), ["report", str(run), str(tmp_path / "new"), "--out", str(tmp_path / "b.html")]
    )
    assert failed.exit_code == 2 and not (tmp_path / "b.html").exists()
    assert failed.stderr.startswith("narrowgate: ") and failed.stderr.count("\n") == 1
