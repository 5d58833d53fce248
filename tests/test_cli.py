"""The command line: what it prints, its exit codes, and the demo behind it."""

import re
import subprocess
import sys

import pytest
import torch

import narrowgate as ng
from narrowgate import cli

pytest.importorskip("typer")
pytest.importorskip("sklearn")

from typer.testing import CliRunner

from narrowgate import demo

SHORT_DEMO = ("demo", "--epochs", "10", "--strength", "0.1")


def invoke(*arguments):
    return CliRunner().invoke(cli.build_app(), arguments)


def words(text):
    """Text without frames and line breaks, so that a sentence can be found in a table or a box."""
    return " ".join(re.sub(r"[^\x20-\x7e]", " ", text).split())


@pytest.fixture(scope="module")
def short_demo():
    return invoke(*SHORT_DEMO)


def test_help_names_the_commands():
    result = invoke("--help")
    assert result.exit_code == 0
    assert "Make PyTorch networks narrow while they train" in words(result.output)
    assert "demo" in result.output
    assert max(map(len, result.output.splitlines())) <= 80


def test_no_arguments_show_help():
    assert words(invoke().output) == words(invoke("--help").output)


def test_help_of_demo_lists_its_options():
    result = invoke("demo", "--help")
    assert result.exit_code == 0
    for option in ("--epochs", "--seed", "--penalty", "--strength", "--placement"):
        assert option in result.output


def test_version():
    result = invoke("--version")
    assert (result.exit_code, result.output) == (0, f"narrowgate {ng.__version__}\n")


def test_python_m_narrowgate_is_the_same_command():
    command = [sys.executable, "-m", "narrowgate", "--version"]
    assert (
        subprocess.run(command, check=True, capture_output=True, text=True).stdout == f"narrowgate {ng.__version__}\n"
    )


@pytest.mark.parametrize(
    "arguments",
    [("demos",), ("--nonsense",), ("demo", "--epochs", "0"), ("demo", "--penalty", "l3"), ("demo", "--strength", "-1")],
)
def test_wrong_arguments_exit_with_2(arguments):
    assert invoke(*arguments).exit_code == 2


@pytest.mark.parametrize(
    ("missing", "arguments", "remedy"),
    [
        ("typer", ["--help"], 'pip install ".[cli]" in the checkout of narrowgate'),
        ("rich", ["demo"], 'pip install ".[cli]" in the checkout of narrowgate'),
        ("sklearn", ["demo"], 'pip install ".[cli]" scikit-learn in the checkout of narrowgate'),
    ],
)
def test_a_missing_package_is_named_with_its_remedy(monkeypatch, capsys, missing, arguments, remedy):
    import typer  # loaded first: only narrowgate's own imports shall fail

    assert typer
    for name in [name for name in sys.modules if name.partition(".")[0] == missing]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "narrowgate.demo")
    monkeypatch.delattr(ng, "demo")
    monkeypatch.setattr(sys, "argv", ["narrowgate", *arguments])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 1
    assert capsys.readouterr().err == f"narrowgate: {missing} is not installed. Install it with: {remedy}\n"


def test_another_missing_module_is_a_bug_and_stays_visible(monkeypatch):
    def broken():
        raise ModuleNotFoundError("No module named 'narrowgate.nowhere'", name="narrowgate.nowhere")

    monkeypatch.setattr(cli, "build_app", broken)
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        cli.main()


def test_demo_closes_gates_and_prints_what_is_left(short_demo):
    assert short_demo.exit_code == 0, short_demo.output
    output = short_demo.output
    assert "nothing is downloaded" in output
    rows = dict(re.findall(r"^(\w+) +(\d+ +\d+ +[\d,]+ +[\d,]+)$", output, re.MULTILINE))
    assert list(rows) == ["stem", "branch1", "branch2", "head", "classifier"]
    before, after = zip(*((int(c), int(left)) for c, left, *_ in map(str.split, rows.values())), strict=True)
    assert before == (32, 32, 32, 64, 10)
    assert all(left <= channels for channels, left in zip(before, after, strict=True))
    assert sum(after) < sum(before)
    closed = float(re.search(r"Gates closed +([\d.]+)%", output)[1])
    assert 0 < closed < 100
    error_before, error_after = map(float, re.search(r"([\d.]+)% before, ([\d.]+)% after", output).groups())
    assert error_before == error_after < 50
    assert re.search(r"max difference \de-\d\d", output)
    assert max(map(len, output.splitlines())) <= 80


def test_same_seed_same_output_another_seed_another(short_demo):
    def without_time(result):
        return re.sub(r"Trained in \d+ s", "", result.output)

    assert without_time(invoke(*SHORT_DEMO)) == without_time(short_demo)
    assert without_time(invoke(*SHORT_DEMO, "--seed", "1")) != without_time(short_demo)


def test_demo_without_a_closed_gate_fails_and_says_what_to_do():
    result = invoke("demo", "--epochs", "1", "--strength", "0")
    assert result.exit_code == 1
    assert "raise --strength or --epochs" in result.output


def test_demo_gives_back_random_state_and_threads():
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    invoke("demo", "--epochs", "1", "--strength", "0", "--seed", "7")
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("placement", ["before-norm", "after-norm"])
def test_removal_keeps_the_function(placement):
    model = demo.DigitsNet(8)
    gates = ng.attach_gates_(model, placement=placement)
    for gate in gates.modules():
        gate.close_(torch.arange(gate.size) % 3 == 0)
    images = torch.rand(4, 1, 8, 8)
    model(images)  # running statistics that are not their start values
    model.eval()
    narrow, proof = demo.remove(model, images)
    torch.testing.assert_close(narrow(images), model(images))
    assert proof.passed
    sizes = demo.sizes(narrow)
    # Gates 0, 3 and 6 of 8 are closed. Before the norm its shift makes them constants, and one of these may have to
    # stay to carry the others past the next layer's padding.
    assert sizes["branch1"].channels in ((5,) if placement == "after-norm" else (5, 6))
    assert sizes["branch1"].parameters < demo.sizes(demo.DigitsNet(8))["branch1"].parameters
    assert not any(isinstance(module, ng.gates.Gate) for module in narrow.modules())
    assert gates.closed_fraction() > 0  # the trained model is left as it was
