"""The ImageNet recipes run end to end on a few real JPEGs, and the networks are as large as the paper's."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("torchvision")
pytest.importorskip("lightning")

import torchvision
from PIL import Image
from rich.console import Console

import narrowgate as ng
from narrowgate import models
from narrowgate.reproduce import paper
from narrowgate.reproduce.runs import kind_of
from narrowgate.train.engine import run
from narrowgate.train.recipe import Recipe

ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "recipes").glob("imagenet-*.toml"))
QUICK = "imagenet-mobilenetv2-l1-exp"
PRUNED = (QUICK, "imagenet-resnet50-l1-lin")
# What makes a run of days one of seconds.
SHORT = ("train.epochs=1", "train.batch=4", "data.size=32", "data.workers=0", 'train.precision="32"', "lr.drops=[]")
# Closes gates in one epoch, which the strength would not.
SIZE = ('budget.target="params: 70%"', "shrink.every=1")
CLASSES = ("n01440764", "n01443537", "n01484850")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """``train`` and ``val`` with JPEGs of several sizes, one of them grey, in folders named as ImageNet's."""
    root = tmp_path_factory.mktemp("images")
    draw = np.random.default_rng(0)
    for split, count in (("train", 4), ("val", 2)):
        for label, name in enumerate(CLASSES):
            target = root / split / name
            target.mkdir(parents=True)
            for i in range(count):
                height, width = 40 + 8 * i, 72 - 8 * i
                pixels = draw.integers(0, 120, (height, width, 3), dtype=np.uint8)
                pixels[..., label] += 120
                image = Image.fromarray(pixels)
                (image.convert("L") if i == 1 else image).save(target / f"{name}_{i}.JPEG", quality=80)
    return root


@pytest.mark.parametrize(
    "path", [pytest.param(p, id=p.stem, marks=[] if p.stem == QUICK else pytest.mark.slow) for p in RECIPES]
)
def test_recipe_runs_on_jpegs(path, folder, tmp_path):
    pruned, linear = path.stem in PRUNED, "lin" in path.stem.split("-")
    settings = [*SHORT, *(SIZE if pruned else ())]
    if linear:
        settings.append("finish.finetune_epochs=1")
    recipe = Recipe.load(path, settings)
    result = run(
        recipe, tmp_path / "run", data_path=str(folder), accelerator="cpu", console=Console(file=io.StringIO())
    )
    share = result.parameters / result.parameters_full
    assert (0.66 < share < 0.74) if pruned else share <= 1
    assert (result.multiply_adds < result.multiply_adds_full) if pruned else (0 <= result.accuracy <= 1)
    assert (result.max_error is None) == ("baseline" in path.stem)
    assert result.finetune_epochs == (1 if linear else 0)
    name = recipe.model.name
    small = ng.load(tmp_path / "run" / "small", lambda: models.build(name, len(CLASSES), image_shape=(3, 32, 32)))
    assert sum(p.numel() for p in small.parameters()) == result.parameters
    assert small.eval()(torch.zeros(1, 3, 32, 32)).shape == (1, len(CLASSES))


def test_jpegs_are_jpegs_and_one_is_grey(folder):
    found = []
    for path in sorted(folder.rglob("*.JPEG")):
        with Image.open(path) as image:
            found.append((image.format, image.mode))
    assert len(found) == 18 and set(found) == {("JPEG", "RGB"), ("JPEG", "L")}


def test_every_imagenet_row_of_the_paper_has_a_recipe_of_its_kind():
    rows = {row.recipe: row for row in (*paper.TABLE_2, *paper.FIGURE_4)}
    assert rows.keys() == {path.stem for path in RECIPES}
    for path in RECIPES:
        recipe = Recipe.load(path)
        assert kind_of(recipe.tables()) == rows[path.stem].kind, path.stem
        strength = getattr(rows[path.stem], "strength", None)
        assert strength is None or recipe.penalty.strength == strength


def test_sizes_of_the_whole_networks():
    record = json.loads((ROOT / "results" / "imagenet" / "accounting.json").read_text())["networks"]
    sizes = {name: (counts["parameters"], counts["multiply_adds"]) for name, counts in record.items()}
    assert sizes == {"resnet50": (25_557_032, 4_089_184_256), "mobilenet_v2": (3_504_872, 300_774_272)}
    summary = ng.summarize(torchvision.models.mobilenet_v2(weights=None), torch.zeros(1, 3, 224, 224))
    assert (summary.parameters, summary.multiply_adds) == sizes["mobilenet_v2"]


def test_what_the_paper_counted():
    counts = json.loads((ROOT / "results" / "imagenet" / "accounting.json").read_text())["networks"]["mobilenet_v2"]
    whole = paper.TABLE_2[0]
    operations = counts["multiply_adds"] + 2 * counts["norm_elements"] + counts["activation_elements"]
    assert round(operations / 1e6, 1) == whole.flops
    assert round(counts["multiply_adds"] / 1e6, 1) != whole.flops
    assert round((counts["parameters"] + 3 * counts["norm_channels"]) / 1e6, 2) == whole.parameters
    assert round((counts["parameters"] + 2 * counts["norm_channels"]) / 1e6, 2) != whole.parameters
    model = torchvision.models.mobilenet_v2(weights=None)
    assert ng.attach_gates_(model).count == counts["norm_channels"]
