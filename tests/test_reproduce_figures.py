"""The figures: all are drawn, with and without runs, and the same data gives the same bytes."""

import hashlib
import sys

import pytest

pytest.importorskip("matplotlib")

from test_reproduce import RESULTS, ROOT, run

from narrowgate.reproduce.figures import draw_all
from narrowgate.reproduce.paper import Kind
from narrowgate.reproduce.runs import load_runs

CURVE = {"threshold": [0.0, 1e-4, 0.1], "pruned": [0.5, 0.6, 1.0], "accuracy": [0.7, 0.7, 0.01]}
RUNS = [run(curve=CURVE), run(kind=Kind("l1", "lin"), config="lin", curve=CURVE), run(network="resnet164")]
RUNS += [run(data="imagenet", network="resnet50"), run(data="imagenet", network="resnet50", kind=Kind("none", "none"))]


def digests(paths):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def test_the_same_runs_give_the_same_bytes_and_others_do_not(tmp_path):
    first, second, empty = (draw_all(runs, tmp_path / name) for runs, name in ((RUNS, "a"), (RUNS, "b"), ([], "c")))
    assert len(first) == 8 and digests(first) == digests(second)
    changed = {name for name, digest in digests(first).items() if digests(empty)[name] != digest}
    assert changed == {p.name for p in first if not p.name.startswith("fig1")}


def test_no_date_and_no_version_in_the_files(tmp_path):
    for path in draw_all([], tmp_path):
        assert b"matplotlib.org" not in path.read_bytes() and b"<dc:date>" not in path.read_bytes()


def test_the_pages_figures_are_there():
    names = {path.name for path in (ROOT / "docs" / "img").glob("fig*")}
    assert {f"fig{i}" for i in range(1, 5)} <= {name.partition("-")[0] for name in names}
    assert len(names) == 8 and load_runs(RESULTS)


def test_tables_need_no_matplotlib():
    import subprocess

    code = "import sys, narrowgate.reproduce.command; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
