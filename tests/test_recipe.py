"""Recipes: what they read, what they refuse and in which words, and the rates and schedules they give."""

import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowgate.attach import KINDS as GATES
from narrowgate.penalties import KINDS as PENALTIES
from narrowgate.rivals.methods import METHODS
from narrowgate.schedules import Constant, Exponential, LinearThenExponential, Stepped, paper
from narrowgate.train.recipe import LrPart, ModelPart, PenaltyPart, Recipe, RecipeError, TrainPart
from narrowgate.train.recipe.gating import RIVALS
from narrowgate.train.recipe.parts import PARTS
from narrowgate.train.recipe.reference import reference

ROOT = Path(__file__).parent.parent
SMALL = '[model]\nname = "lenet5"\n\n[data]\nsource = "mnist"\n\n[train]\nepochs = 60\n'
DIGIT = "0123456789"


def small(*overrides):
    return Recipe.from_toml(SMALL, overrides, "small.toml")


def refused(*overrides):
    with pytest.raises(RecipeError) as caught:
        small(*overrides)
    return str(caught.value)


def refused_text(text):
    with pytest.raises(RecipeError) as caught:
        Recipe.from_toml(text, (), "small.toml")
    return str(caught.value)


def every_key():
    return [(part.TABLE, spec) for part in PARTS for spec in dataclasses.fields(part)]


def test_defaults_are_those_of_the_docs():
    recipe = small()
    assert (recipe.model.name, recipe.data.source, recipe.train.epochs) == ("lenet5", "mnist", 60)
    assert (recipe.gates.kind, recipe.gates.placement, recipe.gates.init, recipe.gates.skip) == (
        *("exponential", "before-norm", None),
        (),
    )
    assert (recipe.penalty.kind, recipe.penalty.strength, recipe.penalty.sigma, recipe.penalty.p) == ("l1", 0, 1, None)
    assert dataclasses.astuple(recipe.optimizer) == ("sgd", 0.1, 0.9, False, 0.0)
    assert dataclasses.astuple(recipe.lr) == ("step", (), 0.1, 0.0)
    assert dataclasses.astuple(recipe.train) == (60, 128, "32", 0, 0.0, 1, "auto", False, False)
    assert dataclasses.astuple(recipe.shrink) == ("end", 5, 0.05, "aligned", "exact", 1, 0)
    assert dataclasses.astuple(recipe.finish) == (None, 0.0, False, 0, 0.001)
    assert (recipe.gates.inputs, recipe.gates.groups, recipe.gates.rescale) == ((), ("channels",), 1.0)
    assert (recipe.penalty.weights, recipe.penalty.factors, recipe.penalty.accelerated) == ("equal", {}, False)
    assert recipe.method.name == "as-written"
    assert dataclasses.astuple(recipe.checkpoint) == (1, 2, True)
    assert recipe.budget.target == "" and recipe.model.options == {}


def test_choices_are_those_of_the_library():
    choices = {table + "." + spec.name: getattr(spec.metadata["kind"], "choices", ()) for table, spec in every_key()}
    assert choices["gates.kind"] == (*GATES, *RIVALS, "none") and choices["penalty.kind"] == PENALTIES
    assert choices["method.name"] == ("as-written", *METHODS)


def test_resolved_toml_names_every_key_and_gives_the_recipe_again():
    recipe = small(
        'model.options={ depth = 20, "odd key" = [1.5, "a\\"b\\u007f"], deep = { x = true } }',
        "gates.skip=['conv1', 'stages.*']",
        "penalty.kind=bounded-lp",
        "penalty.p=0.5",
        'penalty.strength={ schedule = "stepped", values = [1e-4, 5e-4], at = [30] }',
        'penalty.sigma={ schedule = "linear-then-exponential", start = 2, drop = 0.02, switch = 0.2, rate = 0.99 }',
        "lr.drops=[30, 45]",
    )
    text = recipe.to_toml()
    assert Recipe.from_toml(text) == recipe and Recipe.from_toml(text).to_toml() == text
    lines = [line.partition(" = ")[0] for line in text.splitlines()]
    for table, spec in every_key():
        start = lines.index(f"[{table}]")
        assert spec.name in lines[start : start + 12]
    assert recipe.model.options["odd key"] == [1.5, 'a"b\x7f']
    assert recipe != small()


@given(st.floats(1e-12, 1e12), st.integers(0, 2**63 - 1), st.text(st.characters(codec="utf-8"), max_size=20))
def test_numbers_and_texts_round_trip(lr, seed, path):
    recipe = small()
    recipe = dataclasses.replace(
        recipe,
        optimizer=dataclasses.replace(recipe.optimizer, lr=lr),
        train=dataclasses.replace(recipe.train, seed=seed),
        data=dataclasses.replace(recipe.data, path=path),
    )
    assert Recipe.from_toml(recipe.to_toml()) == recipe


def test_load_reads_a_file_and_names_it_in_errors(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(SMALL)
    assert Recipe.load(path, ["train.epochs=3"]).train.epochs == 3
    path.write_text(SMALL.replace("60", "0"))
    with pytest.raises(RecipeError, match=r"mine\.toml: train\.epochs = 0: must be a whole number, 1 or more"):
        Recipe.load(str(path))
    with pytest.raises(RecipeError, match=r"mine\.tml: no such recipe; did you mean mine\.toml\?"):
        Recipe.load(tmp_path / "mine.tml")
    with pytest.raises(RecipeError, match=r"cifar100\.toml: no such recipe; .* has mine\.toml$"):
        Recipe.load(tmp_path / "cifar100.toml")
    with pytest.raises(RecipeError, match=r"cifar100\.toml: no such recipe; give a TOML file"):
        Recipe.load(tmp_path / "nowhere" / "cifar100.toml")
    with pytest.raises(RecipeError, match="can't be read as a recipe"):
        Recipe.load(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[modle]\nname = 'x'", ["small.toml: unknown table [modle]", "did you mean model?"]),
        (SMALL + "epoch = 3", ["unknown key train.epoch", "[train] takes epochs, batch", "did you mean epochs?"]),
        (SMALL + "weight_decay = 0.1", ["did you mean gates.weight_decay or optimizer.weight_decay?"]),
        ("epochs = 3\n" + SMALL, ["epochs = 3 stands outside a table", "put it under [train]"]),
        ("lr = 0.1\n" + SMALL, ["lr = 0.1: must be a table, [lr]"]),
        ("answer = 42", ["answer = 42 stands outside a table", "tables only"]),
        (SMALL.replace("epochs = 60", ""), ["train.epochs is missing", "a whole number, 1 or more"]),
        (SMALL.replace('source = "mnist"', ""), ["data.source is missing", '"npz", "mnist", "cifar10"']),
        ('[data]\nsource = "mnist"\n[train]\nepochs = 1', ["model.name is missing"]),
        ("[model", ["small.toml: not valid TOML"]),
        (SMALL + "precision = 32", ['train.precision = 32: must be a text, "32" or "bf16"']),
        (SMALL + "epochs = 61", ["not valid TOML"]),
    ],
)
def test_errors_of_a_file_name_the_thing_and_the_remedy(text, words):
    message = refused_text(text)
    assert not [word for word in words if word not in message], message


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.batch=true", "train.batch = true: must be a whole number, 1 or more"),
        ("train.batch=64.0", "train.batch = 64.0: must be a whole number, 1 or more"),
        ("optimizer.lr=false", "optimizer.lr = false: must be a number, above 0"),
        ("optimizer.lr=nan", "optimizer.lr = nan: must be a number, above 0"),
        ("optimizer.lr=inf", "optimizer.lr = inf: must be a number, above 0"),
        (f"train.epochs=1{'0' * 400}", "must be a whole number, 1 or more"),
        ("optimizer.lr=1" + "0" * 400, "must be a number, above 0"),
        ("optimizer.momentum=1", "optimizer.momentum = 1: must be a number, 0 or more, below 1"),
        ("lr.factor=1.5", "lr.factor = 1.5: must be a number, above 0, at most 1"),
        ("data.validation=-1", "data.validation = -1: must be a whole number, 0 or more"),
        ("train.compile=yes", 'train.compile = "yes": must be true or false'),
        ("train.compile=1", "train.compile = 1: must be true or false"),
        ("train.precision=bfloat16", '"bfloat16": must be "32" or "bf16"; did you mean "bf16"?'),
        ("gates.kind=linea", '"filter-l2" or "none"; did you mean "linear"?'),
        ("gates.init=off", 'gates.init = "off": must be a number or "none"'),
        ("gates.skip=conv1", 'gates.skip = "conv1": must be a list of texts, in brackets: ["conv1"]'),
        ("lr.drops=[30, 45.5]", "lr.drops = [30, 45.5]: must be a list of whole numbers, each 1 or more"),
        ("model.options=3", "model.options = 3: must be a table, as in { depth = 20 }"),
        ("model.options.day=2020-01-01", "a date can't be written"),
        ("model.name=", 'model.name = "": must be a text, not empty'),
        ("budget.target=params 30", '"params: N%" or "flops: N%" with N above 0 and below 100'),
        ("budget.target=params: 0%", '"params: N%" or "flops: N%" with N above 0 and below 100'),
        ("penalty.strength=-1", "penalty.strength = -1: must be a number or schedule, 0 or more"),
        ("penalty.sigma=0", "penalty.sigma = 0: must be a number or schedule, above 0"),
        ("penalty.strength={ values = [1] }", 'needs schedule = "constant", "stepped", "exponential" or "linear-th'),
        ("penalty.strength={ schedule = 'steped' }", 'did you mean "stepped"?'),
        (
            "penalty.strength={ schedule = 'stepped', values = [1] }",
            'a "stepped" schedule takes values and at, got val',
        ),
        ("penalty.sigma={ schedule = 'exponential', start = 1, rate = 'x' }", "its rate must be a number"),
        ("penalty.strength={ schedule = 'stepped', values = [1, 2], at = [1, 2] }", "2 steps need 3 values, got 2"),
        ("penalty.strength={ schedule = 'stepped', values = [0, -1], at = [9] }", "is -1 at epoch 9; must be a number"),
        ("penalty.sigma={ schedule = 'exponential', start = 2, rate = 1e-7 }", "is 0 at epoch 47; must be a number, a"),
        ("penalty.sigma={ schedule = 'exponential', start = 2, rate = 1e200 }", "is inf at epoch 2"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(override, message):
    refusal = refused(override)
    assert message in refusal
    assert refusal.startswith(f"small.toml with --set {override}: {override.partition('=')[0].removesuffix('.day')}")


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["gates.kind=linear", "gates.placement=after-norm"], ["gates.placement", "gates.kind"]),
        (["gates.kind=hard-concrete"], ["penalty.kind", "gates.kind"]),
        (["penalty.kind=l0"], ["penalty.kind", "gates.kind"]),
        (["gates.kind=hard-concrete", "penalty.kind=l0", "penalty.proximal=true"], ["penalty.proximal"]),
        (["penalty.kind=l2", "penalty.relative=true"], ["penalty.relative", "penalty.kind"]),
        (["penalty.kind=bounded-lp"], ["penalty.p"]),
        (["penalty.p=0.5"], ["penalty.p", "penalty.kind"]),
        (["penalty.kind=l2", "penalty.sigma=2.0"], ["penalty.sigma", "penalty.kind"]),
        (["penalty.kind=l2", "penalty.sigma={ schedule = 'constant', value = 2 }"], ["penalty.sigma"]),
        (["gates.kind=none", "penalty.strength=1e-4"], ["penalty.strength", "gates.kind"]),
        (["gates.kind=none", "budget.target=params: 30%"], ["budget.target", "gates.kind"]),
        (["gates.kind=none", "finish.close=0.5"], ["finish.close", "gates.kind"]),
        (["budget.target=params: 30%", "finish.close=0.5"], ["finish.close", "budget.target"]),
        (["gates.kind=none", "finish.threshold=0.1"], ["finish.threshold", "gates.kind"]),
        (["budget.target=flops: 50%", "penalty.strength={ schedule = 'constant', value = 1 }"], ["penalty.strength"]),
        (["lr.drops=[45, 30]"], ["lr.drops"]),
        (["lr.drops=[30, 30]"], ["lr.drops"]),
        (["lr.drops=[30, 60]"], ["lr.drops", "train.epochs"]),
        (["lr.schedule=cosine", "lr.drops=[30]"], ["lr.drops", "lr.schedule"]),
        (["lr.warmup=60"], ["lr.warmup", "train.epochs"]),
        (["optimizer.nesterov=true", "optimizer.momentum=0"], ["optimizer.nesterov", "optimizer.momentum"]),
        (["optimizer.nesterov=true", "optimizer.kind=adamw"], ["optimizer.nesterov", "optimizer.kind"]),
        (["data.augment=imagenet"], ["data.augment", "data.source"]),
        (["data.augment=crop-flip", "data.source=folder"], ["data.augment", "data.source"]),
        (["data.augment=warp", "data.source=folder"], ["data.augment", "data.source"]),
        (["data.size=64"], ["data.size", "data.source"]),
        (["shrink.batch=512", "shrink.when=end"], ["shrink.batch", "shrink.when"]),
        (["shrink.batch=8", "shrink.when=during", "train.batch=16"], ["shrink.batch", "train.batch"]),
        (["shrink.batch=512", "shrink.when=during", "optimizer.kind=adamw"], ["shrink.batch", "optimizer.kind"]),
        (["shrink.when=off", "budget.target=params: 30%"], ["shrink.when", "budget.target"]),
    ],
)
def test_combinations_that_cannot_work_are_refused(overrides, keys):
    refusal = refused(*overrides)
    assert not [key for key in keys if key not in refusal], refusal
    assert "--set" in refusal


@pytest.mark.parametrize(
    "overrides",
    [
        ["budget.target=params: 30%"],
        ["budget.target=flops: 12.5 %", "penalty.strength=1e-4"],
        ["gates.kind=none"],
        ["gates.kind=none", "penalty.kind=l2", "optimizer.weight_decay=5e-4"],
        ["gates.kind=hard-concrete", "penalty.kind=l0", "penalty.strength=1e-6"],
        ["gates.kind=linear", "penalty.strength=1e-4", "finish.finetune_epochs=3"],
        ["penalty.kind=bounded-lp", "penalty.p=2", "penalty.proximal=true"],
        ["optimizer.nesterov=true"],
        ["data.source=folder", "data.augment=imagenet", "data.size=64"],
        ["lr.drops=[30, 59]"],
    ],
)
def test_combinations_that_work_are_taken(overrides):
    assert Recipe.from_toml(small(*overrides).to_toml()) == small(*overrides)


def test_parts_made_by_hand_are_checked_too():
    with pytest.raises(RecipeError, match=r"^penalty.strength = -1: must be"):
        PenaltyPart(strength=-1)
    with pytest.raises(RecipeError, match=r"one of narrowgate\.schedules"):
        PenaltyPart(strength=lambda epoch: 1.0)
    with pytest.raises(RecipeError, match=r"^lr.drops = \[90\] with train.epochs = 60: .*below 60.*\[\] for none"):
        dataclasses.replace(small(), lr=LrPart(drops=[90]))
    assert PenaltyPart(strength=1).strength == 1.0 and LrPart(drops=[1]).drops == (1,)
    schedule = PenaltyPart(strength=Stepped((0.0, 1.0), (5,)))
    assert schedule.values()["strength"] == {"schedule": "stepped", "values": (0.0, 1.0), "at": (5,)}


def test_overrides_go_before_the_file_and_the_last_one_wins():
    recipe = small("train.epochs=3", "train.epochs = 4", "model.options.depth=20", "model.options.wide=true")
    assert recipe.train.epochs == 4 and recipe.model.options == {"depth": 20, "wide": True}
    assert small("shrink.when=off").shrink.when == "off"  # a bare word
    assert small("shrink.when='off'", "data.path=/a b/c").data.path == "/a b/c"
    assert small("train.precision=32", "data.path=2024").data.path == "2024"  # a text needs no quotes
    assert small("gates.init=0.5").gates.init == 0.5 and small("gates.init=0.5", "gates.init=none").gates.init is None
    assert small("optimizer.lr=1").optimizer.lr == 1.0


@pytest.mark.parametrize("name", ["fc1.inputs", '"fc1.inputs"', "'fc1.inputs'", "layer1.0.conv*"])
def test_an_entry_may_be_called_by_a_layers_name(name):
    recipe = small("penalty.factors.conv1=2", f"penalty.factors.{name}=0.1")
    assert recipe.penalty.factors == {"conv1": 2, name.strip("\"'"): 0.1}
    assert Recipe.from_toml(recipe.to_toml()) == recipe


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "epochs=3",
            "--set epochs=3: write table.key=value, for example --set train.epochs=3; did you mean train.epochs",
        ),
        ("train.epochs", "--set train.epochs: write table.key=value"),
        ("trian.epochs=3", "--set trian.epochs=3: unknown table [trian]; tables are model, data"),
        ("train.epoch=3", "did you mean epochs?"),
        ("train.lr=3", "did you mean optimizer.lr?"),
        ("train.epochs.x=3", "train.epochs has no entries to set"),
        ("penalty.strength=[1", "--set penalty.strength=[1: "),
        ("train.epochs=3\n[lr]\nwarmup=1", "train.epochs"),
    ],
)
def test_overrides_that_mean_nothing_are_refused(override, message):
    assert message in refused(override)


def test_learning_rate_drops_at_whole_epochs():
    recipe = small("lr.drops=[30, 45]", "lr.factor=0.5")
    assert [recipe.lr_at(p) for p in (0, 29.999, 30, 30.5, 44.9, 45, 59.9)] == [0.1, 0.1, *[0.05] * 3, 0.025, 0.025]


def test_learning_rate_warms_up_by_the_fraction_of_an_epoch():
    recipe = small("lr.drops=[3]", "lr.warmup=4")
    assert [recipe.lr_at(p) for p in (0, 1, 2.5, 4, 5)] == pytest.approx([0, 0.025, 0.0625, 0.01, 0.01])
    assert recipe.lr_at(3.5) == pytest.approx(0.1 * 0.875 * 0.1)
    constant = small("lr.schedule=constant", "lr.warmup=2")
    assert [constant.lr_at(p) for p in (1, 2, 59)] == pytest.approx([0.05, 0.1, 0.1])


def test_learning_rate_follows_a_cosine_to_zero():
    recipe = small("lr.schedule=cosine")
    assert recipe.lr_at(0) == 0.1 and recipe.lr_at(30) == pytest.approx(0.05)
    assert recipe.lr_at(20.25) == pytest.approx(0.05 * (1 + math.cos(math.pi * 20.25 / 60)))
    assert recipe.lr_at(60) == 0 and recipe.lr_at(60.5) == 0


def test_schedules_are_those_of_the_library():
    assert small("penalty.strength=1e-4").strength_schedule() == Constant(1e-4)
    scheduled = small(
        'penalty.strength={ schedule = "stepped", values = [1e-4, 5e-4], at = [120] }',
        'penalty.sigma={ schedule = "linear-then-exponential", start = 2.0, drop = 0.02, switch = 0.2, rate = 0.99 }',
    )
    assert scheduled.strength_schedule() == paper("resnet-164")["strength"] == Stepped((1e-4, 5e-4), (120,))
    assert scheduled.sigma_schedule() == paper("resnet-164")["sigma"] == LinearThenExponential(2.0, 0.02, 0.2, 0.99)
    mobile = small('penalty.sigma={ schedule = "exponential", start = 2, rate = 0.99 }')
    assert mobile.sigma_schedule() == Exponential(2.0, 0.99)


SAME_NUMBERS = {"data.path", "data.workers", "method.name", "checkpoint.every", "checkpoint.keep", "checkpoint.best"}
OTHER_VALUES = {
    "model.name": "resnet164",
    "model.options": "{ depth = 11 }",
    "data.source": "digits",
    "data.augment": "crop-flip",
    "gates.kind": "linear",
    "gates.placement": "after-norm",
    "gates.skip": "['conv1']",
    "gates.inputs": "['fc2']",
    "gates.groups": "['blocks']",
    "method.name": "bounded-l1",
    "penalty.kind": "l2",
    "penalty.weights": "parameters",
    "penalty.factors": "{ conv1 = 2.0 }",
    "optimizer.kind": "adamw",
    "lr.schedule": "cosine",
    "lr.drops": "[1]",
    "train.precision": "bf16",
    "train.graph": "off",
    "shrink.when": "off",
    "shrink.layout": "scatter",
    "shrink.constants": "drop",
    "shrink.batch": "512",
    "budget.target": "params: 30%",
}
TOGETHER = {
    "data.size": ["data.source=folder"],
    "method.name": ["penalty.kind=bounded-l1", "penalty.strength=3e-3"],
    "gates.rescale": ["gates.kind=linear"],
    "penalty.p": ["penalty.kind=bounded-lp", "penalty.p=0.25"],
    "penalty.accelerated": ["gates.kind=scaling", "penalty.proximal=true"],
    "shrink.batch": ["shrink.when=during"],
}


@pytest.mark.parametrize("key", [f"{table}.{spec.name}" for table, spec in every_key()])
def test_digest_changes_with_what_decides_the_numbers_only(key):
    table, _, name = key.partition(".")
    (spec,) = [spec for home, spec in every_key() if (home, spec.name) == (table, name)]
    flipped = str(not getattr(getattr(small(), table), name)).lower()
    value = OTHER_VALUES.get(key) or (flipped if spec.metadata["kind"].type_name == "true or false" else "0.5")
    if "whole" in spec.metadata["kind"].type_name and key not in OTHER_VALUES:
        value = "7"
    before = small(*TOGETHER.get(key, ()))
    after = small(*TOGETHER.get(key, ()), f"{key}={value}")
    assert after != before
    assert (after.digest() == before.digest()) == (key in SAME_NUMBERS)
    assert (key in before.differences(after)) == (key not in SAME_NUMBERS)


def test_digest_is_the_same_for_the_same_recipe_however_written():
    digest = small().digest()
    assert len(digest) == 64 and set(digest) <= set(DIGIT + "abcdef")
    assert Recipe.from_toml(small().to_toml()).digest() == digest
    assert small("optimizer.lr=0.10", "lr.drops=[]").digest() == digest


def test_every_key_is_documented_in_one_line():
    for table, spec in every_key():
        doc = spec.metadata["doc"]
        assert doc and "\n" not in doc and "|" not in doc, f"{table}.{spec.name}"


def test_docs_hold_exactly_the_reference():
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    start = page.index("### [model]")
    assert page[start:] == reference()


def test_module_prints_the_reference():
    command = [sys.executable, "-m", "narrowgate.train.recipe"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed == reference()


def test_parts_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        small().train.epochs = 3
    assert TrainPart(epochs=1) == TrainPart(epochs=1) and ModelPart("a") != ModelPart("b")


def test_a_budget_that_does_not_steer_needs_a_strength():
    with pytest.raises(RecipeError, match=r"budget\.steer = false with penalty\.strength = 0\.0: nothing would close"):
        Recipe.from_toml(SMALL, ["budget.target=params: 30%", "budget.steer=false"])
