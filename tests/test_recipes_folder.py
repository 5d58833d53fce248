"""The recipes that come with the library: they load, their networks exist, and README.md lists each with its row."""

import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from narrowgate import models
from narrowgate.schedules import paper
from narrowgate.train.gating import attach
from narrowgate.train.recipe import Recipe, RecipeError

FOLDER = Path(__file__).parent.parent / "recipes"
FILES = sorted(FOLDER.glob("*.toml"))
NAMES = [path.stem for path in FILES]
SHAPES = {"mnist": (1, 28, 28), "cifar100": (3, 32, 32), "folder": (3, 224, 224), "digits": (1, 8, 8)}
OWN = tuple(name for name in NAMES if name.startswith(("digits-", "ours-", "rival-")))
CLASSES = {"mnist": 10, "cifar100": 100, "folder": 1000, "digits": 10}


def comment_of(path):
    """The comment that a recipe starts with, as one line."""
    lines = path.read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
    assert all(line.startswith("# ") for line in lines)
    return " ".join(line.removeprefix("# ").strip() for line in lines)


def rows_of_readme():
    """The rows of README.md's tables: file, link target, and the other cells."""
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| \[([\w.-]+)\]\(([\w.-]+)\) \| (.*) \|$", text, re.MULTILINE)
    return {name: (target, cells.split(" | ")) for name, target, cells in found}, len(found)


def numbers(text):
    return re.findall(r"\d+(?:-\d+){3}|\d+\.\d+ %|\d+ %|\d+\.\d+ M", text)


def test_there_is_one_for_each_row_of_the_paper():
    counts = Counter("-".join(name.split("-")[:2]) for name in NAMES)
    assert counts == {
        "mnist-lenet5": 4,
        "cifar100-densenet40": 10,
        "cifar100-mobilenetv2": 10,
        "cifar100-resnet164": 11,
        "imagenet-resnet50": 6,
        "imagenet-mobilenetv2": 5,
        "digits-small": 1,
        "ours-cifar100": 4,
        "ours-mnist": 1,
        "rival-mnist": 6,
    }


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_recipe_loads_and_writes_itself_again(path):
    recipe = Recipe.load(path)
    assert Recipe.from_toml(recipe.to_toml()) == recipe
    with pytest.raises(RecipeError, match=re.escape(path.name)):
        Recipe.load(path, ["train.epochs=0"])


def test_no_two_recipes_are_the_same():
    digests = Counter(Recipe.load(path).digest() for path in FILES)
    assert not [path.name for path in FILES if digests[Recipe.load(path).digest()] > 1]


@pytest.mark.parametrize("path", [path for path in FILES if path.stem not in OWN], ids=lambda path: path.stem)
def test_name_says_what_the_recipe_does(path):
    recipe = Recipe.load(path)
    data, network, *rest = path.stem.split("-")
    words = "-".join(rest)
    assert {"mnist": "mnist", "cifar100": "cifar100", "imagenet": "folder"}[data] == recipe.data.source
    assert network == recipe.model.name.removeprefix("torchvision/").replace("_", "")
    kind = {"baseline": "none"}.get(words) or ("linear" if "lin" in rest else "exponential")
    assert recipe.gates.kind == kind
    penalty = "l2" if words.startswith("l2") else "bounded-l1" if words.startswith("bounded-l1") else "l1"
    assert recipe.penalty.kind == penalty
    assert bool(recipe.penalty.strength) == (words != "baseline" and penalty != "l2")
    assert callable(recipe.penalty.sigma) == words.endswith("scheduled")
    if strength := re.search(r"\de-\d$", words):
        given = recipe.optimizer.weight_decay if penalty == "l2" else recipe.penalty.strength
        assert given == float(strength[0])
    assert recipe.finish.finetune_epochs == (3 if kind == "linear" else 0)
    assert recipe.finish.threshold == (1e-4 if kind == "linear" else None)
    assert recipe.gates.init == (0.5 if kind == "linear" else None)


@pytest.mark.parametrize(("network", "key"), [("resnet164", "resnet-164"), ("densenet40", "densenet-40")])
def test_schedules_are_the_papers(network, key):
    for penalty in ("l1-exp", "l1-lin", "bounded-l1-exp", "bounded-l1-lin"):
        recipe = Recipe.load(FOLDER / f"cifar100-{network}-{penalty}-scheduled.toml")
        assert recipe.strength_schedule() == paper(key)["strength"]
        assert recipe.sigma_schedule() == paper(key)["sigma"]
        assert recipe.optimizer.weight_decay == 5e-4
        mobile = Recipe.load(FOLDER / f"cifar100-mobilenetv2-{penalty}-scheduled.toml")
        assert mobile.sigma_schedule() == paper("mobilenet-v2")["sigma"]


@pytest.mark.parametrize(
    ("prefix", "epochs", "drops", "lr"),
    [
        ("mnist-lenet5-l2", 200, (100, 150), 0.1),
        ("mnist-lenet5-l1", 60, (30, 45), 0.1),
        ("mnist-lenet5-bounded-l1", 60, (30, 45), 0.1),
        ("cifar100-resnet164", 240, (120, 200, 220), 0.1),
        ("cifar100-densenet40", 130, (100, 110, 120), 0.1),
        ("cifar100-mobilenetv2", 240, (200, 220), 0.1),
        ("imagenet-resnet50", 100, (30, 60, 90), 0.1),
        ("imagenet-mobilenetv2", 100, (30, 60, 90), 0.045),
    ],
)
def test_lengths_and_rates_are_the_papers(prefix, epochs, drops, lr):
    found = [Recipe.load(path) for path in FILES if path.stem.startswith(prefix)]
    assert found
    for recipe in found:
        assert (recipe.train.epochs, recipe.lr.drops, recipe.optimizer.lr) == (epochs, drops, lr)
        assert (recipe.train.batch, recipe.optimizer.momentum, recipe.lr.factor) == (128, 0.9, 0.1)


def test_networks_can_be_built_and_gated():
    pytest.importorskip("torchvision")
    seen = {}
    for recipe in map(Recipe.load, FILES):
        if recipe.gates.kind != "none":
            seen[recipe.model.name, tuple(recipe.model.options.items()), str(recipe.gates)] = recipe
    # Five networks with two kinds of gates, LeNet-5, our own four, and six rivals.
    assert len(seen) == 5 * 2 + 5 + 6
    for recipe in seen.values():
        source, skip = recipe.data.source, recipe.gates.skip
        with torch.device("meta"):
            model = models.build(recipe.model.name, CLASSES[source], image_shape=SHAPES[source], **recipe.model.options)
        layers = [name for name, _ in model.named_modules()]
        assert all(pattern in layers for pattern in skip if "*" not in pattern)
        gates = attach(recipe, model.to_empty(device="cpu"), torch.zeros(2, *SHAPES[source]))
        assert gates.count > 100 and not set(skip) & set(gates)


def test_readme_lists_every_recipe_once_and_nothing_else():
    rows, count = rows_of_readme()
    assert sorted(rows) == [path.name for path in FILES] and count == len(rows)
    assert all(name == target for name, (target, _) in rows.items())


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_comment_gives_row_numbers_and_choices(path):
    comment = comment_of(path)
    if path.stem in OWN:
        assert "Not of the paper" in comment
        return
    for part in ("the paper's ", "Paper: ", "Given there: ", "Not given, chosen here: "):
        assert part in comment
    (_, (row, size, result)) = rows_of_readme()[0][path.name]
    assert re.match(r"(Table|Figure) \d", row)[0] in comment
    listed = numbers(f"{size} {result}")
    assert listed or "no number for this row" in comment
    assert not [number for number in listed if number not in comment]


def test_numbers_of_the_text_are_all_there():
    rows, _ = rows_of_readme()
    cells = {name: " ".join(cells) for name, (_, cells) in rows.items()}
    for name, size, result in (
        ("mnist-lenet5-l2-exp-5e-4", "8-19-117-24", "0.79 %"),
        ("mnist-lenet5-l1-exp-1e-3", "8-13-37-25", "0.98 %"),
        ("mnist-lenet5-bounded-l1-exp-4e-3", "9-17-43-25", "0.92 %"),
        ("mnist-lenet5-bounded-l1-exp-3e-3", "9-20-54-27", "0.67 %"),
        ("cifar100-resnet164-bounded-l1-exp-1e-4", "30.73 %", "77.28 %"),
        ("cifar100-resnet164-bounded-l1-exp-5e-4", "47 %", "76.58 %"),
        ("cifar100-resnet164-bounded-l1-exp-scheduled", "58.5 %", "76.23 %"),
        ("cifar100-mobilenetv2-l1-exp", "75.83 %", "75.33 %"),
        ("cifar100-densenet40-l1-exp-scheduled", "69 %", "74.42 %"),
        ("imagenet-mobilenetv2-l1-exp", "3.00 M", "69.9 %"),
    ):
        assert size in cells[f"{name}.toml"] and result in cells[f"{name}.toml"]
