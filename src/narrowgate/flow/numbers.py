"""Numbers of channels that a block holds itself, such as ``self.width`` for ``x.split(self.width, 1)``.

They are changed with the channels they count; the replay then runs the user's own code with them. If it does not do
what was predicted, they stay, and so do the channels. What the code does as well without is left alone: it may count
something else, of which there are as many by chance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn
from torch.nn.modules.conv import _ConvNd

from narrowgate.flow.analysis import Flow
from narrowgate.flow.decide import Decision
from narrowgate.flow.trace import layer_of, op_name


def _own_numbers(flow: Flow, decision: Decision) -> dict[str, int]:
    """New values of attributes that count channels, by module and attribute."""
    numbers: dict[str, int] = {}
    for node, labels, size in flow.parts:
        left = len(decision.positions(labels))
        if left == len(labels) or op_name(node) == "chunk":  # a count of parts, not of channels
            continue
        new = {size: left * size // len(labels), len(labels): left}
        numbers |= {key: new[n] for key, n in _numbers_of(flow.modules, layer_of(node)) if n in new}
    for mixer in flow.mixers:
        module, labels = flow.modules.get(mixer.layer), mixer.inputs.labels
        if module is None or isinstance(module, _ConvNd) or not mixer.groups == len(labels) > 1:
            continue
        left = len(decision.positions(labels))  # a function with a group for each channel, as F.conv2d in a blur
        counts = ((key, n) for key, n in vars(module).items() if type(n) is int)
        numbers |= {f"{mixer.layer}.{key}": left for key, n in counts if n == len(labels) != left}
    for heads in flow.heads:
        if heads.labels is None or decision.kept[heads.labels].all():
            continue
        count, left = len(heads.labels), len(decision.positions(heads.labels))
        for key, n in _numbers_of(flow.modules, layer_of(heads.node)):
            attribute = key.rpartition(".")[2]
            if n == count and "head" in attribute and not any(word in attribute for word in ("dim", "size")):
                numbers[key] = left
            elif n == count * heads.size:
                numbers[key] = left * heads.size
    return numbers


def needed_numbers(flow: Flow, decision: Decision, works: Callable[[dict[str, int]], bool]) -> dict[str, int]:
    """New values of attributes that count channels, without those that the code does as well without, or better."""

    def kind(name: str) -> tuple[type[nn.Module], str]:
        owner, _, attribute = name.rpartition(".")
        return type(flow.modules[owner]), attribute

    numbers = _own_numbers(flow, decision)
    for one in dict.fromkeys(map(kind, numbers)):
        rest = {name: number for name, number in numbers.items() if kind(name) != one}
        if works(rest):
            numbers = rest
    return numbers


def _numbers_of(modules: dict[str, nn.Module], name: str) -> Iterator[tuple[str, int]]:
    """The whole numbers that a block holds; those of a layer follow its weights."""
    module = modules.get(name, modules[""])
    prefix = f"{name}." if name in modules else ""
    if any(module.children()):
        yield from ((f"{prefix}{key}", n) for key, n in vars(module).items() if type(n) is int)
