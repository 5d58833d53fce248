"""Keep a small model on disk: safetensors for the weights, JSON for the plan, never pickle.

The folder holds ``model.safetensors``, ``plan.json`` and ``meta.json`` (versions, checksums, tied weights).
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from narrowgate._version import __version__
from narrowgate.atomic import replace_folder, surviving_folder
from narrowgate.dtensors import check_whole
from narrowgate.flow.idle import beside_idle, is_replaced
from narrowgate.flow.plan import Plan
from narrowgate.flow.surgery import PlanError, TiesError, compact
from narrowgate.flow.ungated import FrozenGate
from narrowgate.gates import Gate
from narrowgate.swap import gate_layer_
from narrowgate.weights import (
    StorageError,
    check_same_ties,
    check_shapes,
    convert_,
    fill_,
    pack,
    tensors_of,
    ties_of,
    uncompiled,
    unpack,
)

__all__ = ["StorageError", "load", "save"]

FORMAT = 1
WEIGHTS, PLAN, META = "model.safetensors", "plan.json", "meta.json"


def save(small: nn.Module, plan: Plan, folder: str | Path) -> None:
    """Write what ``compact(model, plan)`` returned, fine-tuned or not, into a folder that ``load`` reads.

    A folder that ``save`` wrote before is replaced as a whole: it holds the old model or the new one at any moment.
    """
    target = Path(folder).resolve()
    check_target(target)
    if isinstance(small, nn.Module) and isinstance(plan, Plan):
        plan = replace(plan, idle=_really_idle(small, plan))
    _check_model(small, plan)
    files = {WEIGHTS: pack(small), PLAN: plan.to_json().encode()}
    files[META] = json.dumps(describe(small, files), indent=1).encode()
    replace_folder(target, files)


def load(folder: str | Path, builder: Callable[[], nn.Module]) -> nn.Module:
    """A saved model: ``builder`` makes the ordinary, full-size one, the plan cuts it, the weights are put in.

    The weights have the precision they were saved with and lie where the builder's are. Train or eval mode is the
    builder's.
    """
    path = find(Path(folder).resolve())
    meta = read_meta(path / META)
    weights = unpack(read_file(path / WEIGHTS, meta), path / WEIGHTS)
    plan = read_plan(path / PLAN, meta)
    model = build(builder)
    uncut = {name: tensor for name, tensor in tensors_of(model, persistent=True) if name not in plan.cuts}
    try:
        check_shapes(uncut, weights, path / WEIGHTS)
        put_frozen_gates_(model, meta["frozen_gates"], plan, weights)
        convert_(model, {**{name: str(tensor.dtype) for name, tensor in weights.items()}, **meta["dtypes"]})
        small = compact(model, plan)
    except StorageError as error:
        raise type(error)(f"{error}{_earlier_cuts(model, plan, weights)}") from error
    except (PlanError, AttributeError, KeyError, IndexError) as error:
        if isinstance(error, TiesError):
            check_same_ties(model, meta["tied"], path / WEIGHTS)
        built, saved = _class_name(model), meta["class"]
        raise PlanError(
            f"{path / PLAN} does not fit the {built} that builder() returned: {error}. The model saved was a {saved}; "
            "builder has to make that one at full size, as it was before ng.compact"
            f"{_earlier_cuts(model, plan, weights)}"
        ) from error
    fill_(small, weights, meta["tied"], path / WEIGHTS)
    return small


def _earlier_cuts(model: nn.Module, plan: Plan, weights: dict[str, Tensor]) -> str:
    """What else to do where the builder's model is wider than the planned one, which may have been cut before."""
    planned = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    planned |= {name: cut.shape for name, cut in plan.cuts.items()}
    built = {name: tuple(tensor.shape) for name, tensor in tensors_of(model) if name in planned}
    wider = [
        len(shape) == len(planned[name]) and all(one >= other for one, other in zip(shape, planned[name], strict=True))
        for name, shape in built.items()
        if shape != planned[name]
    ]
    if not wider or not all(wider) or len(built) < len(planned):
        return ""
    return (
        ". It is wider than the one that was planned: if that had been cut while it trained, builder has to cut it as "
        "well, as in lambda: ng.compact(MyModel(), shrinker.plan)"
    )


def check_target(target: Path) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise StorageError(f"{target} is a file; choose another name for the folder")
    if target == Path.cwd():  # it is replaced as a whole, and the process would be left in a folder that is gone
        raise StorageError(f"{target} is the folder in which this process works; name a folder inside it")
    others = sorted(path.name for path in target.iterdir() if path.name not in (WEIGHTS, PLAN, META))
    if others:
        raise StorageError(
            f"{target} holds other files ({', '.join(others[:3])}), which saving would delete; choose a new folder"
        )


def _check_model(small: nn.Module, plan: Plan) -> None:
    if not isinstance(small, nn.Module):
        raise StorageError(f"can't save a {type(small).__name__}; pass the model that ng.compact returned")
    check_whole(small, StorageError)
    if not isinstance(plan, Plan):
        raise StorageError(f"can't save without the plan, got a {type(plan).__name__}; pass what ng.plan returned")
    if uncompiled(small) is not small:
        raise StorageError(
            "the model is wrapped by torch.compile, and the wrapper's names would be saved; plan and compact the model "
            "that was compiled, and save that"
        )
    tensors = dict(tensors_of(small))
    for name, cut in beside_idle(plan).cuts.items():
        shape = tuple(tensors[name].shape) if name in tensors else None
        if shape != cut.new_shape:
            raise StorageError(
                f"this model is not what ng.compact(model, plan) returns: {name!r} should have shape {cut.new_shape}, "
                f"found {shape}; compact the model first, and save it with the same plan"
            )
    for name, module in small.named_modules():
        if isinstance(module, Gate) and not isinstance(module, FrozenGate):
            raise StorageError(f"the model still has a gate, {name!r}; save what ng.compact(model, plan) returns")
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise StorageError(
                f"layer {name!r} ({type(module).__name__}) has extra state, which only a pickle could hold; "
                "save it yourself"
            )


def _really_idle(small: nn.Module, plan: Plan) -> dict[str, str]:
    """The modules that were replaced: ``compact_`` leaves them narrow, and they have weights to save."""
    modules = dict(small.named_modules(remove_duplicate=False))
    return {name: kind for name, kind in plan.idle.items() if name not in modules or is_replaced(modules[name])}


def describe(small: nn.Module, files: dict[str, bytes]) -> dict[str, Any]:
    not_saved = {name for name, _ in tensors_of(small)} - {name for name, _ in tensors_of(small, persistent=True)}
    return {
        "format": FORMAT,
        "narrowgate": __version__,
        "torch": torch.__version__,
        "class": _class_name(small),
        "sha256": {name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
        "tied": ties_of(small),
        "frozen_gates": [name for name, module in small.named_modules() if isinstance(module, FrozenGate)],
        "dtypes": {name: str(tensor.dtype) for name, tensor in tensors_of(small) if name in not_saved},
    }


def find(target: Path) -> Path:
    path = surviving_folder(target)
    if path is None:
        raise StorageError(f"there is no folder {target}; check the path, or write it with ng.save")
    if not path.is_dir():
        raise StorageError(f"{path} is a file; give the folder that ng.save wrote")
    missing = [name for name in (META, WEIGHTS, PLAN) if not (path / name).is_file()]
    if missing:
        raise StorageError(f"{path} is not a complete saved model, it lacks {', '.join(missing)}; save the model again")
    if path != target:
        warnings.warn(f"saving {target} was interrupted; this is the version before, from {path}", stacklevel=3)
    return path


def read_meta(path: Path) -> dict[str, Any]:
    keys = {"format": int, "class": str, "sha256": dict, "tied": dict, "frozen_gates": list, "dtypes": dict}
    try:
        meta = json.loads(path.read_bytes())
        if not isinstance(meta["format"], int):
            raise TypeError(f"format is {meta['format']!r}")
        if meta["format"] == FORMAT:
            wrong = [key for key, kind in keys.items() if not isinstance(meta[key], kind)]
            if wrong:
                raise TypeError(f"{', '.join(wrong)} is of the wrong type")
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{path} is damaged ({type(error).__name__}: {error}); save the model again") from error
    if meta["format"] != FORMAT:
        raise StorageError(
            f"{path} has format {meta['format']}, this narrowgate ({__version__}) reads format {FORMAT}; "
            f"use the version that wrote it: {meta.get('narrowgate', 'unknown')}"
        )
    return dict(meta)


def read_file(path: Path, meta: dict[str, Any]) -> bytes:
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != meta["sha256"].get(path.name):
        raise StorageError(
            f"{path} is damaged or was changed: its checksum is not the one in {META}; save the model again, "
            "or copy the whole folder again"
        )
    return content


def read_plan(path: Path, meta: dict[str, Any]) -> Plan:
    try:
        return Plan.from_json(read_file(path, meta).decode())
    except StorageError:
        raise
    except ValueError as error:
        raise StorageError(f"{path} can't be read: {error}; save the model again") from error


def build(builder: Callable[[], nn.Module], *, on_meta: bool = False) -> nn.Module:
    """The full-size model that a builder makes, if it can be cut and filled; ``on_meta``: it may have no numbers."""
    if isinstance(builder, nn.Module) or not callable(builder):
        raise StorageError(
            f"builder must be a function that makes the full-size model, got a {type(builder).__name__}; "
            "pass for example lambda: MyModel()"
        )
    model = builder()
    if not isinstance(model, nn.Module):
        raise StorageError(f"builder() returned a {type(model).__name__}, not an nn.Module")
    if uncompiled(model) is not model:
        raise StorageError("builder() returned a model that torch.compile wraps; compile what ng.load returns instead")
    if lazy := [name for name, tensor in tensors_of(model) if is_lazy(tensor)]:
        raise StorageError(f"builder() left {lazy[0]!r} without a shape; run the model once on an example in there")
    if gates := [name for name, module in model.named_modules() if isinstance(module, Gate)]:
        raise StorageError(f"builder() returned a gated model ({gates[0]}); return it before ng.attach_gates_")
    meta = [] if on_meta else [name for name, tensor in tensors_of(model) if tensor.is_meta]
    if meta:
        raise StorageError(f"builder() left {meta[0]!r} on the meta device, without numbers; build on a real device")
    return model


def put_frozen_gates_(model: nn.Module, names: list[str], plan: Plan, weights: dict[str, Tensor]) -> None:
    """Put back the gates on whole outputs, which no weight could take in, at the size the plan expects."""
    for name in names:
        factor = weights[f"{name}.g"]
        cut = plan.cuts.get(f"{name}.g")
        size = factor.shape if cut is None else cut.shape
        gate_layer_(model.get_submodule(name.rpartition(".")[0]), "gate", FrozenGate(factor.new_ones(size)))


def _class_name(model: nn.Module) -> str:
    return f"{type(model).__module__}.{type(model).__qualname__}"
