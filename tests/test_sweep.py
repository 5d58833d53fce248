"""What a sweep asks for, as values, and the folder it fills; tests/test_sweep_ray.py has the sweeps that run."""

import itertools
import json
import os
import subprocess
import sys

import pytest
from engine_helpers import LENET

from narrowgate.sweep.folder import SWEEP, Swept, begin, held, outcomes
from narrowgate.sweep.space import Choices, Range, SweepError, Trial, make_trials, read_axis
from narrowgate.sweep.trial import Job, run_trial
from narrowgate.train.recipe import Recipe


def trials(*over, samples=0, draw=None):
    return make_trials([read_axis(text) for text in over], samples, draw)


def test_a_grid_is_every_combination_in_order_with_readable_names():
    found = trials("penalty.strength=1e-5, 0.00005", "seed=0,1")
    assert [trial.name for trial in found] == [
        "strength=1e-05,seed=0",
        "strength=1e-05,seed=1",
        "strength=5e-05,seed=0",
        "strength=5e-05,seed=1",
    ]
    assert found[1].settings == ("penalty.strength=1e-05", "train.seed=1")
    recipe = Recipe.from_toml(LENET, found[2].settings)
    assert (recipe.penalty.strength, recipe.train.seed) == (5e-5, 0)


def test_values_may_hold_commas_of_their_own_and_names_are_fit_for_folders():
    axis = read_axis('model.options={ depth = 11, dropout = 0.0 },{depth=20, note="a,b"}')
    assert axis == Choices("model.options", ("{ depth = 11, dropout = 0.0 }", '{ depth = 20, note = "a,b" }'))
    found = trials("lr.drops=[30,45],[]", "data.path=../a,../b")
    assert [trial.name for trial in found][:2] == ["drops=30_45,path=.._a", "drops=30_45,path=.._b"]
    assert found[3].settings == ("lr.drops=[]", "data.path=../b")
    assert all("/" not in trial.name for trial in found)


def test_keys_with_one_last_word_are_named_in_full_and_equal_names_get_numbers():
    (found,) = trials("gates.kind=linear", "penalty.kind=l1")
    assert found.name == "gates.kind=linear,penalty.kind=l1"
    names = [trial.name for trial in trials("data.path=a/b,a_b")]
    assert names == ["1,path=a_b", "2,path=a_b"]
    assert len({trial.name for trial in trials(f"data.path={'x' * 300}a,{'x' * 300}b")}) == 2


def test_a_range_is_drawn_and_each_point_meets_the_whole_grid():
    axis = read_axis("penalty.strength=1e-5..1e-3")
    assert axis == Range("penalty.strength", 1e-5, 1e-3, whole=False)
    assert axis.log
    assert not read_axis("penalty.sigma=0..2.5").log
    assert read_axis("train.batch=16..64") == Range("train.batch", 16, 64, whole=True)
    numbers = {"penalty.strength": (2.34567e-5, 2.34567e-5, 9.9999999e-4), "train.batch": (16, 16, 64)}
    found = trials(
        "penalty.strength=1e-5..1e-3",
        "seed=0,1",
        "train.batch=16..64",
        samples=2,
        draw=lambda axis: itertools.cycle(numbers[axis.key]),
    )
    assert [trial.name for trial in found] == [  # the second point was the first again
        "strength=2.346e-05,seed=0,batch=16",
        "strength=2.346e-05,seed=1,batch=16",
        "strength=0.001,seed=0,batch=64",
        "strength=0.001,seed=1,batch=64",
    ]


@pytest.mark.parametrize(
    ("over", "samples", "says"),
    [
        ([], 0, "nothing to sweep"),
        (["penalty.strength"], 0, "write table.key=a,b,c"),
        (["penalty.strength=1,,2"], 0, "a value is missing"),
        (["penalty.strength=1e-5,0.00001"], 0, "1e-05 is there twice"),
        (["seed=0", "train.seed=1"], 0, "train.seed is given twice"),
        (["penalty.strength=1e-3..1e-5"], 3, "first number must be below"),
        (["penalty.strength=1e-5..1e-3"], 0, "--samples N"),
        (["penalty.strength=1e-5,1e-3"], 3, "--samples is for ranges"),
        (["train.batch=1..2"], 3, "not so many different points"),
        (["lr.drops=[1,2"], 0, "not a value of TOML"),
    ],
)
def test_what_cannot_be_swept_is_refused_in_words(over, samples, says):
    with pytest.raises(SweepError, match=says.replace("(", r"\(")):
        trials(*over, samples=samples, draw=lambda axis: itertools.cycle([1]))


def test_a_sweep_that_ended_before_its_first_trial_makes_way(tmp_path):
    begin(tmp_path, swept(), resume=False)
    other = swept(over=("seed=0,2",))
    assert begin(tmp_path, other, resume=False) == other == Swept.load(tmp_path)
    (tmp_path / other.trials[0].name).mkdir()  # the negative control
    with pytest.raises(SweepError, match="holds a sweep"):
        begin(tmp_path, swept(), resume=False)


def swept(over=("seed=0,1",), samples=0, settings=(), points=None):
    found = points or trials(*over)
    return Swept(Recipe.from_toml(LENET, settings).to_toml(), tuple(over), samples, tuple(found))


def test_a_sweep_goes_on_only_with_its_own_settings(tmp_path):
    folder = tmp_path / "sweep"
    first = swept()
    assert begin(folder, first, resume=True) == first
    (folder / first.trials[0].name).mkdir()
    with pytest.raises(SweepError, match="holds a sweep: go on with --resume"):
        begin(folder, first, resume=False)
    other = swept(points=[Trial("seed=7", ("train.seed=7",))])
    assert begin(folder, other, resume=True) == first  # the points drawn when it began
    assert begin(folder, swept(settings=["data.path=elsewhere"]), resume=True) == first
    with pytest.raises(SweepError, match=r"--over was seed=0,1, not seed=0,2"):
        begin(folder, swept(over=("seed=0,2",)), resume=True)
    with pytest.raises(SweepError, match=r"recipe differs in penalty.sigma, train.epochs\. Resume"):
        begin(folder, swept(settings=["train.epochs=9", "penalty.sigma=2.0"]), resume=True)
    (folder / SWEEP).write_text("{}")
    with pytest.raises(SweepError, match=r"can't be read as a sweep .*bring back a copy, or choose another folder"):
        begin(folder, first, resume=True)


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(SweepError, match="something else"):
        begin(tmp_path, swept(), resume=True)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.skipif(sys.platform == "win32", reason="no locks of this kind on Windows")
def test_a_folder_belongs_to_one_process_at_a_time(tmp_path):
    code = f"from narrowgate.sweep.folder import held; from pathlib import Path; held(Path({str(tmp_path)!r}), 0.0)"
    with held(tmp_path, 0.0):
        command = [sys.executable, "-c", f"{code}.__enter__()"]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        assert f"{tmp_path} is in use by process {os.getpid()}" in found.stderr
    with held(tmp_path, 0.0):  # free again
        pass


def test_a_failed_trial_leaves_its_error_and_a_later_try_takes_it_away(tmp_path):
    folder = tmp_path / "seed=0"
    found = [Trial("seed=0", ())]
    job = Job(Recipe.from_toml(LENET, ["model.name=lenet6"]).to_toml(), str(folder), None, "cpu", 1)
    assert [outcome.state for outcome in outcomes(tmp_path, found)] == ["unfinished"]
    line = run_trial(job)
    assert "needs a path" in line
    (outcome,) = outcomes(tmp_path, found)
    assert (outcome.state, outcome.error) == ("failed", line)
    assert "Traceback" in (folder / "error.txt").read_text()
    with_data = Job(job.recipe, job.folder, "no/such.npz", "cpu", 1)
    assert "such.npz does not exist" in run_trial(with_data)
    assert "such.npz" in outcomes(tmp_path, found)[0].error


def test_without_ray_the_command_says_what_to_install(tmp_path):
    (tmp_path / "lenet.toml").write_text(LENET)
    code = "import sys; sys.modules['ray'] = None; from narrowgate.cli import main; main()"
    arguments = ["sweep", str(tmp_path / "lenet.toml"), "--over", "seed=0", "--out", str(tmp_path / "out")]
    command = [sys.executable, "-c", code, *arguments]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr.count("\n")) == (1, 1), found.stderr
    assert 'ray is not installed. Install it with: pip install ".[sweep]"' in found.stderr
    assert not (tmp_path / "out").exists()


def test_sweep_json_says_what_is_swept(tmp_path):
    begin(tmp_path, swept(), resume=False)
    kept = json.loads((tmp_path / SWEEP).read_text())
    assert kept["what"] == "narrowgate sweep"
    assert kept["trials"][1] == {"name": "seed=1", "settings": ["train.seed=1"]}
    assert Swept.load(tmp_path) == swept()
