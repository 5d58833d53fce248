"""The command line says what to type next: no arguments, wrong ones, missing packages; and inspect, measure, export."""

import json
import re
import subprocess
import sys

import pytest
import torch

import narrowgate as ng
from narrowgate import cli
from narrowgate.measure.latency import Latency
from narrowgate.models import LeNet5

pytest.importorskip("typer")

from typer.testing import CliRunner

QUICK = ("--devices", "cpu", "--modes", "eager", "--batches", "1,2", "--rounds", "2")


def invoke(*arguments):
    return CliRunner().invoke(cli.build_app(), [str(argument) for argument in arguments])


def words(text):
    """Text without frames and line breaks, so that a sentence can be found in a table or a box."""
    return " ".join(re.sub(r"[^\x20-\x7e]", " ", text).split())


def refused(*arguments, code):
    result = invoke(*arguments)
    assert result.exit_code == code, result.output
    assert isinstance(result.exception, SystemExit), result.exception
    return words(result.stderr)


@pytest.fixture
def saved(tmp_path):
    model = LeNet5()
    with torch.no_grad():
        model.conv1.weight[::2], model.conv1.bias[::2] = 0, 0
    plan = ng.plan(model, torch.rand(2, 1, 28, 28))
    ng.save(ng.compact(model, plan), plan, tmp_path / "mine")
    return tmp_path / "mine"


def test_no_arguments_say_what_to_type():
    result = invoke()
    assert result.exit_code == 2
    for text in ("narrowgate demo", "narrowgate inspect torchvision/resnet18", "narrowgate train --help"):
        assert text in words(result.output)
    assert max(map(len, result.output.splitlines())) <= 80


def test_help_lists_every_command_in_one_screen():
    result = invoke("--help")
    assert result.exit_code == 0 and len(result.output.splitlines()) < 50
    for command in ("demo", "train", "inspect", "measure", "export"):
        assert re.search(rf"^. {command} ", result.output, re.MULTILINE)


def test_paragraphs_of_help_have_no_line_ends_of_the_code():
    from typer.main import get_command

    from narrowgate.cli import build_app

    group = get_command(build_app())
    for command in (group, *group.commands.values()):
        assert not re.search(r"[^\n]\n[^\n]", command.help), command.name


def test_a_misspelt_command_or_option_gets_a_suggestion():
    assert "Did you mean 'inspect'?" in refused("inspct", "lenet5", code=2)
    assert "--batches" in refused("measure", "lenet5", "--batchs", "1", code=2)
    assert "Missing argument 'NETWORK'" in refused("export", "--out", "x.onnx", code=2)
    assert "'narrowgate export --help'" in words(
        subprocess.run(
            [sys.executable, "-m", "narrowgate", "export"], capture_output=True, text=True, check=False
        ).stderr
    )


def test_help_shows_what_is_typed():
    for command in ("train", "sweep", "record", "reproduce", "report", "inspect", "measure", "export"):
        text = invoke(command, "--help").output
        assert not re.search(r"<bool>|<path>|<str>|list\[|[{}]", text)
    assert " train [OPTIONS] RECIPE " in invoke("train", "--help").output
    assert " report [OPTIONS] RUN... " in invoke("report", "--help").output


def test_completion_can_be_installed():
    assert "--install-completion" in invoke("--help").output
    code = subprocess.run(
        [sys.executable, "-m", "narrowgate"],
        env={
            "PATH": "/usr/bin",
            "_NARROWGATE_COMPLETE": "complete_bash",
            "COMP_WORDS": "narrowgate mea",
            "COMP_CWORD": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert code.stdout.split() == ["measure"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("measure", "lenet5"), "lenet5 is a whole network: add --zero 0.5"),
        (("measure", "lenet5", "--zero", "1.5"), "'--zero'"),
        (("measure", "lenet5", "--zero", "0.5", "--batches", "one"), "'one' is not batch sizes, such as 1,8,64"),
        (("measure", "lenet5", "--zero", "0.5", "--modes", "grph"), "unknown mode 'grph'; choose from eager"),
        (("measure", "lenet5", "--zero", "0.5", "--devices", "tpu"), "unknown device 'tpu'"),
        (("inspect", "lenet5", "--image-shape", "28"), "'28' is not channels, height and width, such as 3,224,224"),
        (("inspect", "mine:make", "--image-shape", "1x28"), "'1x28' is not the shape of one input, such as 3,224,224"),
        (("export", "lenet5", "--out", "model.bin"), "model.bin does not end in .onnx or .pt2: add --format"),
        (("measure", "lenet5", "--zero", "0.5", "--devices", ""), "no device is given"),
        (("measure", "lenet5", "--zero", "0.5", "--json", "."), ". is a folder; give the name of a file"),
        (("export", "lenet5"), "Missing option '--out'"),
    ],
)
def test_wrong_usage_ends_with_2_and_says_what_would_do(arguments, message):
    assert message in refused(*arguments, code=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("inspect", "narrowgate.models:LeNet5", "--image-shape", "3,28,28"), "to have 1 channels, but got 3"),
    ],
)
def test_failures_end_with_1_in_one_line(arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    assert result.stderr.startswith("narrowgate: ") and result.stderr.count("\n") == 1 and message in result.stderr


def test_a_bug_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr("narrowgate.source.open_source", lambda *a, **k: [][1])
    assert isinstance(invoke("inspect", "lenet5").exception, IndexError)


@pytest.mark.parametrize("missing", ["onnx", "onnxruntime", "onnxscript"])
def test_a_missing_extra_is_named_with_its_command(monkeypatch, capsys, tmp_path, missing):
    for package in ("onnx", "onnxruntime", "onnxscript"):
        if package != missing:
            pytest.importorskip(package)
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setattr(sys, "argv", ["narrowgate", "export", "lenet5", "--out", str(tmp_path / "x.onnx")])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 1 and not list(tmp_path.iterdir())
    install = 'pip install ".[export]" in the checkout of narrowgate'
    wanted = f"narrowgate: {missing} is not installed. Install it with: {install}\n"
    assert capsys.readouterr().err == wanted


def test_inspect_prints_a_tree(saved):
    result = invoke("inspect", saved, "--model", "lenet5")
    assert result.exit_code == 0, result.output
    assert "conv1 Conv2d 1 -> 10 of 20; 260; 144.00 k; 10 gates" in words(result.output)
    assert "of 20" not in invoke("inspect", "lenet5").output


def test_lines_are_whole_in_a_pipe():
    (line,) = [line for line in invoke("inspect", "lenet5").output.splitlines() if "Linear 500 -> 10" in line]
    assert line.endswith("no gates: the last layer, its outputs are the model's") and len(line) > 80


def test_measure_prints_a_table_and_writes_json(saved, tmp_path):
    file = tmp_path / "latency.json"
    result = invoke("measure", saved, "--model", "lenet5", *QUICK, "--json", file)
    assert result.exit_code == 0, result.output
    assert "cpu eager" in result.output and "multiply-adds" in result.output
    found = Latency.from_json(file.read_text())
    assert [timing.batch for timing in found.timings] == [1, 2] and found.multiply_adds_left < 0.6
    assert json.loads(file.read_text())["model"] == "LeNet5"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_measure_that_timed_nothing_fails_and_writes_nothing(saved, tmp_path):
    file = tmp_path / "latency.json"
    result = invoke("measure", saved, "--model", "lenet5", "--devices", "cuda", "--json", file)
    assert result.exit_code == 1 and "not timed: cuda" in result.output and not file.exists()


def test_measure_of_a_name_zeroes_channels():
    result = invoke("measure", "lenet5", "--zero", "0.5", "--round-to", "8", *QUICK)
    assert result.exit_code == 0, result.output
    # 16 of 20, 32 of 50 and 256 of 500 channels: 230,400 + 819,200 + 131,072 + 2,560 of 2,293,000.
    assert "51.6% left of 2.29 M multiply-adds" in words(result.output)


def test_export_writes_what_the_small_network_computes(saved, tmp_path):
    file = tmp_path / "model.pt2"
    result = invoke("export", saved, "--model", "lenet5", "--out", file)
    assert result.exit_code == 0, result.output
    assert "same function" in result.output and f"{file}: torch, " in result.output
    x = torch.rand(3, 1, 28, 28)
    small = ng.load(saved, LeNet5).eval()
    torch.testing.assert_close(torch.export.load(file).module()(x), small(x))


def test_help_of_the_commands_does_not_load_what_is_heavy():
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom narrowgate.cli import build_app\n"
        "before = set(sys.modules)\n"
        "for name in ('inspect', 'measure', 'export'):\n"
        "    assert CliRunner().invoke(build_app(), [name, '--help']).exit_code == 0\n"
        "print(sorted({'onnxruntime', 'torchvision', 'timm', 'narrowgate.inspect_model', 'narrowgate.source', "
        "'narrowgate.export', 'narrowgate.measure.latency'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
