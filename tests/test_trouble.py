"""What a command says when it can't go on: one line, what to do, and a status."""

import os
import re
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from engine_helpers import LENET, train, write_images

import narrowgate as ng
from narrowgate import cli, models, trouble
from narrowgate.commands import NAMES
from narrowgate.train import checkpoint
from narrowgate.train.checkpoint import _Damaged
from narrowgate.trouble import message_of, told_in_one_line
from narrowgate.weights import StorageError

pytest.importorskip("typer")

from typer.testing import CliRunner


def invoke(*arguments):
    return CliRunner().invoke(cli.build_app(), [str(argument) for argument in arguments])


def said(*arguments, code=1):
    """What a command says when it ends with this status, in one line."""
    result = invoke(*arguments)
    assert result.exit_code == code and isinstance(result.exception, SystemExit), result.exception
    assert result.stderr.startswith("narrowgate: ") and result.stderr.count("\n") == 1
    return result.stderr.removeprefix("narrowgate: ").rstrip()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    train(LENET, folder / "run", write_images(folder / "28.npz", 28), "train.epochs=1", "penalty.strength=0.5")
    return folder / "run"


@pytest.fixture
def damaged(run, tmp_path):
    return shutil.copytree(run, tmp_path / "run")


def test_our_own_errors_are_for_people_and_others_are_bugs():
    assert message_of(StorageError("not there: save it")) == "not there: save it"
    assert message_of(_Damaged("inside only")) is None
    assert message_of(ValueError("wrong")) is None and message_of(KeyError("wrong")) is None
    assert (
        message_of(FileNotFoundError(2, "No such file or directory", "a.json")) == "a.json: No such file or directory"
    )
    assert message_of(FileExistsError("runs/x holds a run")) == "runs/x holds a run"
    assert message_of(BrokenPipeError(32, "Broken pipe")) is None
    assert message_of(ModuleNotFoundError(name="ray.tune")).endswith(
        'Install it with: pip install ".[sweep]" in the checkout of narrowgate'
    )
    assert message_of(ModuleNotFoundError(name="timm")).endswith("Install it with: pip install timm")
    assert message_of(ModuleNotFoundError(name="narrowgate.nowhere")) is None


def test_of_several_processes_one_speaks(monkeypatch, capsys):
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit) as ended, told_in_one_line():
            raise OSError("full")
        assert ended.value.code == 1 and capsys.readouterr().err.count("\n") == lines


def test_errors_about_the_call_are_errors_of_the_package():
    source = "".join(path.read_text() for path in Path(ng.__file__).parent.rglob("*.py"))
    assert set(trouble._OF_THE_CALL) <= set(re.findall(r"^class (\w+)\(", source, re.MULTILINE))


def test_a_bug_is_raised_as_it_is():
    with pytest.raises(ZeroDivisionError), told_in_one_line():
        _ = 1 / 0


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (("train", "x.toml"), "narrowgate: stopped; go on with the same command and --resume\n"),
        (("inspect", "lenet5"), "narrowgate: stopped\n"),
    ],
)
def test_ctrl_c_ends_with_130_and_one_line(monkeypatch, command, line):
    def stop(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("narrowgate.train.recipe.Recipe.load", stop)
    monkeypatch.setattr("narrowgate.source.open_source", stop)
    result = invoke(*command)
    assert (result.exit_code, result.stderr) == (130, line)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for another process")
def test_ctrl_c_in_a_process_of_its_own(tmp_path):
    pytest.importorskip("sklearn")
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "narrowgate", "demo", "--epochs", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts what it puts in the background with Ctrl-C ignored, and so would these tests.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with process:
        process.stdout.readline()  # it is at work
        process.send_signal(signal.SIGINT)
        try:
            _, error = process.communicate(timeout=180)
        finally:
            process.kill()
    assert (process.returncode, error) == (130, "narrowgate: stopped\n")


def test_a_wrong_call_in_a_process_of_its_own(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "narrowgate", "report", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
    assert "give a folder that narrowgate train wrote, such as runs/NAME" in done.stderr


@pytest.mark.parametrize("file", ["result.json", "recipe.toml", "small/plan.json", "small/model.safetensors"])
def test_a_damaged_run_is_named_with_a_remedy(damaged, tmp_path, file):
    whole = (damaged / file).read_bytes()
    (damaged / file).write_bytes(whole[: len(whole) // 2])
    name = file.rpartition("/")[2]
    code = 2 if name == "recipe.toml" else 1  # as of any recipe with an error
    assert name in said("inspect", damaged, code=code)
    assert name in said("export", damaged, "--out", tmp_path / "x.pt2", code=code)
    if name == "model.safetensors":  # which a report has no need of
        assert invoke("report", damaged, "--out", tmp_path / "x.html").exit_code == 0
    else:
        assert name in said("report", damaged, "--out", tmp_path / "x.html", code=code)
    if name == "result.json":
        assert "delete it, and narrowgate train ... --resume" in said("inspect", damaged)


def test_what_a_run_was_trained_on_need_not_be_said_again(run, tmp_path):
    quick = ("--devices", "cpu", "--modes", "eager", "--batches", "1", "--rounds", "2")
    for command in (("inspect", run), ("measure", run, *quick, "--json", tmp_path / "new" / "latency.json")):
        result = invoke(*command)
        assert result.exit_code == 0, result.output
    assert (tmp_path / "new" / "latency.json").is_file()


def test_a_file_that_cannot_be_written_is_said_first(tmp_path, monkeypatch):
    def deny(path):
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "file").write_text("")
    assert f"{tmp_path / 'file'}: " in said("export", "lenet5", "--out", tmp_path / "file" / "x.pt2", code=2)
    monkeypatch.setattr("pathlib.Path.touch", deny)
    out = tmp_path / "x.pt2"
    assert said("export", "lenet5", "--out", out) == f"can't write {out}: Permission denied; choose another --out"


def test_a_mistyped_folder_may_be_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wanted = "there is no folder my-run, and there is no network 'my-run'. There are lenet5, resnet164"
    assert said("inspect", "my-run", code=2).startswith(wanted)


def complete(*words):
    """What the shell is offered for the last of these words."""
    line = " ".join(("narrowgate", *words))
    environment = {**os.environ, "_NARROWGATE_COMPLETE": "complete_bash", "COMP_WORDS": line}
    done = subprocess.run(
        [sys.executable, "-m", "narrowgate"],
        env={**environment, "COMP_CWORD": str(len(words))},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.split()


def test_the_shell_completes_networks_and_leaves_files_to_itself():
    assert complete("inspect", "res") == ["resnet164", "resnet"]
    assert complete("train", "rec") == []
    assert {name.removesuffix("NAME") for name in models.names()} == set(NAMES)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_completion_installs_itself(tmp_path):
    environment = {**os.environ, "HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    command = [sys.executable, "-m", "narrowgate", "--install-completion", "bash"]
    assert (
        "bash completion installed"
        in subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    )
    asked = ["bash", "-c", "source ~/.bashrc; complete -p narrowgate"]
    shown = subprocess.run(asked, env=environment, capture_output=True, text=True, check=True).stdout
    assert "narrowgate_completion narrowgate" in shown and "-o default" in shown  # files where no name fits


def test_warnings_of_the_package_are_one_line(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    trouble.tell_own_warnings_in_one_line()
    line = warnings.formatwarning(UserWarning("damaged: a"), UserWarning, checkpoint.__file__, 3, "code()")
    assert line == "narrowgate: damaged: a\n"
    other = warnings.formatwarning(UserWarning("old"), UserWarning, "/other/file.py", 3, "code()")
    assert other == "/other/file.py:3: UserWarning: old\n  code()\n"
