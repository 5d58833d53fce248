"""What is compared: networks with one training recipe each, and methods with the sizes they are run at.

All methods of a network have its recipe: the same first weights, batches, optimizer, learning rate at every epoch and
number of epochs. A method says which keys make it that method, which key sets how much goes, and after which share of
the epochs channels are removed; the small network gets the epochs that are left.
"""

from __future__ import annotations

from dataclasses import dataclass

from narrowgate.train.recipe import Recipe

RATIO = "torch-pruning"
"""The key of a method that is no recipe: Torch-Pruning cuts this share of the channels."""


@dataclass(frozen=True)
class Method:
    """A way to decide which channels go, and how much at each size, from the largest network to the smallest."""

    label: str
    key: str
    values: tuple[float, ...]
    cut_at: float
    """The share of the epochs after which channels are removed."""
    settings: tuple[str, ...] = ()
    ours: bool = False
    penalty_until: float = 1.0
    """The share of the epochs after which the strength is 0 while gates stay: closed ones stay closed."""


@dataclass(frozen=True)
class Network:
    """A network, its data, and how all methods train it."""

    title: str
    recipe: str
    epochs: int
    usable: float
    """Points that are further below the dense network's accuracy than this are listed, not compared."""
    methods: dict[str, Method]


@dataclass(frozen=True)
class Job:
    """One run."""

    network: str
    method: str
    size: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.network}_{self.method}_{self.size}_seed{self.seed}"


_LENET = """
[model]
name = "lenet5"
options = { bias = false, norm = NORM }
[data]
source = "mnist"
[optimizer]
kind = "sgd"
lr = 0.05
momentum = 0.9
nesterov = true
weight_decay = 5e-4
[gates]
weight_decay = 0.0
[lr]
schedule = "cosine"
warmup = 1
[train]
batch = 128
[shrink]
layout = "scatter"
"""

_MOBILENET = """
[model]
name = "mobilenetv2"
[data]
source = "cifar100"
augment = "crop-flip"
[optimizer]
kind = "sgd"
lr = 0.1
momentum = 0.9
nesterov = true
weight_decay = 5e-4
[gates]
weight_decay = 0.0
[lr]
schedule = "cosine"
warmup = 2
[train]
batch = 128
precision = "bf16"
[shrink]
layout = "scatter"
"""

_DENSE = Method("dense", "", (0.0,), 1.0, ("gates.kind=none",))
_STRENGTH, _CLOSE, _TARGET = "penalty.strength", "finish.close", "budget.target"


def _rival(name: str, *settings: str) -> tuple[str, ...]:
    return (f"method.name={name}", "gates.weight_decay=0.0", *settings)


def _by_strength(until: float, *settings: str, **strengths: tuple[float, ...]) -> dict[str, Method]:
    """Penalties on exponential gates, by strength; the penalty ends before the learning rate is low."""
    settings = ("gates.kind=exponential", "gates.lr_factor=2.0", *settings)
    return {
        f"narrowgate-{kind}": Method(
            f"narrowgate, {kind}", _STRENGTH, values, 1.0, (f"penalty.kind={kind}", *settings), True, until
        )
        for kind, values in (("l1", strengths["l1"]), ("bounded-l1", strengths["bounded"]))
    }


def _by_size(shares: tuple[float, ...], *settings: str) -> dict[str, Method]:
    """The same penalties by the size to end at, which is met after half of the epochs; then the penalty ends."""
    settings = ("gates.kind=exponential", "budget.arrive=0.5", *settings)
    return {
        f"narrowgate-{kind}": Method(
            f"narrowgate, {kind}", _TARGET, shares, 1.0, (f"penalty.kind={kind}", *settings), True
        )
        for kind in ("l1", "bounded-l1")
    }


_LENET_PLAIN = {
    "dense": _DENSE,
    # A proximal step leaves no gate hovering when the penalty ends. A filter of a convolution takes more with it than a
    # neuron does, and is pulled harder.
    **_by_strength(
        0.4,
        "penalty.proximal=true",
        "penalty.factors={ conv1 = 2.5, conv2 = 2.5 }",
        l1=(8e-4, 1.3e-3, 1.8e-3, 2.5e-3),
        bounded=(1.2e-3, 1.8e-3, 2.5e-3, 3.5e-3),
    ),
    "torch-pruning": Method("Torch-Pruning", RATIO, (0.7, 0.8, 0.87, 0.92), 0.5, _DENSE.settings),
    "magnitude": Method("magnitude", _CLOSE, (0.7, 0.8, 0.87, 0.92), 0.5, _rival("magnitude")),
    "l0": Method(
        "L0, hard-concrete",
        _STRENGTH,
        (3e-6, 6e-6, 1.2e-5, 2.4e-5),
        1.0,
        _rival(
            "l0",
            "gates.lr_factor=5.0",
            'gates.skip=["fc1"]',
            'gates.inputs=["fc1","fc2"]',
            'penalty.factors={ conv1 = 10.0, conv2 = 0.5, "fc1.inputs" = 0.1, "fc2.inputs" = 10.0 }',
        ),
    ),
    "sparse-selection": Method(
        "sparse structure selection", _STRENGTH, (1e-3, 2e-3, 3e-3, 4e-3), 1.0, _rival("sparse-selection")
    ),
    "group-lasso": Method(
        "group lasso",
        _STRENGTH,
        (1e-3, 2e-3, 4e-3, 6e-3),
        0.6,
        _rival("group-lasso", 'gates.inputs=["conv2","fc1"]'),
    ),
    # The same strengths by steps that end at zero, without a threshold, and with no group of conv2's inputs.
    "group-lasso-steps": Method(
        "group lasso, proximal",
        _STRENGTH,
        (1e-3, 2e-3, 4e-3, 6e-3),
        0.6,
        _rival("group-lasso", "penalty.proximal=true", "finish.threshold=0.0"),
    ),
}

_LENET_NORM = {
    "dense": _DENSE,
    # A gate before a norm would rule over nothing that the norm does not undo.
    **_by_strength(
        0.55,
        "gates.placement=after-norm",
        "penalty.proximal=true",
        "penalty.factors={ bn1 = 5.0, bn2 = 5.0 }",
        l1=(6e-4, 1.2e-3, 2e-3, 3e-3),
        bounded=(1e-3, 2e-3, 3e-3, 4.5e-3),
    ),
    "slimming": Method("network slimming", _CLOSE, (0.5, 0.7, 0.8, 0.9), 0.5, _rival("slimming")),
    "ista": Method("ISTA", _STRENGTH, (1.2e-3, 2.4e-3, 5e-3, 1e-2), 0.6, _rival("ista")),
}

# About the square root of the parameters that go with a channel, over its mean; as recipes/ours-cifar100-*.toml.
_BY_SIZE = (
    'penalty.factors={ "first.*" = 0.5, "stages.0.*" = 0.5, "stages.1.*" = 0.5, "stages.2.*" = 0.55, '
    '"stages.3.*" = 0.7, "stages.4.*" = 0.9, "stages.5.*" = 1.1, "stages.6.*" = 1.4, "last.*" = 1.3 }'
)
_MOBILENET_METHODS = {
    "dense": _DENSE,
    **_by_size((0.5, 0.3, 0.15), "gates.placement=after-norm", "penalty.strength=1e-4", _BY_SIZE),
    "torch-pruning": Method("Torch-Pruning", RATIO, (0.3, 0.5, 0.65), 0.5, _DENSE.settings),
    "magnitude": Method("magnitude", _CLOSE, (0.2, 0.35, 0.5), 0.5, _rival("magnitude")),
    "slimming": Method("network slimming", _CLOSE, (0.3, 0.5, 0.7), 0.5, _rival("slimming")),
    "l0": Method("L0, hard-concrete", _STRENGTH, (5e-7, 1.5e-6, 4.5e-6), 1.0, _rival("l0")),
    "sparse-selection": Method(
        "sparse structure selection", _STRENGTH, (3e-4, 1e-3, 3e-3), 1.0, _rival("sparse-selection")
    ),
    "ista": Method("ISTA", _STRENGTH, (2e-5, 6e-5, 1.8e-4), 0.6, _rival("ista")),
    "group-lasso": Method("group lasso", _STRENGTH, (1e-4, 3e-4, 9e-4), 0.6, _rival("group-lasso")),
}

NETWORKS = {
    "lenet5": Network("LeNet-5 on MNIST", _LENET.replace("NORM", "false"), 20, 0.015, _LENET_PLAIN),
    "lenet5-norm": Network("LeNet-5 with BatchNorm on MNIST", _LENET.replace("NORM", "true"), 20, 0.015, _LENET_NORM),
    "mobilenetv2": Network("MobileNetV2 on CIFAR-100", _MOBILENET, 30, 0.10, _MOBILENET_METHODS),
}
FAMILIES = {"lenet5": ("lenet5", "lenet5-norm"), "mobilenetv2": ("mobilenetv2",)}
"""What ``--network`` names: slimming and ISTA need BatchNorm, so LeNet-5 comes with and without."""


def jobs_of(family: str, seeds: list[int], sizes: int | None = None, methods: list[str] | None = None) -> list[Job]:
    """All runs, in an order of which every beginning compares all methods: seed by seed, the middle sizes first."""
    found = []
    for seed in seeds:
        for rank in range(max(len(m.values) for n in FAMILIES[family] for m in NETWORKS[n].methods.values())):
            if sizes is not None and rank >= sizes:
                break
            for network in FAMILIES[family]:
                for name, method in NETWORKS[network].methods.items():
                    if rank < len(method.values) and (methods is None or name in methods or name == "dense"):
                        found.append(Job(network, name, middle_first(len(method.values))[rank], seed))
    return found


def middle_first(count: int) -> list[int]:
    """0 to count - 1, those in the middle first: [1, 2, 0, 3] of four."""
    return sorted(range(count), key=lambda i: (abs(i - (count - 1) / 2), i))


def recipe_of(job: Job, epochs: int, validation: int = 0) -> Recipe:
    """The recipe of a run; the network's, with what makes it this method at this size."""
    network = NETWORKS[job.network]
    method = network.methods[job.method]
    text = network.recipe.replace("[train]", f"[train]\nepochs = {epochs}\nevaluate_every = {epochs}")
    settings = [*method.settings, f"train.seed={job.seed}", f"data.validation={validation}"]
    if method.key == _TARGET:
        settings.append(f'{_TARGET}="params: {100 * method.values[job.size]:g}%"')
    elif method.key and method.key != RATIO:
        settings.append(f"{method.key}={_value(method, job.size, epochs)}")
    return Recipe.from_toml(text, settings, source=job.name)


def _value(method: Method, size: int, epochs: int) -> str:
    """The value of a method's key as TOML; a schedule where the penalty ends early."""
    value, end = method.values[size], round(method.penalty_until * epochs)
    if method.penalty_until == 1:
        return repr(value)
    return f'{{ schedule = "stepped", values = [{value!r}, 0.0], at = [{max(1, end)}] }}'


def cut_epoch(job: Job, epochs: int) -> int:
    """How many epochs run before channels are removed; at least one."""
    return max(1, round(NETWORKS[job.network].methods[job.method].cut_at * epochs))
