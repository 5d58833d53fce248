"""The rival methods through the engine: fewer channels, proved exact; one flag; clear errors."""

from pathlib import Path

import pytest
import torch
from engine_helpers import LENET, RESNET, count, load_small, rows, train, write_images
from torch import nn

from narrowgate.rivals.apg import ApgSgd
from narrowgate.rivals.methods import METHODS
from narrowgate.train.gating import attach
from narrowgate.train.recipe import Recipe, RecipeError
from narrowgate.train.setup import build

RECIPES = Path(__file__).parent.parent / "recipes"
TINY = ("data.source='npz'", "train.epochs=2", "lr.drops=[]", "train.batch=16", "optimizer.lr=0.05", "train.seed=3")
# Strengths for twenty steps instead of thousands.
SETTINGS = {
    "slimming": ("penalty.strength=0.01", "finish.close=0.5", "finish.finetune_epochs=1"),
    "l0": ("penalty.strength=4e-6", "optimizer.lr=0.005", "gates.lr_factor=40.0"),
    "sparse-selection": ("penalty.strength=0.03", "train.epochs=9"),
    "ista": ("penalty.strength=0.05", "gates.rescale=0.5", "finish.finetune_epochs=0"),
    "group-lasso": ("penalty.strength=0.05", "finish.threshold=0.1", "finish.finetune_epochs=0"),
    "magnitude": ("finish.close=0.3", "finish.finetune_epochs=1"),
}


def text_of(method):
    return (RECIPES / f"rival-mnist-{method}.toml").read_text()


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("data") / "28.npz", 28, test=40)


@pytest.mark.parametrize("method", SETTINGS)
def test_a_run_ends_with_fewer_channels_and_the_same_function(tmp_path, images, method):
    result = train(text_of(method), tmp_path / "run", images, *TINY, *SETTINGS[method])
    assert result.parameters < 0.9 * result.parameters_full
    assert result.max_error is not None and result.max_error < 1e-4
    by_itself = method in ("l0", "sparse-selection", "ista")
    assert (result.closed > 0) == by_itself and (result.closed_by_threshold > 0) == (not by_itself)
    assert (rows(tmp_path / "run")[-1]["closed"] > 0) == by_itself
    recipe = Recipe.load(tmp_path / "run" / "recipe.toml")
    assert recipe.method.name == method
    small = load_small(tmp_path / "run", **recipe.model.options)
    assert count(small) == result.parameters
    assert small(torch.rand(2, 1, 28, 28)).isfinite().all()


def test_group_lasso_by_steps_needs_no_threshold(tmp_path, images):
    settings = ("penalty.proximal=true", "penalty.strength=0.01", "finish.threshold=0.0", "finish.finetune_epochs=0")
    result = train(text_of("group-lasso"), tmp_path / "run", images, *TINY, "train.epochs=8", *settings)
    assert result.parameters < 0.9 * result.parameters_full and result.max_error < 1e-4
    assert result.closed > 0 and result.closed_by_threshold == 0


def test_there_is_a_recipe_for_each_method():
    assert sorted(path.stem.removeprefix("rival-mnist-") for path in RECIPES.glob("rival-mnist-*")) == sorted(SETTINGS)
    assert set(METHODS) == {*SETTINGS, "bounded-l1"}


@pytest.mark.parametrize("other", METHODS)
@pytest.mark.parametrize("method", SETTINGS)
def test_one_flag_makes_one_methods_recipe_anothers(method, other):
    before = Recipe.from_toml(text_of(method))
    kind = ["optimizer.kind=sgd"] * (other == "sparse-selection")  # the one that needs it
    after = Recipe.from_toml(text_of(method), [f"method.name={other}", "penalty.sigma=1.0", *kind])
    fresh = Recipe.from_toml(
        f'[model]\nname = "lenet5"\n[data]\nsource = "mnist"\n[train]\nepochs = 1\n[method]\nname = "{other}"\n'
    )
    assert after.penalty == fresh.penalty
    assert (after.gates, after.gates.skip) == (
        type(fresh.gates)(**{**fresh.gates.values(), "skip": before.gates.skip}),
        before.gates.skip,
    )
    assert (after.finish.threshold, after.finish.close, after.finish.per_layer) == (
        fresh.finish.threshold,
        fresh.finish.close,
        fresh.finish.per_layer,
    )
    assert (after.model, after.data, after.lr, after.train) == (before.model, before.data, before.lr, before.train)
    assert after.finish.finetune_epochs == before.finish.finetune_epochs
    assert after.optimizer.lr == before.optimizer.lr


def test_a_flag_leaves_the_optimizer_alone():
    with pytest.raises(RecipeError, match=r'optimizer.kind = "adamw" .* needs optimizer.kind = "sgd"; set it, with a'):
        Recipe.from_toml(text_of("l0"), ["method.name=sparse-selection"])
    assert Recipe.from_toml(text_of("l0"), ["method.name=slimming"]).optimizer.kind == "adamw"


@pytest.mark.parametrize("how", [["method.name=slimming", "budget.target=params: 9%"], ["budget.target=flops: 9%"]])
def test_a_budget_on_the_command_line_takes_the_place_of_a_methods_share(how):
    text = text_of("slimming").replace("close = ", "# close = ")
    for order in (how, how[::-1]):
        recipe = Recipe.from_toml(text, order)
        assert recipe.finish.close == 0 and recipe.budget.target and recipe.method.name == "slimming"


def test_a_later_flag_has_the_last_word():
    recipe = Recipe.from_toml(text_of("ista"), ["penalty.strength=0.25", "method.name=slimming"])
    assert (recipe.method.name, recipe.penalty.strength, recipe.penalty.proximal) == ("slimming", 0.25, False)
    assert Recipe.from_toml(recipe.to_toml()) == recipe


@pytest.mark.parametrize(
    ("method", "settings", "words"),
    [
        ("slimming", ["finish.close=1.0"], ["finish.close = 1.0", "below 1"]),
        ("magnitude", ["finish.close=1"], ["finish.close = 1", "below 1"]),
        ("slimming", ["gates.kind=exponential"], ["gates.kind", 'that method has gates.kind = "linear"']),
        ("magnitude", ["penalty.strength=0.1"], ["that method has penalty.strength = 0.0", "method.name"]),
        ("sparse-selection", ["optimizer.kind=adamw"], ['that method needs optimizer.kind = "sgd"']),
        ("nimming", [], ['method.name = "nimming"', "must be", 'did you mean "slimming"?']),
        ("group-lasso", ["budget.target='params: 30%'"], ["budget.target", "use finish.close instead"]),
        ("group-lasso", ["shrink.when=during"], ["shrink.when", "nothing goes before the end"]),
        ("group-lasso", ["gates.rescale=0.1"], ["gates.rescale", "leave it at 1"]),
        ("group-lasso", ["gates.groups=['blocks']"], ["gates.groups", 'leave it at ["channels"]']),
        ("sparse-selection", ["gates.groups=[]"], ["gates.groups = []", "name some"]),
        ("l0", ["gates.groups=['heads']"], ["penalty.weights", 'use "equal"']),
        ("group-lasso", ["gates.placement=after-norm"], ["gates.placement", "filters have no placement"]),
        ("group-lasso", ["gates.init=0.5"], ["gates.init", "filters start as the network makes them"]),
        ("slimming", ["gates.inputs=['fc1']"], ["gates.inputs", "leave it out"]),
        ("slimming", ["penalty.weights=parameters"], ["penalty.weights", 'use "memory"']),
        ("bounded-l1", ["penalty.weights=memory"], ["penalty.weights", 'use "parameters"']),
        ("bounded-l1", ["penalty.accelerated=true"], ["penalty.accelerated", 'gates.kind = "scaling"']),
        ("bounded-l1", ["penalty.factors={ conv1 = -1 }"], ["penalty.factors", "the factor of conv1 must be"]),
    ],
)
def test_settings_that_do_not_fit_are_refused(method, settings, words):
    with pytest.raises(RecipeError) as caught:
        Recipe.from_toml(text_of("magnitude"), [f"method.name={method}", *settings], "mine.toml")
    assert all(word in str(caught.value) for word in ("mine.toml", *words))


def test_a_budget_leaves_the_share_to_close_out():
    text = (RECIPES / "digits-small.toml").read_text()
    with_budget = Recipe.from_toml(text + '[budget]\ntarget = "params: 40%"\n', ["method.name=slimming"])
    assert with_budget.budget.target == "params: 40%" and with_budget.finish.close == 0
    assert Recipe.from_toml(text, ["method.name=slimming"]).finish.close == 0.5
    assert Recipe.from_toml(with_budget.to_toml()) == with_budget


@pytest.mark.parametrize(
    "closing", ["penalty.strength=0.1", "budget.target=params: 30%", "finish.close=0.5", "finish.threshold=0.1"]
)
def test_scaling_factors_without_their_steps_are_refused(closing):
    settings = ["method.name=as-written", "gates.kind=scaling", "finish.close=0.0", "finish.per_layer=false"]
    Recipe.from_toml(text_of("magnitude"), settings)  # nothing is closed by its size there
    with pytest.raises(RecipeError, match="must not go below 0, which only"):
        Recipe.from_toml(text_of("magnitude"), [*settings, closing])


def test_scaling_factors_stay_above_zero_without_a_strength():
    recipe = Recipe.from_toml(text_of("sparse-selection"), ["penalty.strength=0.0"])
    assert type(build(recipe, 4, (1, 28, 28), torch.device("cpu")).optimizer) is ApgSgd


@pytest.mark.parametrize("when", ["end", "during"])
def test_a_share_to_close_counts_the_channels_that_cuts_took(tmp_path, images, when):
    cuts = (f"shrink.when={when}", "shrink.every=1", "shrink.share=0.0", "finish.close=0.7")
    result = train(LENET, tmp_path / "run", images, *cuts)
    assert any(row["event"] for row in rows(tmp_path / "run")) == (when == "during") and 0.2 < result.closed < 0.7
    gates = build(Recipe.from_toml(LENET), 4, (1, 28, 28), torch.device("cpu")).gates
    assert round(result.closed * gates.count) + result.closed_by_threshold == round(0.7 * gates.count)


def test_gates_after_a_norm_weigh_the_parameters_of_the_layer_before_it():
    places = ("before-norm", "after-norm")
    recipes = [Recipe.from_toml(RESNET, ["method.name=l0", f"gates.placement={place}"]) for place in places]
    at, after = (build(recipe, 4, (1, 8, 8), torch.device("cpu")).penalty for recipe in recipes)
    assert list(after.weights.values()) == list(at.weights.values()) and max(at.weights.values()) == 576
    assert "stages.0.0.bn2" in after.weights


@pytest.mark.parametrize(
    ("method", "settings", "words"),
    [
        ("slimming", ["model.options.norm=false"], ["nothing to gate in LeNet5", "--set model.options.norm=true"]),
        ("ista", ["model.options.norm=false"], ["nothing to gate in LeNet5", "--set model.options.norm=true"]),
        ("l0", ["penalty.factors={ conv7 = 2.0 }"], ["penalty.factors has 'conv7', where no gate is", "fc2.inputs"]),
        ("sparse-selection", ["gates.init=0.0"], ["scaling factors start above 0"]),
        ("sparse-selection", ["gates.groups=['blocks']"], ["no blocks to gate in LeNet5"]),
        ("magnitude", ["gates.skip=['*']"], ["no convolution or linear layer whose filters could be pruned"]),
    ],
)
def test_a_network_that_does_not_fit_is_refused(tmp_path, images, method, settings, words):
    with pytest.raises(RecipeError) as caught:
        train(text_of(method), tmp_path / "run", images, *TINY, *settings)
    assert all(word in str(caught.value) for word in words)


def test_a_rescaling_that_can_do_nothing_is_refused():
    recipe = Recipe.from_toml(text_of("ista"), ["gates.rescale=0.1"])

    def attached(activation):
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), activation, nn.Conv2d(4, 2, 3))
        attach(recipe, model, torch.zeros(2, 1, 8, 8))
        return model

    assert attached(nn.ReLU())[1].weight.tolist() == pytest.approx([0.1] * 4)
    with pytest.raises(RecipeError, match=r"gates\.rescale = 0\.1: behind no BatchNorm of lenet5 are only ReLU"):
        attached(nn.ReLU6())
