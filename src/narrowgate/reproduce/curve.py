"""Figure 3: what is left of a trained network, and how good it is, at every threshold on its gates."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from narrowgate.flow import CollapseError, compact, plan
from narrowgate.flow.trace import ExampleInputs
from narrowgate.flow.verify import full_precision
from narrowgate.gateset import Gates, gates_of
from narrowgate.reproduce.record import RecordError
from narrowgate.rivals.wiring import rescale_
from narrowgate.train.checkpoint import Checkpoints
from narrowgate.train.data import load_data
from narrowgate.train.feed import Place, held_out_batches
from narrowgate.train.recipe import Recipe
from narrowgate.train.run_folder import CHECKPOINTS, RECIPE, RESULT
from narrowgate.train.setup import build
from narrowgate.train.shrink import Shrinker
from narrowgate.train.state import load_model_
from narrowgate.train.step import count_hits

THRESHOLDS = (0.0, *(float(f"{digit}e{power}") for power in range(-8, 0) for digit in (1, 3)))
"""Zero, and two a decade from 1e-8 to 0.3."""


Show = Callable[[Iterable[float]], Iterable[float]]


class NoDeviceError(RecordError):
    """This machine can't compute there."""


@dataclass(frozen=True)
class CurvePoint:
    """A network with every gate up to a threshold closed; ``parameters`` is None where nothing would be left."""

    threshold: float
    closed: int
    parameters: int | None
    accuracy: float


def threshold_curve(
    model: nn.Module,
    gates: Gates,
    evaluate: Callable[[nn.Module], float],
    thresholds: Sequence[float],
    example_inputs: ExampleInputs,
    *,
    layout: str = "scatter",
    constants: str = "exact",
    round_to: int = 1,
    show: Show = iter,
) -> list[CurvePoint]:
    """A point for each threshold, in rising order; the model is not changed.

    Args:
        gates: those of ``model``.
        evaluate: the accuracy of a network; it gets the small one, or the gated one if nothing would be left.
        layout: as for ``ng.plan``; so are ``constants`` and ``round_to``.
        show: gets the thresholds and gives them back one by one, as a progress bar does.
    """
    if {id(g) for g in gates.parameters()} != {id(g) for g in gates_of(model).parameters()}:
        raise ValueError("these gates are not the model's: pass what attach_gates_ returned for it, or gates_of(model)")
    points: list[CurvePoint] = []
    for threshold in show(sorted(thresholds)):
        cut = copy.deepcopy(model)
        # The paper closes gates "less or equal to the threshold".
        closed = _close_up_to_(gates_of(cut), threshold)
        if points and points[-1].closed == closed:
            points.append(CurvePoint(threshold, closed, points[-1].parameters, points[-1].accuracy))
            continue
        try:
            made = plan(cut, example_inputs, layout=layout, constants=constants, round_to=round_to)
        except CollapseError:
            points.append(CurvePoint(threshold, closed, None, evaluate(cut)))
            continue
        points.append(CurvePoint(threshold, closed, made.parameters_after, evaluate(compact(cut, made))))
    return points


def curve_of_run(
    folder: str | Path,
    data_path: str | None = None,
    thresholds: Sequence[float] = THRESHOLDS,
    device: str = "cpu",
    show: Show = iter,
) -> dict[str, list[float | int | None]]:
    """The curve of a finished run's last checkpoint on its test images, as columns for a record."""
    folder = Path(folder)
    recipe = Recipe.load(folder / RECIPE)
    saved = Checkpoints(folder / CHECKPOINTS, recipe.checkpoint.keep).latest()
    if saved is None or not (folder / RESULT).is_file():
        raise RecordError(f"{folder} is not a finished run with a checkpoint: go on with --resume")
    if recipe.gates.kind == "none":
        raise RecordError(f"{folder} trained without gates: a threshold has nothing to close")
    if recipe.gates.kind.startswith("filter"):
        raise RecordError(f"{folder} measured filters, which are no gates: leave out --curve")
    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise RecordError(f"can't compute on --device {device}: {error}") from error
    try:
        torch.empty(0, device=wanted)
    except (RuntimeError, AssertionError) as error:  # an assertion: PyTorch was built without CUDA
        raise NoDeviceError(f"can't compute on --device {device}: {error}") from error
    data = load_data(recipe.data, data_path, False, recipe.train.seed)
    place = Place(torch.device(device))
    example = next(held_out_batches(data, "held-out", Place(place.device), batch=4))[0]
    with torch.random.fork_rng([]):  # its random weights are replaced at once
        parts = build(recipe, data.classes, data.image_shape, place.device)
    assert parts.gates is not None
    Shrinker(parts.model, example).load_state_dict(saved.meta["shrinker"])
    load_model_(parts.model, saved.tensors)
    if recipe.gates.rescale != 1:  # back to the scales that finish.threshold is about
        rescale_(parts.model, example, 1 / recipe.gates.rescale)

    @torch.no_grad()
    def accuracy(model: nn.Module) -> float:
        with full_precision():
            hits, count = count_hits(model, held_out_batches(data, "test", place), place.device, False).tolist()
        return float(hits / count)

    part = recipe.shrink
    points = threshold_curve(
        parts.model.eval(),
        parts.gates,
        accuracy,
        thresholds,
        example,
        layout="aligned" if part.layout == "auto" else part.layout,  # auto would time every layer at every threshold
        constants=part.constants,
        round_to=part.round_to,
        show=show,
    )
    full = json.loads((folder / RESULT).read_text(encoding="utf-8"))["parameters_full"]
    return {
        "threshold": [point.threshold for point in points],
        "parameters": [point.parameters for point in points],
        "pruned": [1.0 if p.parameters is None else round(1 - p.parameters / full, 6) for p in points],
        "accuracy": [round(point.accuracy, 6) for point in points],
    }


def _close_up_to_(gates: Gates, threshold: float) -> int:
    """Close every gate of which the size of the value is not above the threshold; how many are closed then."""
    closed = 0
    for name, value in gates.values().items():
        mask = value.abs() <= threshold
        gates[name].close_(mask)
        closed += int(mask.sum())
    return closed
