"""A model's parameters and buffers by name, into the bytes of a safetensors file and back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn


class StorageError(ValueError):
    """A model can't be saved like this, or a saved one can't be read."""


class OtherModelError(StorageError):
    """A saved model is of another model than the one given."""


def tensors_of(model: nn.Module, *, persistent: bool = False) -> list[tuple[str, Tensor]]:
    """All parameters and buffers by every name they have; ``persistent``: only those that belong in a file."""
    found = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        left_out = module._non_persistent_buffers_set if persistent else ()
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and key not in left_out:
                found.append((f"{prefix}.{key}" if prefix else key, tensor))
    return found


def uncompiled(model: nn.Module) -> nn.Module:
    """The model inside ``torch.compile``'s wrapper, which puts a word before every name; any other model itself."""
    if isinstance(model, torch.jit.ScriptModule):  # its children are in no dictionary; who can't take it says so
        return model
    inner = model._modules.get("_orig_mod")
    return model if inner is None else inner


def ties_of(model: nn.Module) -> dict[str, str]:
    """The names of tensors that have an earlier name, with that one."""
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(tensor), name) for name, tensor in tensors_of(model, persistent=True)}
    return {name: canonical for name, canonical in names.items() if name != canonical}


def pack(small: nn.Module) -> bytes:
    """A model's weights as a safetensors file; tied ones once, under their first name."""
    tied = ties_of(small)
    try:
        return serialise({name: t for name, t in tensors_of(small, persistent=True) if name not in tied})
    except Exception as error:
        raise StorageError(f"safetensors can't hold the weights of {type(small).__name__}: {error}") from error


def serialise(tensors: Mapping[str, Tensor]) -> bytes:
    """Tensors by name as a safetensors file."""
    import safetensors.torch

    packed, seen = {}, set()
    for name, tensor in tensors.items():
        data = tensor.detach().cpu().contiguous()
        memory = data.untyped_storage().data_ptr()
        packed[name] = data.clone() if memory in seen else data  # safetensors refuses tensors that share memory
        seen.add(memory)
    return safetensors.torch.save(packed, {"format": "pt"})


def unpack(content: bytes, path: Path) -> dict[str, Tensor]:
    """The tensors in a safetensors file that was read."""
    import safetensors.torch

    try:
        return safetensors.torch.load(content)
    except Exception as error:
        raise StorageError(f"{path} can't be read: {error}; save the model again") from error


def convert_(model: nn.Module, dtypes: dict[str, str]) -> None:
    """Give the named tensors these precisions, in place."""
    for name, tensor in tensors_of(model):
        if name in dtypes:
            tensor.data = tensor.data.to(getattr(torch, dtypes[name].removeprefix("torch.")))


def check_shapes(places: dict[str, Tensor], weights: dict[str, Tensor], path: Path) -> None:
    """Raise unless every tensor has the shape of the weight of its name, if there is one."""
    for name, tensor in places.items():
        if name in weights and tensor.shape != weights[name].shape:
            raise OtherModelError(
                f"{path} is of another model than builder() makes: {name!r} has shape {tuple(weights[name].shape)} "
                f"in the file and {tuple(tensor.shape)} in the model"
            )


def check_same_ties(model: nn.Module, tied: dict[str, str], path: Path) -> dict[str, str]:
    """The model's ties; raises unless they are those of the saved one."""
    ties = ties_of(model)
    if ties != tied:
        odd = sorted(set(ties.items()) ^ set(tied.items()))[0]
        raise OtherModelError(
            f"{path}: {odd[0]!r} and {odd[1]!r} are one tensor in only one of the saved model and builder()'s; "
            "builder has to tie the same weights"
        )
    return ties


def fill_(small: nn.Module, weights: dict[str, Tensor], tied: dict[str, str], path: Path) -> None:
    """Put all weights in; raises, before anything is touched, unless names, shapes and ties are the model's."""
    ties = check_same_ties(small, tied, path)
    places = {name: tensor for name, tensor in tensors_of(small, persistent=True) if name not in ties}
    if places.keys() != weights.keys():
        odd_names = sorted(places.keys() ^ weights.keys())
        raise OtherModelError(f"{path} is of another model than builder() makes: only one of them has {odd_names[0]!r}")
    check_shapes(places, weights, path)
    for name, tensor in places.items():
        tensor.data = weights[name].to(tensor.device, copy=True)
