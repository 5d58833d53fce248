"""Networks nobody trained, made fit for comparing outputs: live signals everywhere, half of all filters zero."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

# Parameters outside layers and norms that multiply (layer scales, gains); all others that start at zero are added.
_FACTORS = ("scale", "gamma", "gain", "weight", "alpha", "ls", "temperature")


def mixers(model: nn.Module) -> dict[str, nn.Module]:
    """All convolutions and linear layers, in the order in which the model holds them."""
    return {name: module for name, module in model.named_modules() if isinstance(module, (_ConvNd, nn.Linear))}


@torch.no_grad()
def randomise_(model: nn.Module, shift: float = 0.3) -> None:
    """Nothing is zero or one by initialisation any more: norms, biases, layer scales, tokens, zero weights."""
    owned: set[int] = set()
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if isinstance(module, (_ConvNd, nn.Linear)):
            _randomise_layer_(module)
        elif isinstance(module, (_BatchNorm, nn.LayerNorm, nn.GroupNorm)):
            _randomise_norm_(module, shift)
        else:
            continue
        owned.update(map(id, own))
    for name, parameter in model.named_parameters():
        if id(parameter) not in owned:
            _randomise_other_(name, parameter)


def _randomise_layer_(layer: nn.Module) -> None:
    if not layer.weight.any():
        layer.weight.normal_(0, layer.weight[0].numel() ** -0.5)
    if layer.bias is not None:
        layer.bias.normal_(0, 0.1)


def _randomise_norm_(norm: nn.Module, shift: float) -> None:
    if norm.weight is not None:
        norm.weight.uniform_(0.5, 1.5)
    if norm.bias is not None:
        norm.bias.normal_(0, shift)


def _randomise_other_(name: str, parameter: Tensor) -> None:
    if not parameter.is_floating_point() or not parameter.numel():
        return
    first = parameter.reshape(-1)[0]
    if not (parameter == first).all():
        return  # it has been drawn at random already
    factor = any(word in name.rpartition(".")[2].lower() for word in _FACTORS)
    if factor and first.abs() < 0.3:
        parameter.uniform_(0.5, 1.5)
    elif factor or first != 0:
        parameter.mul_(torch.empty_like(parameter).uniform_(0.9, 1.1))
    else:
        parameter.normal_(0, 0.1)


@torch.no_grad()
def zero_half_(model: nn.Module) -> None:
    """Half of the filters of every layer but the last, bias included, each layer drawn by itself.

    The others grow by the root of two, so that networks without norms keep their signal.
    """
    layers = list(mixers(model).values())
    for layer in layers[:-1]:
        zero_rows_(layer.weight, layer.bias, transposed=isinstance(layer, _ConvTransposeNd))
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
            zero_rows_(module.in_proj_weight, module.in_proj_bias)


@torch.no_grad()
def zero_half_inputs_(model: nn.Module) -> None:
    """Half of what every layer reads, each layer drawn by itself: layers that share a batch read other parts of it."""
    for layer in mixers(model).values():
        if getattr(layer, "groups", 1) > 1:
            continue
        axis = 0 if isinstance(layer, _ConvTransposeNd) else 1
        inputs = layer.weight.shape[axis]
        if inputs > 3:  # the image has all of its colours
            layer.weight.mul_(2**0.5).index_fill_(axis, torch.randperm(inputs)[: inputs // 2], 0.0)


def zero_rows_(weight: Tensor, bias: Tensor | None, transposed: bool = False) -> None:
    """Half of the outputs of one weight, rounded down, so that a layer of width 1 stays."""
    rows = weight.shape[1 if transposed else 0]
    dead = torch.randperm(rows)[: rows // 2]
    weight.mul_(2**0.5)
    weight.index_fill_(1 if transposed else 0, dead, 0.0)
    if bias is not None and len(bias) == rows:
        bias[dead] = 0.0


@torch.no_grad()
def calibrate_(model: nn.Module, run: Callable[[], object]) -> None:
    """BatchNorm statistics that fit the data, then moved by a tenth; dead channels get a variance too."""
    norms = list(batch_norms(model))
    before = [norm.momentum for norm in norms]
    for norm in norms:
        norm.train()
        norm.momentum = 1.0
    if norms:
        run()
    for norm, momentum in zip(norms, before, strict=True):
        norm.eval()
        norm.momentum = momentum
        typical = float(norm.running_var.mean()) or 1.0
        norm.running_var.clamp_(min=0.05 * typical)
        norm.running_mean.add_(0.1 * norm.running_var.sqrt() * torch.randn_like(norm.running_mean))
        norm.running_var.mul_(torch.empty_like(norm.running_var).uniform_(0.9, 1.1))


def batch_norms(model: nn.Module) -> Iterator[nn.Module]:
    """Every BatchNorm with running statistics."""
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.running_var is not None:
            yield module


def parameters(model: nn.Module) -> int:
    """How many numbers the model learns."""
    return sum(parameter.numel() for parameter in model.parameters())
