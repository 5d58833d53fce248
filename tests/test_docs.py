"""The documentation: its code runs or is looked at, and its figures are in files."""

import importlib.metadata
import json
import re

import pytest
import torch
from page_helpers import DOCS, ROOT, between, blocks, examples, fences, prose, text_of

# What may stand behind a fence, and which test looks at it. Nothing else may: a block can't hide from the tests.
LOOKED_AT = {"python", "text", "console", "toml", "diff"}
NOT_RUN = {("README.md", "bibtex"): 1, ("docs/architecture.md", ""): 1, ("docs/sweeps.md", ""): 1}
COMMAND = re.compile(r"^\$ (.*)$", re.MULTILINE)


def without_trailing_spaces(text):
    return [line.rstrip() for line in text.splitlines()]


@pytest.mark.parametrize("page", [page for page in DOCS if examples(page)])
def test_python_blocks_run_one_after_the_other(page, capsys, tmp_path, monkeypatch):
    if page == "docs/sharded.md" and torch.__version__ < "2.7":
        pytest.skip("fully_shard of PyTorch 2.6 needs a GPU")
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "page"}
    for number, (code, shown) in enumerate(examples(page), 1):
        exec(compile(code, f"{page}, python block {number}", "exec"), namespace)
        output = capsys.readouterr().out
        if shown is not None:
            assert without_trailing_spaces(shown) == without_trailing_spaces(output), f"{page}, python block {number}"


def test_no_block_is_left_out():
    not_run = {}
    for page in DOCS:
        for info, _ in fences(page):
            if info not in LOOKED_AT:
                not_run[page, info] = not_run.get((page, info), 0) + 1
        assert len(examples(page)) == len(blocks("python", page)), page
    assert not_run == NOT_RUN


def test_every_text_block_is_what_a_python_block_prints():
    shown = {page: [text for _, text in examples(page) if text] for page in DOCS}
    assert len(shown["docs/removing.md"]) >= 3 and len(shown["docs/how-it-works.md"]) == 2
    assert {page: len(texts) for page, texts in shown.items()} == {page: len(blocks("text", page)) for page in DOCS}


def options_of(command):
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}


def commands():
    """All lines of console blocks that begin with $, without comments, as (page, line)."""
    lines = [
        (page, line)
        for page in DOCS
        for block in blocks("console", page)
        for line in COMMAND.findall(re.sub(r"\\\n\s*", "", block))
    ]
    return [(page, re.sub(r"\s+# .*", "", line)) for page, line in lines]


def test_commands_exist_with_their_options():
    from typer.main import get_command

    from narrowgate.cli import build_app

    known = get_command(build_app()).commands
    ours = [(page, line) for page, line in commands() if re.search(r"(^|-m )narrowgate ", line)]
    assert len(ours) > 15
    for page, line in ours:
        name, *words = re.split(r"(?:^|-m )narrowgate ", line)[1].split()
        assert name in known, f"{page}: {line}"
        unknown = {word.partition("=")[0] for word in words if word.startswith("--")} - options_of(known[name])
        assert not unknown, f"{page}: {line}: {unknown}"


def test_other_commands_name_what_is_there():
    extras = set(importlib.metadata.metadata("narrowgate").get_all("Provides-Extra"))
    makefile = (ROOT / "Makefile").read_text()
    for page, line in commands():
        assert set(re.findall(r'"(?:\.|narrowgate)\[(\w+)\]"', line)) <= extras, f"{page}: {line}"
        assert not [p for p in re.findall(r"[\w/]+\.(?:py|toml)\b", line) if "/" in p and not (ROOT / p).exists()], line
        if line.startswith("make "):
            assert re.search(rf"^{line.split()[1]}:", makefile, re.MULTILINE), line


def test_recipes_on_pages_are_recipes():
    from narrowgate.train.recipe import Recipe

    found = [block for page in DOCS for block in blocks("toml", page)]
    whole = [block for block in found if "[model]" in block]
    assert whole
    base = "[model]\nname = 'lenet5'\n[data]\nsource = 'mnist'\n[train]\nepochs = 1\n"
    for block in found:
        Recipe.from_toml(block if block in whole else base + block)


def test_every_public_name_is_in_the_reference():
    import narrowgate as ng

    documented = re.findall(r"^::: narrowgate\.([\w.]+)$", text_of("docs/api.md"), re.MULTILINE)
    names = [path.rpartition(".")[2] for path in documented]
    # One callback for each trainer, and streamed.load beside load.
    assert sorted(name for name in names if names.count(name) > 1) == ["NarrowgateCallback"] * 2 + ["load"] * 2
    assert len(set(documented)) == len(documented)
    assert {name for name in ng.__all__ if not name.startswith("__")} <= set(names)


# --- figures


def numbers(name):
    return json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())


def millions(count):
    return f"{count / 1e6:.3f}"


def rows_left():
    power = numbers("power")["networks"]
    for name, row in numbers("against_torch_pruning")["left"].items():
        counts = row["parameters"], power[name]["brute_force"], row["torch_pruning"], row["aligned"], row["scatter"]
        yield name, *map(millions, counts)


def rows_lost():
    kinds = ("torch_pruning", "drop", "exact")
    for name, draws in numbers("against_torch_pruning")["lost"].items():
        for row in draws:
            if row["shift"] in (0.0, 0.01, 0.1):
                errors = (f"{row[f'{kind}_error']:.0e} ({row[f'{kind}_parameters'] / 1e6:.2f} M)" for kind in kinds)
                yield name, f"{row['shift']:g}", *errors


def rows_speed():
    for name, row in numbers("plan_speed")["models"].items():
        yield name, *(f"{row[kind]['seconds']:.2f}" for kind in ("aligned", "scatter", "torch_pruning"))


def rows_sound():
    models = [model for name in ("soundness", "soundness_others") for model in numbers(name)["models"].values()]
    for source in dict.fromkeys(model["source"] for model in models):
        verdicts = [model["verdict"].partition(":")[0] for model in models if model["source"] == source]
        assert set(verdicts) <= {"same", "not traced", "not run"}
        yield source, str(len(verdicts)), *(str(verdicts.count(v)) for v in ("same", "not traced", "not run"))


@pytest.mark.parametrize("rows", [rows_left, rows_lost, rows_speed, rows_sound])
def test_the_comparison_has_the_figures_of_its_files(rows):
    name = rows.__name__.removeprefix("rows_")
    expected = [f"| {' | '.join(row)} |" for row in rows()]
    found = between("docs/comparison.md", name).splitlines()[2:]
    assert found == expected, "put these lines between the markers:\n" + "\n".join(expected)


# Numbers that are no measurements: definitions, versions, settings of an example.
NO_MEASUREMENT = {
    "docs/comparison.md": {"0.13", "0.3"},
    "docs/how-it-works.md": {"12.5", "0.00017"},
    "docs/start.md": {"3.10", "2.6"},
    "docs/limits.md": set(),
    "docs/index.md": set(),
    "docs/own-loop.md": set(),
}


@pytest.mark.parametrize("page", NO_MEASUREMENT)
def test_no_measured_number_hides_in_prose(page):
    assert set(re.findall(r"\d+\.\d+|\d+ ?%", prose(page))) == NO_MEASUREMENT[page]
