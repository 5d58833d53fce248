"""The paper's tables from result files: its numbers, what a run's record holds, and a page that is up to date."""

import dataclasses
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lightning")
pytest.importorskip("typer")

from engine_helpers import LENET, rows, train, write_images
from typer.testing import CliRunner

from narrowgate import cli
from narrowgate.reproduce import cifar, imagenet, mnist, paper
from narrowgate.reproduce.page import check_page, sections, with_tables, write_page
from narrowgate.reproduce.paper import Kind
from narrowgate.reproduce.record import RecordError, collect, command, write_record
from narrowgate.reproduce.runs import Run, groups, kind_of, load_runs, mean_and_spread
from narrowgate.reproduce.tables import NO_IMAGENET, NO_RUN, short
from narrowgate.train.recipe import Recipe

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
PAPER_TEXT = sorted((ROOT.parent / "shared" / "paper").glob("*.txt"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of LeNet-5 on a few small images."""
    folder = tmp_path_factory.mktemp("runs")
    data = write_images(folder / "images.npz", side=28)
    train(LENET, folder / "run", data, "train.seed=7", 'shrink.layout="scatter"')
    return folder / "run"


def run(**changes):
    """A run of MobileNetV2 that is as good as the paper's."""
    start = Run(
        "a.json", "cifar100", "mobilenetv2", Kind("l1", "exp"), "λ1 3e-4", "{}", 0, 240, 3e-4, 0.76, 0.76, None, 10**5,
        0.8, 10**6, 1.0,
    )  # fmt: skip
    return dataclasses.replace(start, **changes)


def cells(table, key):
    """The rows of a table that begin with a word."""
    return [row for row in table.rows if row[0] == key]


# --- the paper's numbers


@pytest.mark.skipif(not PAPER_TEXT, reason="the paper's text is not here")
def test_every_number_of_the_paper_is_in_its_text():
    text = PAPER_TEXT[0].read_text().replace("\\", "")
    numbers = [("-".join(map(str, row.kept)), f"{row.error:g}") for row in paper.TABLE_1]
    numbers += [(f"{row.pruned:g}%", f"{row.accuracy:g}%") for row in paper.FIGURE_2 if row.pruned is not None]
    numbers += [(f"{r.top1:g}", f"{r.top5:g}", f"{r.parameters:.2f}", f"{r.flops:.1f} M") for r in paper.TABLE_2]
    numbers += [(f"{r.sparsity:g}%", f"{r.top1_lost:g}%") for r in paper.FIGURE_4 if r.sparsity is not None]
    wanted = {number for row in numbers for number in row}
    assert len(wanted) > 30 and not [number for number in wanted if number not in text]
    assert "9-20-54-28" not in text


def test_every_row_has_a_recipe_of_its_kind():
    for row in paper.FIGURE_2:
        recipe = Recipe.load(ROOT / "recipes" / f"{row.recipe}.toml")
        assert (recipe.model.name, kind_of(recipe.tables())) == (row.network, row.kind), row.recipe
        assert recipe.train.epochs == paper.EPOCHS[row.network]
    for line in paper.TABLE_1:
        if line.recipe:
            recipe = Recipe.load(ROOT / "recipes" / f"{line.recipe}.toml")
            strength = recipe.penalty.strength or recipe.optimizer.weight_decay
            assert (kind_of(recipe.tables()).regulariser, strength) == (line.regulariser, line.strength)
            assert recipe.train.epochs == line.epochs


def test_weights_of_lenet():
    assert paper.lenet_weights(paper.LENET) == 430_500


# --- records


def test_record_holds_the_run(finished):
    made = collect(finished)
    result, log = json.loads((finished / "result.json").read_text()), rows(finished)
    assert made["seed"] == 7 and made["recipe"]["penalty"]["strength"] == 0.8
    assert made["parameters"] == result["parameters"] < made["parameters_full"] == 431_080 - 6 * 501
    assert made["accuracy"]["gated"] == made["accuracy"]["after_removal"] == round(result["accuracy"], 6)
    assert made["accuracy"]["after_fine_tuning"] is None
    assert made["course"]["train_loss"] == [round(row["train_loss"], 5) for row in log]
    assert {len(column) for column in made["course"].values()} == {5}
    assert made["versions"].keys() == {"narrowgate", "torch"} and made["recipe"]["data"]["path"] == ""
    conv1, features, fc1 = made["architecture"]["conv1"], made["inputs"]["fc1"], made["architecture"]["fc1"]
    conv2 = made["architecture"]["conv2"]
    assert (conv1[1], conv2[1], features[1], fc1[1]) == paper.LENET
    widths = (conv1[0], conv2[0], features[0], fc1[0])
    biases = widths[0] + widths[1] + widths[3] + 10
    other_classes = 6 * (widths[3] + 1)  # these images have four
    assert made["architecture"]["fc2"] == [4, 4]
    assert made["parameters"] == paper.lenet_weights(widths) + biases - other_classes


def test_record_is_one_small_file_that_the_tables_read(finished, tmp_path):
    made = collect(finished)
    write_record(tmp_path / "results" / "mnist" / "a.json", made)
    text = (tmp_path / "results" / "mnist" / "a.json").read_text()
    assert json.loads(text) == json.loads(json.dumps(made)) and str(finished) not in text
    assert [path.name for path in (tmp_path / "results" / "mnist").iterdir()] == ["a.json"]
    (read,) = load_runs(tmp_path / "results")
    assert (read.network, read.kind, read.seed, read.epochs) == ("lenet5", Kind("l1", "exp"), 7, 5)
    assert read.widths[2] == made["inputs"]["fc1"][0] and "proximal" in read.settings


def test_record_of_240_epochs_is_below_60_kilobytes(finished, tmp_path):
    made = collect(finished)
    made["course"] = {key: [column[-1]] * 240 for key, column in made["course"].items()}
    made["architecture"] = {f"stages.2.17.conv{i}": [1234, 2345] for i in range(200)}
    write_record(tmp_path / "a.json", made)
    assert (tmp_path / "a.json").stat().st_size < 60_000


def test_the_command_names_the_recipe_and_what_was_changed(finished, tmp_path):
    base = tmp_path / "lenet.toml"
    base.write_text(LENET)
    words = "narrowgate train recipes/lenet.toml --set train.seed=7 --set 'shrink.layout=\"scatter\"'"
    assert collect(finished, base)["command"] == words


def test_the_command_of_another_method_says_what_that_method_would_change():
    base = ROOT / "recipes" / "mnist-lenet5-l1-exp-1e-3.toml"
    settings = ["method.name=slimming", "penalty.strength=1e-3", "model.options.norm=true"]  # the first is the file's
    run = Recipe.load(base, settings)
    words = shlex.split(command(run, base))
    again = Recipe.load(base, words[words.index("--set") + 1 :: 2])
    assert again == run and again.penalty.strength == 1e-3 and len(words) < 12


def test_accuracy_after_fine_tuning_is_not_that_after_removal(finished, tmp_path):
    for name in ("recipe.toml", "metrics.jsonl", "small/plan.json", "small/meta.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((finished / name).read_bytes())
    result = json.loads((finished / "result.json").read_text())
    (tmp_path / "result.json").write_text(
        json.dumps({**result, "finetune_epochs": 2, "accuracy": 0.5, "accuracy_removed": 0.4})
    )
    accuracy = collect(tmp_path)["accuracy"]
    assert accuracy["after_fine_tuning"] == accuracy["final"] == 0.5
    assert accuracy["after_removal"] == 0.4 and accuracy["gated"] == round(result["accuracy_gated"], 6)


def test_an_unfinished_run_has_no_record(finished, tmp_path):
    (tmp_path / "recipe.toml").write_text((finished / "recipe.toml").read_text())
    with pytest.raises(RecordError, match=r"lacks metrics\.jsonl, result\.json"):
        collect(tmp_path)
    for folder in (tmp_path / "nowhere", tmp_path / "recipe.toml"):
        with pytest.raises(RecordError, match="is not the folder of a run: give one that narrowgate train wrote"):
            collect(folder)


@pytest.mark.parametrize("lines", [0, 2])
def test_a_log_that_lacks_epochs_is_no_record(finished, tmp_path, lines):
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    log = folder / "metrics.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:lines]))
    with pytest.raises(RecordError, match=rf"metrics\.jsonl has {lines} lines for 5 epochs: it is damaged"):
        collect(folder)


@pytest.mark.parametrize("name", ["result.json", "small/plan.json", "small/meta.json"])
@pytest.mark.parametrize("content", ["[]", '{"accuracy": 1.0, "cuts": []}'])
def test_a_run_whose_files_lack_something_is_no_record(finished, tmp_path, name, content):
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / name).write_text(content)
    with pytest.raises(RecordError, match=r"run can't be read as a run \(\w+: .*\): copy the run again"):
        collect(tmp_path / "run")


def test_a_damaged_result_file_is_named(tmp_path):
    (tmp_path / "a.json").write_text('{"what": "a run of narrowgate train"}')
    with pytest.raises(RecordError, match=r"a\.json can't be read as a result"):
        load_runs(tmp_path)


def test_files_that_are_no_results_are_passed_over(tmp_path):
    (tmp_path / "a.json").write_text("[1, 2]")
    (tmp_path / "b.json").write_text('{"what": "something else"}')
    assert load_runs(tmp_path) == []


@pytest.mark.parametrize("gate", ["hard-concrete", "scaling", "filter-l1", "filter-l2"])
def test_runs_with_other_peoples_gates_are_read(tmp_path, gate):
    record = json.loads((RESULTS / "mnist" / "l1-exp-1e-3-seed0.json").read_text())
    record["recipe"]["gates"]["kind"] = gate
    (tmp_path / "rival.json").write_text(json.dumps(record))
    (read,) = load_runs(tmp_path)
    assert read.kind == Kind("l1", gate) and mnist.tables([read])[1].rows[0][0] == f"l1 + {gate}"


# --- tables


def test_mnist_rows_have_our_numbers_beside_the_papers():
    results = mnist.tables(load_runs(RESULTS))[0]
    records = [json.loads((RESULTS / "mnist" / f"l2-exp-5e-4-seed{seed}.json").read_text()) for seed in range(3)]
    (row,) = cells(results, "l2, 5e-4")
    assert row[1:4] == ("8-19-117-24", "7,048", "0.79") and row[7] == "3 (seeds 0, 1, 2)"
    errors = [100 * (1 - record["accuracy"]["final"]) for record in records]
    assert row[6] == mean_and_spread(errors)
    assert row[5] == f"{sum(record['parameters'] for record in records) / 3:,.0f}"


def test_settings_that_were_best_on_held_out_images_are_marked(tmp_path):
    (tmp_path / "tries").mkdir()
    for schedule in ("step", "cosine"):
        text = (RESULTS / "mnist" / "validation" / f"l1-1e-3_0.1_{schedule}.json").read_text()
        (tmp_path / "tries" / f"{schedule}.json").write_text(text)
        (tmp_path / f"{schedule}.json").write_text(json.dumps({**json.loads(text), "error_on": "test"}))
    rows = cells(mnist.tables(load_runs(tmp_path))[0], "l1, 1e-3")
    assert [("cosine" in row[-1], "chosen" in row[-1]) for row in rows] == [(True, True), (False, False)]


def test_mnist_runs_that_are_not_the_papers_stand_apart():
    first, others = mnist.tables(load_runs(RESULTS))[:2]
    assert not [row for row in first.rows if "shifted" in row[-1]]
    smallest = others.rows[0]
    assert smallest[5] == "l2, 5e-4; l1, 1e-3; bounded-l1, 4e-3"  # more weights, and more errors
    largest = others.rows[-1]
    assert largest[5] == "l2, 5e-4" and largest[7] == "bounded-l1, 3e-3"


def test_records_of_earlier_versions_count_with_the_same_settings(tmp_path):
    """A key that came later has its default, one that went was off, and another value is another setting."""
    record = json.loads((RESULTS / "mnist" / "l1-exp-1e-3-seed2.json").read_text())
    tables = record["recipe"]
    older = {name: values for name, values in tables.items() if name != "method"}
    older["gates"] = {key: value for key, value in tables["gates"].items() if key != "groups"} | {"blocks": False}
    older["train"] = {**tables["train"], "seed": 3, "evaluate_every": 7}
    other = {**tables, "gates": {**tables["gates"], "weight_decay": 0.0}}
    for name, recipe in (("a", tables), ("b", older), ("c", other)):
        (tmp_path / f"{name}.json").write_text(json.dumps({**record, "recipe": recipe}))
    assert [[run.file for run in group] for group in groups(load_runs(tmp_path))] == [["a.json", "b.json"], ["c.json"]]


def test_rows_without_a_run_say_so():
    assert {row[4] for row in mnist.tables([])[0].rows} == {NO_RUN, "cited there"}
    for table in cifar.tables([]):
        assert {row[3] for row in table.rows} == {NO_RUN} and len(table.rows) >= 10
    tables = imagenet.tables([], RESULTS)
    assert {row[5] for row in tables[0].rows} == {NO_IMAGENET} == {row[3] for row in tables[1].rows}


@pytest.mark.parametrize(
    ("changes", "reached"),
    [
        ({}, "both"),
        ({"accuracy": 0.7532}, "size"),
        ({"pruned": 0.7582}, "accuracy"),
        ({"accuracy": 0.7532, "pruned": 0.7582}, "neither"),
    ],
)
def test_reached_is_what_is_not_worse(changes, reached):
    (row,) = cells(cifar.tables([run(**changes)])[0], "l1 + exp")
    assert row[6] == reached


def test_seeds_are_counted_together_and_other_settings_apart():
    runs = [run(), run(seed=1, accuracy=0.78), run(config="other", settings="λ1 1e-3")]
    first, second = cells(cifar.tables(runs)[0], "l1 + exp")
    assert first[4:6] == ("77.00 ± 1.41", "2 (seeds 0, 1)") and second[5] == "1 (seed 0)"


@pytest.mark.parametrize("change", [{"epochs": 60}, {"validation": 0.7}, {"steered": True}])
def test_short_steered_and_validation_runs_fill_no_row_of_the_paper(change):
    tables = cifar.tables([run(**change)])
    (row,) = cells(tables[0], "l1 + exp")
    assert row[3] == NO_RUN and len(tables) == 4
    assert ("70.00" in tables[3].rows[0]) == ("validation" in change)


@pytest.mark.parametrize(
    "change", [{"steered": True}, {"kind": Kind("l0", "hard-concrete")}, {"strength": None}, {"epochs": 59}]
)
def test_mnist_runs_of_other_kinds_stand_apart(change):
    mine = run(data="mnist", network="lenet5", widths=(9, 12, 36, 21), strength=1e-3)
    first, second = mnist.tables([mine])[0], mnist.tables([dataclasses.replace(mine, **change)])
    assert cells(first, "l1, 1e-3")[0][4] == "9-12-36-21" and cells(second[0], "l1, 1e-3")[0][4] == NO_RUN
    assert second[1].rows[0][1:4] == ("9-12-36-21", "3,891", "24.00")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("shrink.batch", 512, "batches up to 512"),
        ("finish.close", 0.5, "50% closed at the end"),
        ("penalty.weights", "parameters", "weighted by parameters"),
        ("gates.rescale", 0.1, "scales x0.1"),
        ("data.augment", "warp", "images warped"),
    ],
)
@pytest.mark.parametrize("data", ["mnist", "cifar100"])
def test_what_the_paper_does_not_do_stands_apart_and_is_told(tmp_path, data, key, value, words):
    record = json.loads((RESULTS / "mnist" / "l1-exp-1e-3-seed0.json").read_text())
    tables = record["recipe"]
    if data == "cifar100":
        tables["model"]["name"], tables["data"]["augment"] = "mobilenetv2", "crop-flip"
        record |= {"dataset": data, "epochs": 240}
    (tmp_path / "a.json").write_text(json.dumps(record))
    table, _, name = key.partition(".")
    tables[table][name] = value
    (tmp_path / "b.json").write_text(json.dumps(record))
    papers, own = load_runs(tmp_path)
    for run, is_papers in ((papers, True), (own, False)):
        beside = cifar.is_result(run) if data == "cifar100" else mnist.row_of(run) is not None
        assert beside == is_papers and (words in run.settings) != is_papers


def test_a_run_goes_to_the_nearest_of_two_markers():
    table = cifar.tables([run(network="resnet164", kind=Kind("bounded-l1", "exp"), pruned=0.45)])[2]
    weak, strong = cells(table, "bounded-l1 + exp")
    assert (weak[1], weak[3]) == ("30.73", NO_RUN) and (strong[1], strong[3]) == ("47.00", "45.00")


def test_imagenet_run_beside_table_2():
    mine = run(data="imagenet", parameters=2_900_000, multiply_adds=250_000_000)
    (row,) = cells(imagenet.tables([mine], RESULTS)[0], "l1 + exp")
    assert row[1] == "3.00" and row[5:8] == ("2.90", "250.0", "76.00")


def test_a_note_explains_only_words_that_its_table_has():
    for table in (table for part in sections(RESULTS).values() for table in part):
        text = " ".join(cell for row in table.rows for cell in row).lower()
        explained = [word for word in ("chosen", "with biases") if f"{word}: " in table.note.lower()]
        assert all(word in text for word in explained) and not table.note.startswith("-"), table.title


def test_numbers_as_people_write_them():
    assert [short(v) for v in (0, 5e-4, 1.5e-3, 0.1, 1e-12)] == ["0", "5e-4", "1.5e-3", "0.1", "1e-12"]
    assert mean_and_spread([1.0]) == "1.00" and mean_and_spread([1.0, 3.0]) == "2.00 ± 1.41"


# --- the page and the command


def test_the_page_is_up_to_date_with_the_results():
    page = (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")
    assert with_tables(page, sections(RESULTS)) == page, (
        "run: narrowgate reproduce all --out docs/img --write docs/reproduction.md"
    )


def test_a_new_result_makes_the_page_stale(tmp_path):
    page = (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")
    record = json.loads((RESULTS / "mnist" / "l2-exp-5e-4-seed0.json").read_text())
    record["accuracy"]["final"] = 0.9969
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "a.json").write_text(json.dumps(record))
    (tmp_path / "page.md").write_text(page)
    assert write_page(tmp_path / "page.md", tmp_path / "results")
    assert "| 0.31 |" in (tmp_path / "page.md").read_text()
    assert not write_page(tmp_path / "page.md", tmp_path / "results")


def test_a_page_without_markers_is_left_alone(tmp_path):
    with pytest.raises(RecordError, match="0 places for 'mnist'"):
        with_tables("text", sections(RESULTS))
    (tmp_path / "page.md").write_text("text")
    with pytest.raises(RecordError, match=r"page\.md: .*it needs one: the lines <!-- mnist: begin --> and"):
        check_page(tmp_path / "page.md")
    with pytest.raises(RecordError, match=r"there is no page .*README\.md"):
        check_page(tmp_path / "README.md")
    with pytest.raises(RecordError, match="there is no folder"):
        sections(tmp_path / "nowhere")


def test_the_readmes_mnist_table_is_in_the_result_files():
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.findall(
        r"^\| (paper|ours), [^|]+ \| ([\d.-]+) \| ([\d,]+) \| ([\d.]+(?: ± [\d.]+)?) % \|", page, re.MULTILINE
    )
    first, others = mnist.tables(load_runs(RESULTS))[:2]
    known = {("paper", *row[1:4]) for row in first.rows} | {("ours", *row[4:7]) for row in first.rows}
    known |= {("ours", *row[1:4]) for row in others.rows}
    assert len(found) == 10 and not [row for row in found if row not in known]


def test_the_readmes_cifar_numbers_are_in_the_result_file():
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    (words,) = re.findall(
        r"\[([\d.]+) %\]\((results/cifar100/[^)]+)\)[^.]*\s([\d.]+) % of the parameters and ([\d.]+) %", page
    )
    record = json.loads((ROOT / words[1]).read_text())
    left = record["parameters"] / record["parameters_full"], record["multiply_adds"] / record["multiply_adds_full"]
    assert (words[0], *words[2:]) == (
        f"{100 * record['accuracy']['final']:.2f}",
        *(f"{100 * each:.1f}" for each in left),
    )
    assert record["accuracy"]["gated"] == record["accuracy"]["after_removal"]


def numbers_in(text):
    """All numbers of a text."""
    return [float(token) for token in re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", text.replace(",", ""))]


def rounds_to(number, token):
    """Whether a number is what a token shows, at the digits it shows."""
    shown = f"{number:.0e}" if "e" in token else f"{number:.{len(token.partition('.')[2])}f}"
    return float(shown) == float(token)


def test_the_readmes_measured_figures_are_in_the_files_they_name():
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    checked = 0
    for measured, file in re.findall(
        r"^\| [^|]+ \| ([^|]+) \| \[[^]]+\]\((benchmarks/[^)]+)\) \|$", page, re.MULTILINE
    ):
        known = numbers_in((ROOT / file).read_text(encoding="utf-8"))
        for token in re.findall(r"\d+\.\d+|\d+e-\d+|\d+", measured):
            assert any(rounds_to(number, token) for number in known), f"{token} is not in {file}"
            checked += 1
    assert checked >= 10 and not any(rounds_to(number, "0.123") for number in (0.124, 0.1224))


def test_no_measured_number_hides_in_the_pages_prose():
    page = (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")
    prose = re.sub(r"<!-- (\w+): begin -->.*?<!-- \1: end -->|^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    assert len(prose) < 0.7 * len(page)
    assert set(re.findall(r"\d+\.\d+|\d+ %", prose)) <= {"12.5"}


def _dashed(read):
    return "-".join(map(str, read.widths))


def test_reproduce_prints_ours_beside_the_papers():
    result = CliRunner().invoke(cli.build_app(), ["reproduce", "mnist", "--results", str(RESULTS)])
    assert result.exit_code == 0, result.output
    assert "8-19-117-24" in result.output and "CIFAR" not in result.output


@pytest.mark.parametrize("width", [80, 120, 160])
def test_tables_are_whole_in_a_terminal_of_any_width(width):
    rich = pytest.importorskip("rich.console")
    for table in (each for tables in sections(RESULTS).values() for each in tables):
        page = io.StringIO()
        rich.Console(file=page, width=width).print(table.to_fit(width))
        text = page.getvalue()
        assert max(map(len, text.splitlines())) <= width and "…" not in text
        words = {word for row in table.rows for cell in row for word in cell.replace("`", "").split()}
        assert words <= set(text.split()), table.title


def test_reproduce_prints_in_a_locale_without_its_letters():
    command = [sys.executable, "-m", "narrowgate", "reproduce", "mnist", "--results", str(RESULTS)]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert "0.78 ? 0.02" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["figures"], "say which folder"), (["mnist", "--out", "figures"], "the figures are drawn by figures or all")],
)
def test_a_place_for_figures_and_figures_go_together(arguments, message):
    result = CliRunner().invoke(cli.build_app(), ["reproduce", *arguments, "--results", str(RESULTS)])
    assert result.exit_code == 2 and message in " ".join(result.stderr.split())


def test_record_and_reproduce_say_what_is_wrong(tmp_path):
    for arguments in (["record", str(tmp_path), "--out", str(tmp_path / "a.json")], ["reproduce", "--results", "no"]):
        result = CliRunner().invoke(cli.build_app(), arguments)
        assert result.exit_code == 2 and result.output.startswith("narrowgate: ")
    assert not (tmp_path / "a.json").exists()
