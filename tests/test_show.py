"""What a person sees: about twenty lines in a file, one bar in a terminal, and a table at the end."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console
from test_log import row

from narrowgate.train import show as module
from narrowgate.train.finish import Result
from narrowgate.train.show import Show, duration


def result(**changes):
    values = {
        "accuracy": 0.7321,
        "accuracy_gated": 0.7325,
        "accuracy_removed": 0.7325,
        "validation_accuracy": None,
        "parameters": 824_123,
        "parameters_full": 2_351_972,
        "multiply_adds": 30_000_000,
        "multiply_adds_full": 90_000_000,
        "closed": 0.643,
        "max_error": 3.1e-6,
        "closed_by_threshold": 0,
        "finetune_epochs": 0,
        "epochs": 200,
        "seconds": 4021.0,
        "device": "cpu",
        "processes": 1,
        "recipe_digest": "",
    }
    return Result(**{**values, **changes})


class Screen:
    """A console that keeps what it was sent."""

    def __init__(self, terminal, width=100):
        self.file = io.StringIO()
        self.console = Console(file=self.file, force_terminal=terminal, width=width, color_system=None)

    @property
    def text(self):
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.file.getvalue())

    @property
    def lines(self):
        return self.text.splitlines()


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 0.0

        def perf_counter(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.mark.parametrize("epochs, lines", [(1, 1), (7, 7), (20, 20), (200, 21), (240, 21), (1500, 21)])
def test_about_twenty_lines_without_a_terminal(epochs, lines):
    screen = Screen(terminal=False)
    with Show(screen.console, epochs) as show:
        for epoch in range(1, epochs + 1):
            show.step(3, 10)
            show.epoch(row(epoch, epochs))
    assert len(screen.lines) == lines
    assert "\x1b" not in screen.file.getvalue()
    assert screen.lines[0].startswith(f"epoch {1:>{len(str(epochs))}}/{epochs}  loss 1.0000  accuracy 25.00%  closed")
    assert screen.lines[-1].startswith(f"epoch {epochs}/{epochs}")


def test_a_line_has_everything_and_is_not_wrapped():
    screen = Screen(terminal=False, width=40)
    with Show(screen.console, 40) as show:
        show.epoch(row(1, 40, parameters=1_234_567, multiply_adds=45_600_000, seconds=60.0))
        show.notice("long " * 30)
    assert screen.lines[0] == (
        "epoch  1/40  loss 1.0000  accuracy 25.00%  closed 12.5%  parameters 1.23 M  multiply-adds 45.60 M  39 min left"
    )
    assert len(screen.lines) == 2


def test_a_notice_in_a_terminal_keeps_words_whole():
    screen = Screen(terminal=True, width=33)
    with Show(screen.console, 3) as show:
        show.notice("gates of [a] layer " * 5)
    told = [line.strip() for line in screen.lines if "gates" in line or "layer" in line]
    assert len(told) > 2 and set(" ".join(told).split()) == {"gates", "of", "[a]", "layer"}


def test_every_event_is_shown_and_a_notice_once():
    for terminal in (False, True):
        screen = Screen(terminal)
        with Show(screen.console, 100) as show:
            for epoch in range(1, 101):
                show.epoch(row(epoch, 100, event="shrunk 10 -> 5" if epoch in (7, 8) else ""))
                show.notice("[bold] said once")
        assert screen.text.count("shrunk 10 -> 5") == 2
        assert "epoch   7/100  shrunk" in screen.text
        assert screen.text.count("[bold] said once") == 1


def test_the_last_accuracy_known_is_shown():
    screen = Screen(terminal=False)
    with Show(screen.console, 3) as show:
        for epoch, accuracy in ((1, None), (2, 0.5), (3, None)):
            show.epoch(row(epoch, 3, accuracy=accuracy))
    assert ["accuracy      - " in screen.lines[0], *("accuracy 50.00%" in line for line in screen.lines[1:])] == [
        True
    ] * 3


def rendered(show, width=100):
    screen = Screen(terminal=False, width=width)
    screen.console.print(show)
    return [line.rstrip() for line in screen.lines]


def test_the_bar_in_a_terminal(clock):
    screen = Screen(terminal=True)
    with Show(screen.console, 10) as show:
        assert rendered(show) == ["epoch  1/10"]
        show.epoch(row(1, 10, seconds=2.0))
        show.step(5, 10)
        first, second = rendered(show)
        assert first.startswith("epoch  2/10  ━━━━") and first.endswith("18 s left")
        assert "step" not in first
        assert second == "loss 1.0000  accuracy 25.00%  closed 12.5%  parameters 1.00 k  multiply-adds 2.00 k"
        clock.now += 6  # this epoch has become a slow one
        assert "step 5/10" in rendered(show)[0]
        assert all(len(line) <= 60 for line in rendered(show, 60))
        assert rendered(show, 80)[1:] == [
            "loss 1.0000  accuracy 25.00%  closed 12.5%",
            "parameters 1.00 k  multiply-adds 2.00 k",
        ]
    assert "epoch  2/10" in screen.text


def test_time_left_follows_the_last_epochs(clock):
    with Show(Screen(terminal=False).console, 100) as show:
        for epoch in range(1, 41):
            show.epoch(row(epoch, 100, seconds=100.0))
        assert rendered(show)[0].endswith("1 h 40 min left")
        for epoch in range(41, 51):
            show.epoch(row(epoch, 100, seconds=1.0))
        assert rendered(show)[0].endswith("50 s left")
        clock.now += 0.9
        assert rendered(show)[0].endswith("49 s left")
        for epoch in range(51, 101):
            show.epoch(row(epoch, 100, seconds=1.0))
        assert "left" not in rendered(show)[0]


def test_time_left_in_the_first_epoch_comes_from_its_steps(clock):
    with Show(Screen(terminal=False).console, 12) as show:
        show.begin(2)
        clock.now = 30.0
        show.step(50, 100)
        assert rendered(show)[0].startswith("epoch  3/12")
        assert rendered(show)[0].endswith("step 50/100  10 min left")


def test_fine_tuning_after_the_last_epoch_stays_within_the_bar(clock):
    with Show(Screen(terminal=False).console, 2) as show:
        show.epoch(row(2, 2))
        show.step(7, 10)
        assert rendered(show)[0].startswith("epoch 2/2")


@pytest.mark.parametrize("terminal", [False, True])
def test_a_quiet_one_shows_nothing(capsys, terminal):
    screen = Screen(terminal)
    with Show(screen.console, 1, quiet=True) as show:
        show.notice("x")
        show.epoch(row(1, 1, event="y"))
        show.summary(result(), {})
    assert screen.text == "" and capsys.readouterr() == ("", "")


def test_an_error_leaves_the_terminal_whole():
    screen = Screen(terminal=True)
    with pytest.raises(RuntimeError), Show(screen.console, 3) as show:
        show.epoch(row(1, 3))
        raise RuntimeError
    assert screen.file.getvalue().count("\x1b[?25l") == screen.file.getvalue().count("\x1b[?25h") == 1
    assert "epoch 2/3" in screen.text


@pytest.mark.parametrize("terminal", [False, True])
def test_the_summary(terminal):
    screen = Screen(terminal)
    with Show(screen.console, 1) as show:
        show.summary(result(), {"conv1": (64, 32), "[odd]": (10, 10)})
    table = {line.split("  ")[0]: line.split() for line in screen.lines if line}
    assert table["parameters"][1:] == ["2,351,972", "824,123", "35.0%", "left"]
    assert table["multiply-adds"][1:] == ["90,000,000", "30,000,000", "33.3%", "left"]
    assert table["channels of conv1"][3:] == ["64", "32", "50.0%", "left"]
    assert table["channels of [odd]"][3:] == ["10", "10", "100.0%", "left"]
    assert table["test accuracy"][2:] == ["73.25%", "73.21%", "-0.04", "points"]
    assert "64.3%" in table["Gates closed"] and "3e-06" in table["Exactness"]
    assert screen.lines[-1] == "Training      200 epochs in 67 min on cpu"


def test_the_summary_says_where_the_run_is_and_what_shows_it():
    screen = Screen(terminal=False)
    with Show(screen.console, 1) as show:
        show.summary(result(max_error=0.0), {}, Path("runs/my run"))
    assert "max difference 0 between" in screen.text
    assert screen.lines[-1] == "All of it     runs/my run; to look at it: narrowgate report 'runs/my run'"


def test_the_summary_of_other_runs():
    screen = Screen(terminal=False)
    many = {f"layer{i}": (10, 5) for i in range(40)}
    with Show(screen.console, 1) as show:
        changes = {
            "accuracy": 0.7325,
            "accuracy_removed": 0.7301,
            "max_error": None,
            "finetune_epochs": 1,
            "processes": 2,
        }
        show.summary(result(**changes, closed_by_threshold=1200), many)
    text = screen.text
    assert "layer3" not in text and re.search(r"channels +400 +200 +50\.0% left", text)
    assert re.search(r"73\.25% +73\.25% +the same", text)
    assert "Exactness" not in text and "1 epoch after the removal, test accuracy 73.01% -> 73.25%" in text
    assert "and 1,200 more" in text and "cpu, 2 processes" in text


def test_durations():
    cases = {-1: "0 s", 0.4: "0 s", 99: "99 s", 99.7: "2 min", 750: "12 min", 5999: "1 h 40 min", 11100: "3 h 05 min"}
    assert {seconds: duration(seconds) for seconds in cases} == cases
