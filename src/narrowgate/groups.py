"""Groups other than channels: attention heads, neurons of MLPs, residual branches, and those that a user lists.

Which modules are attention or an MLP is told by their parts' names, one row a spelling. A wrong guess costs nothing but
a useless gate: what a closed gate makes removable is for the remover to find. A residual branch has to end where a gate
makes it zero, so those are listed by class.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeGuard

from torch import nn

from narrowgate.swap import full_name, has_gated_class, in_channels, is_conv1d, out_channels

NAMES = ("channels", "neurons", "heads", "blocks")
COUPLED = "coupled"

# How many heads there are, and the layer that reads them.
_ATTENTION = (
    ("num_heads", "proj"),  # timm
    ("num_heads", "out_proj"),  # nn.MultiheadAttention
    ("num_heads", "c_proj"),  # GPT-2
    ("n_heads", "out_lin"),  # DistilBERT
    ("self.num_attention_heads", "output.dense"),  # BERT
    ("num_attention_heads", "o_proj"),  # Hugging Face's ViT
)
# The layer that makes an MLP's neurons, and the one that reads them.
_MLP = (
    ("fc1", "fc2"),
    ("c_fc", "c_proj"),
    ("lin1", "lin2"),
    ("linear1", "linear2"),  # nn.TransformerEncoderLayer and nn.TransformerDecoderLayer
    ("0", "3"),  # torchvision's, an nn.Sequential
    ("intermediate.dense", "output.dense"),
)
# The last layer of each branch that a block adds to what came in; of an nn.Sequential, its last layer.
_BRANCH_ENDS = {
    "narrowgate.models.mobilenet.InvertedResidual": ("project.bn",),
    "narrowgate.models.resnet.PreActBottleneck": ("conv3",),
    "timm.models.resnet.BasicBlock": ("bn2",),
    "timm.models.resnet.Bottleneck": ("bn3",),
    "timm.models.swin_transformer.SwinTransformerBlock": ("attn.proj", "mlp.fc2"),
    "timm.models.swin_transformer_v2.SwinTransformerV2Block": ("norm1", "norm2"),
    "timm.models.vision_transformer.Block": ("attn.proj", "mlp.fc2"),
    "torchvision.models.mobilenetv2.InvertedResidual": ("conv",),
    "torchvision.models.resnet.BasicBlock": ("bn2",),
    "torchvision.models.resnet.Bottleneck": ("bn3",),
    "torchvision.models.vision_transformer.EncoderBlock": ("self_attention.out_proj", "mlp.3"),
    "transformers.models.bert.modeling_bert.BertLayer": ("attention.output.dense", "output.dense"),
    "transformers.models.gpt2.modeling_gpt2.GPT2Block": ("attn.c_proj", "mlp.c_proj"),
}
# Blocks that add their branch only where this attribute says so.
_ADDS_IF = {
    "narrowgate.models.mobilenet.InvertedResidual": "adds",
    "torchvision.models.mobilenetv2.InvertedResidual": "use_res_connect",
}


@dataclass(frozen=True)
class Part:
    """Rows ("gate") or columns ("gate_in") of one layer: the number of each one's group, -1 for none."""

    name: str
    layer: nn.Module
    key: Literal["gate", "gate_in"]
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Family:
    """Groups that become one gate, a number each: what they are called, and all their parts."""

    label: str
    names: tuple[str, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Bundle:
    """Channels that several outputs, of one layer or more, can only lose together.

    ``layers`` are those that a gate has to close; of each output, which of the ``size`` channels it writes, or -1.
    """

    size: int
    layers: dict[str, tuple[int, ...]]

    @property
    def label(self) -> str:
        """What its gates are called: by the first of its layers."""
        return next(iter(self.layers))


@dataclass(frozen=True)
class Coupled:
    """Which layers share channels, as ``ng.coupled`` finds them: a choice of gates for ``attach_gates_``.

    ``alone`` are layers that share none, and ``held`` those that get no gate, and why.
    """

    bundles: tuple[Bundle, ...]
    alone: tuple[str, ...]
    held: dict[str, str]

    def __str__(self) -> str:
        width = max([len(bundle.label) for bundle in self.bundles] + [len(name) for name in self.held], default=0)
        sets, alone = len(self.bundles), len(self.alone)
        lines = [
            f"Coupled: {sets} set{'s' * (sets != 1)} of shared channels, {alone} layer{'s' * (alone != 1)} alone",
        ]
        for bundle in self.bundles:
            others = ", ".join(name for name in bundle.layers if name != bundle.label)
            lines.append(f"  {bundle.label:<{width}}  {bundle.size:>6}  {'with ' + others if others else ''}".rstrip())
        return "\n".join([*lines, *(f"  {name:<{width}}  no gate: {why}" for name, why in self.held.items())])


def heads_of(model: nn.Module) -> Iterator[Family]:
    """The heads of each attention, as columns of the layer that reads them."""
    for name, module in model.named_modules():
        for count_path, path in _ATTENTION:
            count, layer = _at(module, count_path), _at(module, path)
            if not isinstance(count, int) or not isinstance(layer, nn.Module) or not has_gated_class(layer):
                continue
            place = f"{name}.{path}" if name else path
            width = in_channels(layer)
            if count < 1 or width % count:
                continue
            numbers = tuple(i // (width // count) for i in range(width))
            names = tuple(f"{name}.{i}" for i in range(count))
            yield Family(f"{place}.heads", names, (Part(place, layer, "gate_in", numbers),))
            break


def neurons_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers whose outputs are neurons of an MLP."""
    for name, module in model.named_modules():
        for first, second in _MLP:
            layer, reader = _at(module, first), _at(module, second)
            if _is_matrix(layer) and _is_matrix(reader) and out_channels(layer) == in_channels(reader):
                yield f"{name}.{first}" if name else first, layer


def branch_ends_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The last layers of residual branches, in blocks of the classes that are listed above."""
    for name, module in model.named_modules():
        for path in _branch_ends(module):
            layer = _at(module, path)
            if isinstance(layer, nn.Module):
                yield last_of(f"{name}.{path}" if name else path, layer)


def last_of(name: str, module: nn.Module) -> tuple[str, nn.Module]:
    """The layer whose result a module returns: of a plain nn.Sequential, its last child's."""
    while type(module).forward is nn.Sequential.forward and len(module._modules):
        last, child = list(module._modules.items())[-1]
        if child is None:
            break
        name, module = f"{name}.{last}", child
    return name, module


def blocks_of(ends: list[tuple[str, nn.Module]]) -> Family:
    """Branches that end in these layers, each a group of all rows of its layer."""
    parts = tuple(Part(name, layer, "gate", (i,) * out_channels(layer)) for i, (name, layer) in enumerate(ends))
    return Family("blocks", tuple(name for name, _ in ends), parts)


def _branch_ends(module: nn.Module) -> tuple[str, ...]:
    for cls in type(module).__mro__:
        ends, condition = _BRANCH_ENDS.get(full_name(cls)), _ADDS_IF.get(full_name(cls))
        if ends is not None and type(module).forward is vars(cls).get("forward"):
            return ends if condition is None or getattr(module, condition) else ()
    return ()


def _is_matrix(layer: object) -> TypeGuard[nn.Module]:
    if not isinstance(layer, nn.Module) or not has_gated_class(layer):
        return False
    return isinstance(layer, nn.Linear) or is_conv1d(layer)


def _at(module: nn.Module, path: str) -> object:
    """What lies at a dotted path of attributes, None where there is nothing."""
    found: object = module
    for key in path.split("."):
        found = getattr(found, key, None)
    return found
