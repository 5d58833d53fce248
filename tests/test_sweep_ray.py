"""One sweep on a real Ray: two workers, one of them killed, then the sweep itself, and resumed on a cluster."""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from engine_helpers import LENET, outcome, rows, train, write_images
from rich.console import Console

from narrowgate.sweep import command
from narrowgate.sweep.folder import Swept, begin, held, outcomes
from narrowgate.sweep.show import Show
from narrowgate.sweep.space import Range, SweepError, Trial, make_trials, read_axis
from narrowgate.sweep.trial import Job, run_trial
from narrowgate.train.recipe import Recipe, RecipeError

ray = pytest.importorskip("ray", reason='Ray is not installed: pip install ".[sweep]"')
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes are killed with SIGKILL here")
# Ray's workers are nice, and get next to nothing beside the other tests.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
EPOCHS = 8
GOOD = [f"name=lenet5,seed={seed}" for seed in (0, 1, 2)]
BAD = [f"name=lenet6,seed={seed}" for seed in (0, 1, 2)]
OVER = ("--over", "model.name=lenet5,lenet6", "--over", "seed=0,1,2", "--set", f"train.epochs={EPOCHS}")


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """A sweep of six trials, three of which can't work: what it printed and left, before and after the kills."""
    home = tmp_path_factory.mktemp("sweep")
    (home / "lenet.toml").write_text(LENET)
    data, folder = write_images(home / "28.npz", 28), home / "out"
    base = [sys.executable, "-m", "narrowgate", "sweep", str(home / "lenet.toml"), "--data", data, "--out", str(folder)]
    base += [*OVER, "--workers", "2", "--cpus-per-trial", "0.5"]
    printed = home / "printed.txt"
    with printed.open("w") as file:
        first = subprocess.Popen(
            base, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    try:
        wait_for(lambda: epochs(folder / GOOD[0]) >= 2, first, printed)
        os.kill(int((folder / GOOD[0] / ".lock").read_text()), signal.SIGKILL)
        wait_for(lambda: (folder / GOOD[1] / "result.json").exists(), first, printed)
        wait_for(lambda: epochs(folder / GOOD[2]) >= 1 and "died" in printed.read_text(), first, printed)
    finally:
        first.kill()
        first.wait()
    with contextlib.suppress(ProcessLookupError):  # workers go with the sweep, but this one might end its trial first
        os.kill(int((folder / GOOD[2] / ".lock").read_text()), signal.SIGKILL)
    for name in GOOD:
        with held(folder / name, 30.0):
            pass
    before = {name: snapshot(folder / name) for name in GOOD}
    with ray_here() as address:
        second = subprocess.run(
            [*base, "--resume", "--address", address], capture_output=True, text=True, timeout=900, check=False
        )
        alive = [node["Alive"] for node in ray.nodes()]
    return SimpleNamespace(
        home=home, data=data, folder=folder, first=printed.read_text(), before=before, second=second, alive=alive
    )


class ray_here:
    """Ray in this process, as somebody else's cluster."""

    def __enter__(self):
        options = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
        ray.init("local", num_cpus=2, **options)
        return ray.get_runtime_context().gcs_address

    def __exit__(self, *error):
        ray.shutdown()


def wait_for(condition, process, printed, seconds=600):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, f"the sweep ended early: {printed.read_text()}"
        assert time.monotonic() < deadline, f"nothing for {seconds} s: {printed.read_text()}"
        time.sleep(0.05)


def epochs(folder):
    log = folder / "metrics.jsonl"
    return len(log.read_text().splitlines()) if log.exists() else 0


def snapshot(folder):
    """When each file of a folder was written."""
    return {path.relative_to(folder): path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != ".lock"}


@pytest.mark.slow
def test_no_finished_trial_is_lost_or_run_again(story):
    done = [name for name in GOOD if "result.json" in map(str, story.before[name])]
    assert GOOD[1] in done
    assert GOOD[2] not in done
    assert {name: snapshot(story.folder / name) for name in done} == {name: story.before[name] for name in done}
    assert f"{story.folder}: 6 trials, {len(done)} of them done before" in story.second.stdout
    assert f"1/6  {GOOD[1]}  accuracy" in story.first


@pytest.mark.slow
def test_a_trial_whose_worker_was_killed_is_started_again(story):
    assert f"{GOOD[0]}  its process died; it is started again, from its last checkpoint" in story.first
    assert "going on after epoch" in (story.folder / GOOD[0] / "log.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 2])
def test_killed_trials_end_as_an_ordinary_run_does(story, seed, tmp_path):
    train(LENET, tmp_path / "run", story.data, f"train.epochs={EPOCHS}", f"train.seed={seed}")
    assert outcome(story.folder / GOOD[seed]) == outcome(tmp_path / "run")
    assert len(rows(tmp_path / "run")) == EPOCHS


@pytest.mark.slow
def test_failed_trials_are_reported_and_do_not_stop_the_rest(story):
    assert story.second.returncode == 1, story.second.stderr
    lines = story.second.stdout.splitlines()
    table = [line.split() for line in lines[[line.startswith("trial ") for line in lines].index(True) + 2 :]][:6]
    assert [(row[0], row[-1]) for row in table] == [
        *((name, "done") for name in GOOD),
        *((name, "failed") for name in BAD),
    ]
    for name in BAD:
        assert any(line.startswith(f"{name} failed: ") and "lenet6" in line for line in lines)
        assert f"  in {story.folder / name}" in lines
        assert "lenet6" in (story.folder / name / "error.txt").read_text()
    assert story.second.stderr == ""


@pytest.mark.slow
def test_one_page_compares_what_is_finished(story):
    page = (story.folder / "report.html").read_text()
    assert all(f'"name":"{name}"' in page for name in GOOD)
    assert "lenet6" not in page
    assert "report.html: those that are done on one page" in story.second.stdout


@pytest.mark.slow
def test_a_cluster_at_an_address_is_left_running(story):
    assert story.alive == [True]


@pytest.mark.slow
def test_a_finished_sweep_needs_no_ray(story, tmp_path, monkeypatch):
    recipe, settings, options = story.home / "lenet.toml", [f"train.epochs={EPOCHS}"], command.Options(resume=True)
    base, folder = Recipe.load(recipe, settings), tmp_path / "[mine]"
    begin(folder, Swept(base.to_toml(), ("seed=0,1",), 0, make_trials([read_axis("seed=0,1")], 0, None)), False)
    for seed in (0, 1):
        shutil.copytree(story.folder / GOOD[seed], folder / f"seed={seed}")
    monkeypatch.setattr("narrowgate.sweep.tuning.ray_running", lambda address: pytest.fail("Ray was started"))
    console = Console(file=io.StringIO(), width=200)
    found = command.sweep(recipe, ["seed=0,1"], folder, settings=settings, options=options, console=console)
    assert [(outcome.trial.name, outcome.state) for outcome in found] == [("seed=0", "done"), ("seed=1", "done")]
    assert "[mine]: 2 trials, 2 of them done before" in console.file.getvalue()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing ends what a killed process has started")
def test_a_trial_of_two_processes_leaves_none_behind_and_goes_on(story, tmp_path):
    settings = [f"train.epochs={EPOCHS}", "train.batch=8"]
    job = Job(Recipe.from_toml(LENET, settings).to_toml(), str(tmp_path / "two"), story.data, "cpu", 2)
    code = f"from narrowgate.sweep.trial import Job, run_trial; run_trial({job!r})"
    killed = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        wait_for(lambda: epochs(tmp_path / "two") >= 2, killed, tmp_path / "two" / "log.txt")
    finally:
        killed.kill()
        killed.wait()
    assert run_trial(job) == ""  # which waits until the processes of the killed one are gone
    train(LENET, tmp_path / "one", story.data, f"train.epochs={EPOCHS}")
    two, one = rows(tmp_path / "two"), rows(tmp_path / "one")
    assert [row["epoch"] for row in two] == list(range(1, EPOCHS + 1))
    assert [row["train_loss"] for row in two] == pytest.approx([row["train_loss"] for row in one], rel=1e-3)
    assert json.loads((tmp_path / "two" / "result.json").read_text())["processes"] == 2


def test_tunes_samplers_draw_the_same_points_for_a_seed():
    from narrowgate.sweep.tuning import drawing

    axes = [read_axis("penalty.strength=1e-5..1e-3"), read_axis("train.batch=16..18")]
    first, again = (make_trials(axes, 20, drawing(seed=3)) for _ in range(2))
    assert first == again
    assert first != make_trials(axes, 20, drawing(seed=4))
    assert first != make_trials(axes, 20, drawing(seed=2**63 - 1))  # the largest that a recipe takes
    strengths = [float(trial.settings[0].partition("=")[2]) for trial in first]
    assert all(1e-5 <= strength <= 1e-3 for strength in strengths)
    assert 5 <= sum(strength < 1e-4 for strength in strengths) <= 15  # by orders of magnitude: uniform draws give two
    assert {trial.settings[1] for trial in first} == {"train.batch=16", "train.batch=17", "train.batch=18"}
    assert all(-1 <= number <= 1 for number, _ in zip(drawing(0)(Range("x", -1, 1, False)), range(50), strict=False))


@pytest.mark.parametrize(
    ("over", "samples", "says"),
    [
        ("penalty.strenght=1e-5,1e-4", 0, r"--over penalty.strenght=1e-05: unknown key .*did you mean strength\?"),
        ("penalti.strength=1e-5", 0, r"--over .*unknown table \[penalti\].*did you mean penalty\?"),
        ("strength=1e-5", 0, "--over strength=1e-05: .*did you mean penalty.strength"),
        ("penalty.strength=1e-5,-1.0", 0, r"with --over penalty.strength=-1.0: penalty.strength = -1.0: must be"),
        ("train.epochs=0..5", 2, r"train.epochs = 0: must be"),
        ("train.epochs=1.5..5", 2, r"train.epochs = 1.5: must be"),
    ],
)
def test_keys_and_values_are_checked_before_anything_starts(tmp_path, over, samples, says):
    (tmp_path / "lenet.toml").write_text(LENET)
    with pytest.raises(RecipeError, match=says):
        command.sweep(tmp_path / "lenet.toml", [over], tmp_path / "out", samples=samples)
    assert not (tmp_path / "out").exists()


def test_nothing_is_left_in_a_folder_of_something_else(tmp_path):
    (tmp_path / "lenet.toml").write_text(LENET)
    (tmp_path / "out").mkdir()
    for name in (".lock", "mine.txt"):
        (tmp_path / "out" / name).write_text("mine")
    with pytest.raises(SweepError, match="something else"):
        command.sweep(tmp_path / "lenet.toml", ["seed=0,1"], tmp_path / "out")
    assert {path.name: path.read_text() for path in (tmp_path / "out").iterdir()} == {
        ".lock": "mine",
        "mine.txt": "mine",
    }


@pytest.mark.parametrize(("gpus", "accelerator", "devices"), [(0.0, "cpu", 1), (0.5, "cuda", 1), (2.0, "cuda", 2)])
def test_what_a_worker_is_told(tmp_path, monkeypatch, gpus, accelerator, devices):
    from narrowgate.sweep import tuning

    told, fetched = {}, []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tuning, "ray_running", lambda address: contextlib.nullcontext())
    monkeypatch.setattr(tuning, "fitting", lambda cpus, gpus, workers: tuning.Resources(cpus, gpus, workers))
    monkeypatch.setattr(tuning, "run_trials", lambda jobs, resources, watcher: told.update(jobs))
    monkeypatch.setattr(
        "narrowgate.train.data.load_data", lambda part, path, download: fetched.append((path, download))
    )
    (tmp_path / "lenet.toml").write_text(LENET)
    options = command.Options(data="some/data", download=True, gpus_per_trial=gpus)
    console = Console(file=io.StringIO(), width=200)
    found = command.sweep(Path("lenet.toml"), ["seed=0,1"], Path("out"), options=options, console=console)
    assert [outcome.state for outcome in found] == ["unfinished", "unfinished"]
    assert fetched == [("some/data", True)]  # once, before the trials
    job = told["seed=1"]
    assert (job.folder, job.data) == (str(tmp_path / "out" / "seed=1"), str(tmp_path / "some" / "data"))
    assert (job.accelerator, job.devices) == (accelerator, devices)
    assert Recipe.from_toml(job.recipe).train.seed == 1


def test_a_trial_that_dies_too_often_has_failed(tmp_path):
    console = Console(file=io.StringIO(), width=200)
    trials = [Trial("seed=0", ()), Trial("seed=1", ())]
    with Show(console, tmp_path, trials, 0) as show:
        show.started("seed=0")
        show.died("seed=0", again=True)
        assert not (tmp_path / "seed=0").exists()
        show.died("seed=0", again=False)
    first, second = outcomes(tmp_path, trials)
    assert (first.state, second.state) == ("failed", "unfinished")
    assert "1/2  seed=0  failed: its process died again and again" in console.file.getvalue()


def test_a_trial_that_fits_nowhere_and_a_client_address_are_refused(monkeypatch):
    from narrowgate.sweep import tuning

    machines = [{"Alive": True, "Resources": {"CPU": 4.0, "GPU": 2.0}}, {"Alive": False, "Resources": {"CPU": 64.0}}]
    monkeypatch.setattr(ray, "nodes", lambda: machines)
    assert tuning.fitting(4.0, None, 0) == tuning.Resources(4.0, 1.0, 0)
    with pytest.raises(SweepError, match=r"no machine has 5 cores and 1 GPUs .*4 cores, 2 GPUs"):
        tuning.fitting(5.0, None, 0)
    with pytest.raises(SweepError, match="several GPUs are whole"):
        tuning.fitting(1.0, 1.5, 0)
    with pytest.raises(SweepError, match="HOST:PORT"), tuning.ray_running("ray://head:10001"):
        pass
