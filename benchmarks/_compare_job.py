"""One run of the comparison: train, remove, train on, and say what came out."""

from __future__ import annotations

import copy
import time
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from _compare_methods import NETWORKS, RATIO, Job, cut_epoch, recipe_of
from torch import Tensor, nn

from narrowgate.flow import Plan
from narrowgate.flow.cuts import Cut, Edit
from narrowgate.flow.surgery import tensors_of
from narrowgate.flow.verify import full_precision
from narrowgate.measure import summarize
from narrowgate.train.data import Data, load_data
from narrowgate.train.feed import Place, held_out_batches
from narrowgate.train.setup import Parts, make_optimizer
from narrowgate.train.show import Show
from narrowgate.train.training import Training

Record = dict[str, Any]


@dataclass(frozen=True)
class Budget:
    """What all runs of a comparison have in common."""

    epochs: int
    images: int | None = None
    """How many training images; None takes all."""
    validation: int = 0
    """Training images that are held out and judged instead of the test images, to choose settings by."""
    device: str = "cpu"


class Alone:
    """The one process of a run, for an engine that asks Lightning Fabric for little more than this."""

    def backward(self, loss: Tensor) -> None:
        loss.backward()


class ChannelsLast(Place):
    """A place where images lie channels last on a CPU too: LeNet-5 trains in 0.6 of the time there."""

    @property
    def memory_format(self) -> torch.memory_format:
        return torch.channels_last


def run_job(job: Job, budget: Budget, data_path: str, folder: Path) -> tuple[Record, nn.Module, Plan]:
    """Run it; what came out, the small network on the CPU and its plan. ``folder`` gets the engine's logs."""
    started = time.perf_counter()
    recipe = recipe_of(job, budget.epochs, budget.validation)
    place = ChannelsLast(torch.device(budget.device))
    data = _fewer(load_data(recipe.data, data_path, seed=0), budget.images)
    with warnings.catch_warnings(), Show(None, budget.epochs, quiet=True) as show:
        warnings.simplefilter("ignore")  # such as TensorBoard's absence
        training = Training(recipe, folder, data, place, Alone(), show)  # type: ignore[arg-type]
        training.parts.model.to(memory_format=torch.channels_last)
        cut = cut_epoch(job, budget.epochs)
        while training.epoch < cut:
            training.one_epoch()
        split = "held-out" if budget.validation else "test"
        small, plan, removal = _remove(job, training, split)
        cut_accuracy = training.accuracy(small, split)
        _train_on(training, small, cut, budget.epochs)
        accuracy = training.accuracy(small, split)
        training.close()
    size = summarize(small, training.example[:1])
    record = {
        "accuracy": accuracy,
        "accuracy_after_removal": cut_accuracy,
        "judged_on": split,
        "parameters": size.parameters,
        "parameters_full": training.full.parameters,
        "multiply_adds": size.multiply_adds,
        "multiply_adds_full": training.full.multiply_adds,
        "removal": removal,
        "cut_after_epochs": cut,
        "seconds": round(time.perf_counter() - started, 1),
        "recipe": recipe.tables(),
    }
    return record, small.cpu(), plan


def _fewer(data: Any, images: int | None) -> Data:
    assert isinstance(data, Data)
    return data if images is None else replace(data, train=data.train.pick(torch.arange(images)))


def _train_on(training: Training, small: nn.Module, first: int, epochs: int) -> None:
    """Train the small network, without gates or penalty, at the learning rates of the epochs that are left."""
    recipe = training.recipe
    parts = Parts(small.train(), None, None, make_optimizer(recipe, small, None, training.place.device))
    loop = training.loop_for(parts)
    for epoch in range(first, epochs):
        training.seed_noise(epoch)
        loss, _ = training.run_epoch(loop, epoch, recipe.lr_at)
        if not torch.tensor(loss).isfinite():
            raise RuntimeError(f"the loss of epoch {epoch + 1}, after the removal, is {loss}")
    small.eval()


def _remove(job: Job, training: Training, split: str) -> tuple[nn.Module, Plan, Record]:
    """The small network, its plan, and what its outputs lost: by the whole step, and by removing mere zeros alone."""
    parts = training.parts
    trained = _outputs(training, parts.model, split)
    method = NETWORKS[job.network].methods[job.method]
    plan = zeroed = None
    if method.key == RATIO:
        small = cut_by_torch_pruning(parts.model, training.example, method.values[job.size])
    elif parts.gates is None:
        small = copy.deepcopy(parts.model)
    else:
        pruned = training.pruned()
        small, plan, zeroed = pruned.small, pruned.plan, _outputs(training, parts.model, split)
    outputs = _outputs(training, small, split)
    found = {"scale": float(trained.std()), "whole_step": _difference(trained, outputs)}
    if zeroed is not None:
        found["zeros_only"] = _difference(zeroed, outputs)
    return small, plan or plan_by_shapes(parts.model, small), found


def cut_by_torch_pruning(model: nn.Module, example: Tensor, ratio: float) -> nn.Module:
    """A copy without this share of every layer's channels, by Torch-Pruning's own ranking of groups."""
    import torch_pruning as tp

    small = copy.deepcopy(model)
    last = [module for module in small.modules() if isinstance(module, nn.Linear)][-1]
    pruner = tp.pruner.BasePruner(
        small,
        example_inputs=example,
        importance=tp.importance.GroupMagnitudeImportance(p=2),
        pruning_ratio=ratio,
        ignored_layers=[last],
    )
    pruner.step()
    return small


def plan_by_shapes(full: nn.Module, small: nn.Module) -> Plan:
    """A plan that gives a network the shapes of a narrower one, for ``ng.save``; which channels went it can't tell."""
    old, new = tensors_of(full), tensors_of(small)
    cuts = {}
    for name, tensor in old.items():
        sizes = enumerate(zip(tensor.shape, new[name].shape, strict=True))
        if keep := {axis: list(range(after)) for axis, (before, after) in sizes if before != after}:
            cuts[name] = Cut(tuple(tensor.shape), keep)
    edits = {
        f"{name}.weight": Edit(name, f"{name}.weight", None, layer.groups, False, new_groups=layer.groups)
        for name, layer in small.named_modules()
        if isinstance(layer, nn.Conv2d) and layer.groups > 1
    }
    count = [sum(parameter.numel() for parameter in model.parameters()) for model in (full, small)]
    return Plan("aligned", "exact", cuts, edits, [], [], {}, *count)


@torch.no_grad()
def _outputs(training: Training, model: nn.Module, split: str) -> Tensor:
    """A model's outputs for all images of a split, in eval mode and full precision; its mode is given back."""
    was_training = model.training
    model.eval()
    with full_precision() if training.place.device.type == "cuda" else nullcontext():
        batches = held_out_batches(training.data, split, training.place)
        outputs = torch.cat([model(images).float() for images, _ in batches])
    model.train(was_training)
    return outputs


def _difference(before: Tensor, after: Tensor) -> Record:
    """The largest change of an output, and how many images got another class."""
    return {
        "largest_change": float((before - after).abs().max()),
        "predictions_changed": int((before.argmax(1) != after.argmax(1)).sum()),
        "images": len(before),
    }
