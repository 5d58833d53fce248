"""A model larger than memory: its weights are read from disk one at a time, and the small model's written that way.

``ng.plan(model, inputs, weights=Checkpoint("big/"))`` plans a model that was built on the meta device, ``compact_to``
writes the small one's weights as ``ng.save`` would, and ``load`` reads them without building the large one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from narrowgate import storage
from narrowgate.atomic import new_folder, write_new
from narrowgate.flow.cuts import Edit
from narrowgate.flow.idle import beside_idle, shared_without_idle
from narrowgate.flow.plan import Plan
from narrowgate.flow.resize import resize_
from narrowgate.flow.skeleton import skeleton
from narrowgate.flow.surgery import check_fits, compact, cut, edited_tensors
from narrowgate.flow.ungated import ungated
from narrowgate.flow.unknown import Numbers, Weights, has_numbers, named_tensors
from narrowgate.flow.unproven import known_numbers
from narrowgate.weights import StorageError, convert_, fill_, tensors_of, ties_of, unpack

__all__ = ["Checkpoint", "compact_to", "load"]

_DTYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL"},
    **{torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64"},
}


class Checkpoint(Mapping[str, Tensor]):
    """The tensors of a safetensors file, or of a folder of them with or without an index, read when asked for."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files = _files_by_name(self.path)

    def __getitem__(self, name: str) -> Tensor:
        from safetensors import safe_open

        path = self._files[name]
        try:
            with safe_open(path, "pt") as file:
                tensor: Tensor = file.get_tensor(name)
        except Exception as error:
            raise StorageError(f"{name!r} can't be read from {path}: {error}; copy the file again") from error
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}): {len(self)} tensors in {len(set(self._files.values()))} files"


def compact_to(folder: str | Path, model: nn.Module, plan: Plan, weights: Weights) -> None:
    """Write what ``ng.save(ng.compact(model, plan), plan, folder)`` would, with one layer in memory at a time.

    Args:
        model: the large one, gated or not, on the meta device; what it has numbers for is taken from it.
        weights: its numbers by name, such as a ``Checkpoint``; they are written in the model's precision.
    """
    target = Path(folder).resolve()
    storage.check_target(target)
    filled, numbers = known_numbers(model, weights)
    check_fits(filled, plan)
    small = compact(skeleton(filled, {}, "meta"), plan)
    layers = _Layers(ungated(filled), numbers, plan)
    text = plan.to_json().encode()
    with new_folder(target) as new:
        meta = storage.describe(small, {storage.PLAN: text})
        with (new / storage.WEIGHTS).open("xb") as file:
            meta["sha256"][storage.WEIGHTS] = _write_tensors(file, small, layers)
        write_new(new / storage.PLAN, text)
        write_new(new / storage.META, json.dumps(meta, indent=1).encode())


def load(folder: str | Path, builder: Callable[[], nn.Module]) -> nn.Module:
    """A saved model, as ``ng.load`` gives it; ``builder`` may make the full-size one on the meta device."""
    path = storage.find(Path(folder).resolve())
    meta = storage.read_meta(path / storage.META)
    weights = unpack(storage.read_file(path / storage.WEIGHTS, meta), path / storage.WEIGHTS)
    plan = storage.read_plan(path / storage.PLAN, meta)
    model = storage.build(builder, on_meta=True)
    check_fits(model, plan)
    model, plan = shared_without_idle(model, plan.idle, plan.layout), beside_idle(plan)
    storage.put_frozen_gates_(model, meta["frozen_gates"], plan, weights)
    saved = {name for name, _ in tensors_of(model, persistent=True)}
    lost = [name for name, tensor in named_tensors(model) if name not in saved and not has_numbers(tensor)]
    if lost:
        raise StorageError(
            f"{lost[0]!r} is in no file (a buffer that is not persistent) and builder() made it on the meta device; "
            "make it on a real device, or use ng.load"
        )
    convert_(model, meta["dtypes"])
    trains = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    trains |= {f"{edit.layer}.bias": trains.get(edit.weight, True) for edit in plan.edits.values() if edit.new_bias}
    kept = {name: tensor for name, tensor in named_tensors(model) if name not in saved}
    small = skeleton(model, plan.cuts, "cpu")
    for name, tensor in kept.items():
        small.get_buffer(name).copy_(cut(tensor, plan.cuts[name]) if name in plan.cuts else tensor)
    for edit in plan.edits.values():
        if edit.new_bias:
            small.get_submodule(edit.layer).bias = nn.Parameter(torch.empty_like(weights[f"{edit.layer}.bias"]))
    for name, parameter in small.named_parameters():
        parameter.requires_grad_(trains.get(name, True))
    fill_(small, weights, meta["tied"], path / storage.WEIGHTS)
    resize_(small, plan.edits, plan.widths)
    return small


class _Layers:
    """The small model's tensors by name, each made when asked for."""

    def __init__(self, plain: nn.Module, numbers: Numbers | None, plan: Plan) -> None:
        self.tensors, self.numbers, self.plan = dict(named_tensors(plain)), numbers, plan
        self.edits: dict[str, Edit] = {}
        for edit in plan.edits.values():
            for name in (edit.weight, edit.bias or edit.mean or f"{edit.layer}.bias"):
                if edit.rows or edit.folded or edit.carried:
                    self.edits.setdefault(name, edit)
        self._waiting: dict[str, Tensor] = {}

    @torch.no_grad()
    def make(self, name: str) -> Tensor:
        """One tensor, edited and cut; what else an edit made of the layer waits until it is asked for."""
        if name in self._waiting:
            return self._waiting.pop(name)
        if name not in self.edits:
            return self._cut(name, self._whole(name))
        edit = self.edits[name]
        names = [each for each in (edit.weight, edit.bias, edit.mean) if each]
        whole = {each: self._whole(each) for each in names}
        made = whole | edited_tensors(_holder(whole), dataclasses.replace(self.plan, edits={edit.weight: edit}))
        self._waiting.update({each: self._cut(each, tensor) for each, tensor in made.items()})
        return self._waiting.pop(name)

    def _whole(self, name: str) -> Tensor:
        tensor = self.tensors[name]
        if has_numbers(tensor):
            return tensor.detach()
        if self.numbers is None or name not in self.numbers.found:
            raise StorageError(f"the weights lack {name!r}: they are of another model, or some files are missing")
        return self.numbers.read(name, tensor).detach()

    def _cut(self, name: str, tensor: Tensor) -> Tensor:
        if name in self.plan.cuts:
            return cut(tensor, self.plan.cuts[name])
        edit = self.edits.get(name)
        if edit is not None and edit.new_bias and name == f"{edit.layer}.bias" and edit.weight in self.plan.cuts:
            rows = self.plan.cuts[edit.weight].keep.get(1 if edit.transposed else 0)
            return tensor if rows is None else tensor[torch.tensor(rows, device=tensor.device)]
        return tensor


def _holder(tensors: dict[str, Tensor]) -> nn.Module:
    """A bare module tree that holds these tensors under their names."""
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, key = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_buffer(key, tensor)
    return root


def _write_tensors(file: BinaryIO, small: nn.Module, layers: _Layers) -> str:
    """Write a safetensors file, one tensor after the other, and return its checksum."""
    tied = ties_of(small)
    places = {name: tensor for name, tensor in tensors_of(small, persistent=True) if name not in tied}
    order = sorted(places, key=lambda name: -places[name].dtype.itemsize)  # so that each starts where its type may
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in order:
        tensor = places[name]
        if tensor.dtype not in _DTYPES:
            raise StorageError(f"safetensors can't hold {name!r}, of type {tensor.dtype}")
        end = at + math.prod(tensor.shape) * tensor.dtype.itemsize
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    checksum = hashlib.sha256()
    for piece in _pieces(text, order, places, layers):
        checksum.update(piece)
        file.write(piece)
    file.flush()
    os.fsync(file.fileno())
    return checksum.hexdigest()


def _pieces(text: bytes, order: list[str], places: dict[str, Tensor], layers: _Layers) -> Iterator[Any]:
    yield len(text).to_bytes(8, "little")
    yield text
    for name in order:
        tensor = layers.make(name)
        assert tensor.shape == places[name].shape, (name, tensor.shape, places[name].shape)
        yield tensor.to(places[name].dtype).cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _files_by_name(path: Path) -> dict[str, Path]:
    """In which file each tensor is."""
    from safetensors import safe_open

    if not path.exists():
        raise StorageError(f"there is no {path}; give a safetensors file, or a folder of them")
    index = next(iter(sorted(path.glob("*.safetensors.index.json"))), None) if path.is_dir() else None
    if index is not None:
        try:
            found = {str(name): path / file for name, file in json.loads(index.read_bytes())["weight_map"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StorageError(f"{index} can't be read: {type(error).__name__}: {error}") from error
        missing = sorted({file.name for file in found.values() if not file.is_file()})
        if missing:
            raise StorageError(f"{path} lacks {missing[0]}, which {index.name} names; copy the whole folder again")
        return found
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise StorageError(f"{path} holds no safetensors file")
    found = {}
    for each in files:
        try:
            with safe_open(each, "pt") as file:
                found.update(dict.fromkeys(file.keys(), each))
        except Exception as error:
            raise StorageError(f"{each} can't be read: {error}") from error
    return found
