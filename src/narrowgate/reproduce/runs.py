"""Our own runs as the tables want them, from the result files of ``narrowgate record`` and of the MNIST benchmark."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from narrowgate.reproduce.paper import BASELINE, LENET, Kind
from narrowgate.reproduce.record import WHAT, DamagedRecordError
from narrowgate.reproduce.tables import short
from narrowgate.train.recipe import Recipe

_GATES = {"exponential": "exp", "linear": "lin"}  # as the paper calls them; other people's keep their names
_IMAGENET = {25_557_032: "resnet50", 3_504_872: "mobilenetv2"}
"""The networks of the paper by their parameters with 1000 classes: a recipe does not say which folder it read."""

_IMAGES = {"cifar100": "crop-flip", "imagenet": "imagenet"}
"""How the paper augments training images; MNIST's not at all."""

_DEFAULTS = json.loads(  # lists, not tuples, as in a record
    json.dumps(Recipe.from_toml("model.name = 'x'\ndata.source = 'npz'\ntrain.epochs = 1").tables())
)


@dataclass(frozen=True)
class Run:
    """One run; accuracies and ``pruned`` are shares. ``widths`` are those of a LeNet-5, None for other networks."""

    file: str
    data: str
    network: str
    kind: Kind
    settings: str
    config: str = field(repr=False)
    """All settings but the seed and the held-out images: runs with the same are counted together."""
    seed: int
    epochs: int
    strength: float | None
    accuracy: float
    gated: float
    validation: float | None
    """On held-out training images; a run that has it is a try, and not for the tables of results."""
    parameters: int
    pruned: float
    multiply_adds: int | None
    seconds: float
    widths: tuple[int, ...] | None = None
    curve: Mapping[str, Sequence[float]] | None = field(default=None, repr=False)
    steered: bool = False
    """Whether the size was given (``budget.target``), not the strength."""
    augmented: bool = False
    """Whether training images were changed in a way that the paper's were not."""
    taught: bool = False
    """Whether another network's answers were learned beside the labels."""
    unlike: tuple[str, ...] = ()
    """What else was done that the paper does not do, in words."""

    @property
    def our_own(self) -> bool:
        """Whether it was made in a way that is not the paper's, and stands beside none of its rows."""
        return self.steered or self.augmented or self.taught or bool(self.unlike)


def load_runs(folder: Path) -> list[Run]:
    """All runs that the result files in a folder and below it hold, by file name; other files are passed over."""
    runs = []
    for path in sorted(folder.rglob("*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            name = path.relative_to(folder).as_posix()
            if not isinstance(record, dict):
                continue
            if record.get("what") == WHAT:
                runs.append(_from_record(name, record))
            elif "error_after_removal_percent" in record and "kept" in record:
                runs.append(_from_benchmark(name, record))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedRecordError(f"{path} can't be read as a result ({type(error).__name__}: {error})") from error
    return runs


def kind_of(tables: Mapping[str, Mapping[str, Any]]) -> Kind:
    """Which way to prune a recipe's tables describe."""
    kind, penalty = tables["gates"]["kind"], tables["penalty"]
    if kind == "none":
        return BASELINE
    gate = _GATES.get(kind, kind)
    if not penalty["strength"] and not tables["budget"]["target"]:
        return Kind("l2", gate)  # weight decay alone
    return Kind(penalty["kind"], gate, isinstance(penalty["sigma"], Mapping))


def groups(runs: Iterable[Run]) -> list[list[Run]]:
    """Runs that differ in nothing but their seeds, together; in the order of their first files."""
    found: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        found.setdefault((run.data, run.network, run.config), []).append(run)
    return list(found.values())


def count(group: Sequence[Run]) -> str:
    """How many runs, and of which seeds."""
    seeds = sorted({run.seed for run in group})
    return f"{len(group)} (seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))})"


def mean_and_spread(values: Sequence[float], digits: int = 2) -> str:
    """A number, or the mean of several and their standard deviation."""
    text = f"{statistics.fmean(values):.{digits}f}"
    return text if len(values) == 1 else f"{text} ± {statistics.stdev(values):.{digits}f}"


def _from_record(name: str, record: Mapping[str, Any]) -> Run:
    tables, accuracy = record["recipe"], record["accuracy"]
    network, data = tables["model"]["name"], record.get("dataset", tables["data"]["source"])
    if data == "folder" and record["parameters_full"] in _IMAGENET:
        network, data = _IMAGENET[record["parameters_full"]], "imagenet"
    strength = tables["penalty"]["strength"]
    return Run(
        file=name,
        data=data,
        network=network,
        kind=kind_of(tables),
        settings=", ".join([_settings(tables), *_taught(record)]),
        config=_config(tables),
        seed=record["seed"],
        epochs=record["epochs"],
        strength=None if isinstance(strength, Mapping) else strength or tables["optimizer"]["weight_decay"],
        accuracy=accuracy["final"],
        gated=accuracy["gated"],
        validation=accuracy["validation"],
        parameters=record["parameters"],
        pruned=record["pruned"],
        multiply_adds=record["multiply_adds"],
        seconds=record["seconds"],
        widths=_lenet_widths(record) if network == "lenet5" else None,
        curve=record.get("curve"),
        steered=bool(tables["budget"]["target"]),
        augmented=tables["data"]["augment"] not in ("none", _IMAGES.get(data)),
        taught="teacher" in record,
        unlike=tuple(_unlike(tables)),
    )


def _lenet_widths(record: Mapping[str, Any]) -> tuple[int, ...]:
    kept = {layer: kept for layer, (kept, _) in record["architecture"].items()}
    features = record["inputs"].get("fc1", [LENET[2]])[0]
    return tuple(
        whole if value is None else value
        for whole, value in zip(LENET, (kept.get("conv1"), kept.get("conv2"), features, kept.get("fc1")), strict=True)
    )


def _from_benchmark(name: str, record: Mapping[str, Any]) -> Run:
    recipe = record["recipe"]
    decay = recipe["penalty"] == "none"
    accuracy, gated = (1 - record[key] / 100 for key in ("error_after_removal_percent", "error_percent"))
    words = [f"λ {short(recipe['weight_decay' if decay else 'strength'])}", f"lr {recipe['lr']:g}", recipe["schedule"]]
    words += ["proximal"] if recipe["proximal"] else []
    words += [f"σ {recipe['sigma']:g}"] if recipe["penalty"] == "bounded-l1" and recipe["sigma"] != 1 else []
    return Run(
        file=name,
        data="mnist",
        network="lenet5",
        kind=Kind("l2" if decay else recipe["penalty"], "exp"),
        settings=", ".join([*words, "with biases"]),
        config=json.dumps({key: value for key, value in recipe.items() if key != "train_images"}, sort_keys=True),
        seed=record["seed"],
        epochs=recipe["epochs"],
        strength=recipe["weight_decay"] if decay else recipe["strength"],
        accuracy=accuracy,
        gated=gated,
        validation=None if record["error_on"] == "test" else accuracy,
        parameters=record["parameters_left"],
        pruned=1 - record["parameters_left"] / record["parameters_whole"],
        multiply_adds=None,
        seconds=record["seconds"],
        widths=tuple(record["kept"][key] for key in ("conv1", "conv2", "features", "fc1")),
    )


def _config(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """What a recipe says beside the defaults, but for the seed, the held-out images, and what leaves the numbers alone.

    Without defaults, since records of earlier versions lack the keys that came later, and have some that went.
    """
    without = {"train": ("seed", "evaluate_every"), "data": ("path", "source", "workers", "validation")}
    kept: dict[str, Any] = {}
    for table, values in tables.items():
        known = _DEFAULTS[table]
        for key, value in values.items():
            usual = value == known[key] if key in known else not value  # a key that went was off
            if table != "checkpoint" and key not in without.get(table, ()) and not usual:
                kept[f"{table}.{key}"] = value
    return json.dumps(kept, sort_keys=True)


def _settings(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """What a reader has to know of a recipe beside its kind and its length."""
    gates, penalty, optimizer = tables["gates"], tables["penalty"], tables["optimizer"]
    words = []
    if target := tables["budget"]["target"]:
        words.append(target)
    elif penalty["strength"] and gates["kind"] != "none":
        words.append(f"λ1 {_value(penalty['strength'])}")
    words.append(f"λ2 {short(optimizer['weight_decay'])}")
    if gates["weight_decay"] != "none":
        words.append(f"of gates {short(gates['weight_decay'])}")
    words += [f"{optimizer['kind']} {optimizer['lr']:g}", tables["lr"]["schedule"]]
    words += ["nesterov"] if optimizer["nesterov"] else []
    words += [f"gates x{gates['lr_factor']:g}"] if gates["lr_factor"] != 1 else []
    words += ["after the norm"] if gates["kind"] == "exponential" and gates["placement"] == "after-norm" else []
    words += ["proximal"] if penalty["proximal"] else []
    words += ["relative"] if penalty.get("relative") else []
    words += {"shift": ["images shifted"], "warp": ["images warped"]}.get(tables["data"]["augment"], [])
    words += [f"smoothing {tables['train']['label_smoothing']:g}"] if tables["train"]["label_smoothing"] else []
    words += [f"{tables['finish']['finetune_epochs']} fine-tuned"] if tables["finish"]["finetune_epochs"] else []
    return ", ".join([*words, *_unlike(tables)])


def _unlike(tables: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What a recipe of the paper's kinds has that none of the paper's has; absent keys came after the record."""
    gates, penalty, shrink, finish = (tables[name] for name in ("gates", "penalty", "shrink", "finish"))
    words = [f"batches up to {shrink['batch']}"] if shrink.get("batch") else []
    words += [f"{finish['close']:.0%} closed at the end"] if finish.get("close") else []
    words += [f"weighted by {penalty['weights']}"] if penalty.get("weights", "equal") != "equal" else []
    words += [f"scales x{gates['rescale']:g}"] if gates.get("rescale", 1) != 1 else []
    return words


def _taught(record: Mapping[str, Any]) -> list[str]:
    """Who taught a run, if anybody did."""
    if (teacher := record.get("teacher")) is None:
        return []
    options = "".join(f" {key} {value}" for key, value in teacher["model"]["options"].items())
    size = f"{teacher['parameters'] / 1e6:.1f} M parameters, {100 * teacher['accuracy']:.2f} %"
    return [f"taught by {teacher['model']['name']}{options} ({size})"]


def _value(value: Any) -> str:
    if not isinstance(value, Mapping):
        return short(value)
    numbers = [short(each) for key in ("values", "start", "end") for each in _many(value.get(key, []))]
    return " → ".join(numbers) if numbers else str(value["schedule"])


def _many(value: Any) -> list[float]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
