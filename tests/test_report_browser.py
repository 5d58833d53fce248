"""The report's page in a real Chromium: it draws, answers to the mouse, and never runs what a run is called."""

import json
import shutil

import chromium
import pytest
from report_helpers import LATENCY, add_event, change_json, copy_run, interrupt, make_run, report

pytestmark = pytest.mark.skipif(
    chromium.find() is None, reason="no Chromium found: install one, or name it in the environment variable CHROMIUM"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def run(folder):
    made = make_run(folder / "first")
    (made / "latency.json").write_text(json.dumps(LATENCY))
    return made


@pytest.fixture(scope="module")
def runs(run, folder):
    """Three runs on the front, one that is larger and worse, and one that is not finished."""
    ends = {"first": (20_000, 0.9), "second": (500, 0.5), "third": (90_000, 0.99), "fourth": (100_000, 0.7)}
    for name, (parameters, accuracy) in ends.items():
        result = copy_run(run, folder / "all" / name) / "result.json"
        change_json(result, parameters=parameters, accuracy=accuracy, multiply_adds=parameters + 40_000)
    interrupt(copy_run(run, folder / "all" / "fifth"), 2)
    return [folder / "all" / name for name in (*ends, "fifth")]


@pytest.fixture
def open_page(tmp_path):
    pages = []

    def opened(*paths, **window):
        report(*paths, out=tmp_path / "page.html")
        pages.append(chromium.Page(chromium.find(), **window))
        pages[-1].open(tmp_path / "page.html")
        return pages[-1]

    yield opened
    for page in pages:
        page.close()
        assert page.errors == []
        assert all(url.startswith("file:") for url in page.requests)


def text(page, selector):
    return page.evaluate(f"document.querySelector({selector!r}).innerText")


def box(page, selector, number=0):
    """Where an element is in the window, after scrolling to it: left, top, width, height."""
    find = f"document.querySelectorAll({selector!r})[{number}]"
    page.evaluate(f"{find}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
    return page.evaluate(f"(r => [r.x, r.y, r.width, r.height])({find}.getBoundingClientRect())")


def click(page, selector, number=0, across=0.5):
    x, y, width, height = box(page, selector, number)
    for kind in ("mousePressed", "mouseReleased"):
        page.mouse(kind, x + across * width, y + height / 2)
    page.evaluate("new Promise(done => requestAnimationFrame(done))")


def test_all_parts_are_drawn(open_page, run):
    page = open_page(run)
    parts = ["course", "widths", "gates", "curve", "latency", "met", "about"]
    assert page.evaluate("[...document.querySelectorAll('section')].map(part => part.id)") == parts
    for part, shapes in {"course": "path.line", "widths": "rect.fill", "gates": "rect.bar"}.items():
        assert page.evaluate(f"document.querySelectorAll('#{part} {shapes}').length") > 4, part
    cards = page.evaluate("[...document.querySelectorAll('.card')].map(card => card.innerText)")
    assert [card.splitlines()[0] for card in cards] == [
        "Test accuracy", "Parameters", "Multiply-adds per image", "Latency"
    ]  # fmt: skip
    assert "250 µs" in cards[3] and "10 ms at full size: 3% (CPU, ONNX Runtime, batch 1)" in cards[3]
    whole = text(page, "body")
    assert not [word for word in ("NaN", "undefined", "[object", "Infinity", "null") if word in whole]
    assert "resnet (depth 11, dropout 0.0)" in text(page, "#about") and "slower" in text(page, "#latency")


def test_the_slider_moves_through_time(open_page, run):
    page = open_page(run)
    heights = "[...document.querySelectorAll('#gates rect.bar')].map(bar => bar.getAttribute('height'))"
    assert text(page, "#epoch-label") == "epoch 5 of 5"
    end = page.evaluate(heights)
    click(page, "#epoch-slider", across=0.02)
    assert text(page, "#epoch-label") == "epoch 1 of 5"
    start = page.evaluate(heights)
    assert start != end and float(start[0]) == 0 < float(end[0])  # gates went with their channels
    assert "0 removed" in text(page, "#gates .reading")
    choose = "(c => {{ c.value = {}; c.dispatchEvent(new Event('change')); }})(document.querySelector('#layer-choice'))"
    page.evaluate(choose.format(0))
    assert page.evaluate(heights) != start and text(page, "#gates .reading").startswith("16 gates")


def test_the_mouse_reads_numbers(open_page, run):
    page = open_page(run)
    before = text(page, "#course .legend")
    x, y, width, height = box(page, "#course svg")
    page.mouse("mouseMoved", x + 60, y + height / 2)
    assert text(page, "#course .legend").startswith("epoch 1") and not before.startswith("epoch 1")
    page.mouse("mouseMoved", x + width / 2, y - 30)
    assert text(page, "#course .legend") == before
    x, y, width, height = box(page, "#widths svg")
    page.mouse("mouseMoved", x + width - 3, y + height / 2)
    assert text(page, "#widths .reading").startswith("fc: ")


def test_the_table_sorts_and_opens_runs(open_page, runs):
    page = open_page(*runs)
    names = "[...document.querySelectorAll('#runs tbody tr')].map(row => row.cells[0].innerText.split(/[ (]+/)[1])"
    assert page.evaluate(names) == ["first", "second", "third", "fourth", "fifth"]
    accuracies = page.evaluate(
        "JSON.parse(document.getElementById('data').textContent).runs.map(r => r.after.accuracy)"
    )
    ordered = sorted(page.evaluate(names), key=dict(zip(page.evaluate(names), accuracies, strict=True)).get)
    click(page, "#runs th button", 1)
    assert page.evaluate(names) == ordered != ["first", "second", "third", "fourth", "fifth"]
    click(page, "#runs th button", 1)
    assert page.evaluate(names) == ordered[::-1]
    click(page, "#runs th button", 0)
    assert page.evaluate(names) == ["fifth", "first", "fourth", "second", "third"]
    assert page.evaluate("document.querySelectorAll('th[aria-sort]').length") == 1
    assert text(page, "#run h1") == "first"
    click(page, "#runs td button", 0)
    assert text(page, "#run h1") == "fifth" and "not finished: 2 of 5" in text(page, "#run .warn")


def test_nothing_is_said_of_a_line_that_is_not_there(open_page, runs):
    page = open_page(runs[0], runs[4])  # the second is not finished
    legends = page.evaluate("[...document.querySelectorAll('.legend')].map(each => each.innerText).join(' ')")
    assert "No line: of each data set one run at most is finished." in legends and "Pareto" not in legends


def test_the_front_is_drawn_and_its_points_open_runs(open_page, runs):
    page = open_page(*runs)
    best = "[...document.querySelectorAll('.dot.blue')].map(dot => dot.getAttribute('aria-label'))"
    assert set(page.evaluate(best)) == {"first", "second", "third"}
    assert page.evaluate("document.querySelectorAll('.dot').length") == 4  # the unfinished one is left out
    line = "document.querySelector('.line.front').getAttribute('d')"
    drawn = page.evaluate(line)
    assert drawn.count("H") == 2
    click(page, ".dot", 3)
    assert text(page, "#run h1") == "fourth"
    page.evaluate(
        "(c => { c.value = 'multiply_adds'; c.dispatchEvent(new Event('change')); })"
        "(document.querySelector('#size-choice'))"
    )
    assert "multiply-adds" in page.evaluate("document.querySelector('#trade-off svg').textContent")
    assert page.evaluate(line) != drawn


def test_runs_of_nearly_one_size_have_different_numbers_on_the_axis(open_page, run, folder):
    near = [copy_run(run, folder / "near" / name) for name in ("a", "b")]
    for path, parameters in zip(near, (560_018, 562_087), strict=True):
        change_json(path / "result.json", parameters=parameters)
    page = open_page(*near)
    ticks = page.evaluate("[...document.querySelectorAll('#trade-off svg text')].map(text => text.textContent)")
    numbers = [tick for tick in ticks if tick.endswith(" k")]
    assert len(numbers) > 2 and len(set(numbers)) == len(numbers)


def test_light_dark_and_a_phone(open_page, runs):
    colours = []
    for dark in (False, True):
        page = open_page(*runs, dark=dark)
        colours.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(set(colours)) == 2
    page.resize(360, 700)
    page.evaluate("new Promise(done => setTimeout(done, 100))")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate("document.querySelector('#course svg').getBoundingClientRect().width") < 360


def test_a_long_name_does_not_widen_a_phone(open_page, run, tmp_path):
    page = open_page(copy_run(run, tmp_path / ("a_very_long_name_" * 10)), run, width=360, height=700)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_a_trials_name_is_on_one_line(open_page, run, tmp_path):
    page = open_page(*(copy_run(run, tmp_path / f"strength=0.0{i}") for i in (1, 2)), width=1280)
    height = page.evaluate("document.querySelector('td button').getBoundingClientRect().height")
    assert text(page, "td button") == "1. strength=0.01" and 10 < height < 30


def test_a_run_without_gates_is_not_told_to_close_some(open_page, run, tmp_path):
    folder = copy_run(run, tmp_path / "plain")
    recipe = ("model.name = 'resnet'", "data.source = 'npz'", "train.epochs = 5", "gates.kind = 'none'")
    (folder / "recipe.toml").write_text("\n".join(recipe))
    (folder / "gates.jsonl").unlink()
    page = open_page(folder)
    assert "trained without gates" in text(page, "#gates") and "trained without gates" in text(page, "#curve")


def test_names_are_text_whatever_they_say(open_page, run, tmp_path):
    hostile = "<img src=x onerror='window.hacked = 1'>"
    folder = copy_run(run, tmp_path / hostile)
    add_event(folder, "</script><script>window.hacked = 2</script>")
    page = open_page(folder, run)
    assert text(page, "#run h1") == hostile
    assert page.evaluate("typeof window.hacked") == "undefined"
    assert page.evaluate("document.querySelectorAll('img').length") == 0
    assert "window.hacked = 2" in page.evaluate("document.querySelector('#course details').textContent")


def test_a_run_without_its_small_network_does_not_claim_to_be_whole(open_page, run, tmp_path):
    folder = copy_run(run, tmp_path / "copied")
    shutil.rmtree(folder / "small")
    assert "lacks its small network" in text(open_page(folder), "#widths")
    result = json.loads((folder / "result.json").read_text())
    change_json(folder / "result.json", parameters=result["parameters_full"])
    assert "removed nothing" in text(open_page(folder), "#widths")


def test_a_run_that_has_nothing_yet(open_page, run, tmp_path):
    folder = interrupt(copy_run(run, tmp_path / "new"), 0)
    page = open_page(folder)
    assert "0 of 5 epochs are done" in text(page, ".warn")
    assert "No epoch is finished yet" in text(page, "#course")
    assert "NaN" not in text(page, "body")


def test_the_browser_tells_of_errors(tmp_path):
    (tmp_path / "bad.html").write_text("<script>console.error('one'); missing()</script><img src='nowhere.png'>")
    with chromium.Page(chromium.find()) as page:
        page.open(tmp_path / "bad.html")
        assert len(page.errors) >= 3
