"""The auto layout: each layer whole or narrowed to its own channels, whichever measures faster where the model is."""

from __future__ import annotations

import copy
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

from narrowgate.flow.analysis import Flow, Mixer
from narrowgate.flow.cuts import Cut, Edit
from narrowgate.flow.decide import Decision
from narrowgate.flow.layers import SWAPS
from narrowgate.flow.resize import resize_

_ROUNDS = 7


def faster_whole(
    flow: Flow, decision: Decision, whole: dict[str, Cut], own: dict[str, Cut], edits: dict[str, Edit]
) -> set[str]:
    """The layers that index operations would make slower, timed one by one at the example's size."""
    return {
        mixer.layer
        for mixer in flow.mixers
        if (edit := edits[mixer.weight]).layer == mixer.layer
        and (edit.gather is not None or edit.scatter is not None)
        and not (type(flow.modules[mixer.layer]) in SWAPS and _pays(flow, decision, mixer, edit, whole, own))
    }


@torch.no_grad()
def _pays(flow: Flow, decision: Decision, mixer: Mixer, edit: Edit, whole: dict[str, Cut], own: dict[str, Cut]) -> bool:
    plain = _layer(flow, mixer, whole, None)
    indexed = _layer(flow, mixer, own, edit)
    weight = flow.tensors[mixer.weight]
    shape = list(mixer.inputs.shape)
    shape[mixer.inputs.axis or 0] = len(decision.positions(mixer.inputs.labels))
    x = torch.randn(shape, dtype=weight.dtype, device=weight.device)
    for layer in (plain, indexed):
        layer(x)
    times: list[list[float]] = [[], []]
    for _ in range(_ROUNDS):
        for layer, found in zip((plain, indexed), times, strict=True):
            found.append(_seconds(layer, x))
    return statistics.median(times[1]) < statistics.median(times[0])


def _layer(flow: Flow, mixer: Mixer, cuts: dict[str, Cut], edit: Edit | None) -> nn.Module:
    """A copy of the layer alone, of the planned size, with any numbers."""
    owner = flow.modules[mixer.layer]
    memo: dict[int, Any] = {}
    for name, parameter in owner.named_parameters():
        how = cuts.get(f"{mixer.layer}.{name}")
        shape = parameter.shape if how is None else how.new_shape
        memo[id(parameter)] = nn.Parameter(torch.randn(shape, dtype=parameter.dtype, device=parameter.device))
    # What hooks do is no part of the layer, and they may reach others, which are as wide as they were.
    memo |= {id(hooks): type(hooks)() for hooks in (owner._forward_hooks, owner._forward_pre_hooks)}
    model = nn.ModuleDict({"layer": copy.deepcopy(owner, memo)})
    if edit is not None:
        resize_(model, {"": Edit(**{**vars(edit), "layer": "layer"})}, {})
    return model["layer"]


def _seconds(layer: nn.Module, x: Tensor) -> float:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    start = time.perf_counter()
    layer(x)
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter() - start
