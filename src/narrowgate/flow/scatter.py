"""The scatter layout: give a layer its own narrower inputs and outputs where the stream it works on stays wider.

Where all that reads a norm reads only some of its channels, the norm picks them, and what is behind it is narrow too.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from torch import nn
from torch.fx import Node
from torch.nn.modules.batchnorm import _BatchNorm

from narrowgate.flow.analysis import Flow, Mixer
from narrowgate.flow.cuts import Cut, Edit
from narrowgate.flow.decide import Decision, folds, wanted_constants
from narrowgate.flow.editing import NORMS, with_place_for_constants
from narrowgate.flow.layers import NORM_SWAPS, SWAPS
from narrowgate.flow.movement import arg
from narrowgate.flow.multihead import is_attention
from narrowgate.flow.pointwise import RULES as POINTWISE_RULES
from narrowgate.flow.pooling import RULES as POOLING_RULES
from narrowgate.flow.state import Labels, State
from narrowgate.flow.trace import layer_of, op_name, overwritten

# With one operand, and if the channels come out as they went in, each result is made of one channel.
_CHANNEL_BY_CHANNEL = frozenset([*POINTWISE_RULES, *POOLING_RULES, "getitem"])


def narrow_to_own_channels(flow: Flow, decision: Decision, mixer: Mixer, edit: Edit, cuts: dict[str, Cut]) -> Edit:
    """The layer's edit with index maps, its weight and bias cut to the channels it alone needs; unchanged if none."""
    owner = flow.modules.get(mixer.layer)
    alone = type(owner) in SWAPS and isinstance(owner, nn.Module) and owner.weight is flow.tensors[mixer.weight]
    attention = is_attention(owner) and mixer.weight.startswith(mixer.layer)
    if mixer.shared or mixer.groups != 1 or not (alone or attention) or mixer.layer in flow.whole:
        return edit
    if _may_read_nested_tensors(flow, mixer.layer):
        return edit
    stream_in, stream_out = decision.positions(mixer.inputs.labels), decision.positions(mixer.output.labels)
    own_in, edit = _own_inputs(flow, mixer, edit, stream_in)
    own_out = stream_out[mixer.needed_rows[stream_out]]
    dead = not len(own_out) and alone and not edit.transposed and _may_be_idle(flow, mixer)
    if not len(own_out):  # one row that computes nothing
        own_out = stream_out[:1]
    gathers, scatters = len(own_in) < len(stream_in), dead or len(own_out) < len(stream_out)
    if not gathers and not scatters:
        return edit
    axis = 0 if edit.transposed else 1
    cuts[edit.weight] = Cut(tuple(flow.tensors[edit.weight].shape), {axis: own_in.tolist(), 1 - axis: own_out.tolist()})
    if edit.bias is not None:
        cuts[edit.bias] = Cut((len(mixer.output.labels),), {0: own_out.tolist()})
    gather = np.searchsorted(stream_in, own_in).tolist() if gathers else None
    scatter = ([] if dead else np.searchsorted(stream_out, own_out).tolist()) if scatters else None
    constants = np.nan_to_num(mixer.stand_in[stream_out], nan=0.0)  # a dead channel may be anything
    fill = constants.tolist() if scatters else None
    rows = {row: value for row, value in edit.rows.items() if row in set(own_out.tolist()) and not dead}
    narrow = dataclasses.replace(edit, gather=gather, scatter=scatter, fill=fill, reads=len(stream_in), rows=rows)
    return with_place_for_constants(flow, mixer, narrow, idle=dead)


def _may_read_nested_tensors(flow: Flow, layer: str) -> bool:
    """Whether an nn.TransformerEncoder around a layer makes nested tensors where a mask is: they have no index."""
    parts = layer.split(".")
    around = [flow.modules[".".join(parts[:i])] for i in range(len(parts))]
    return any(isinstance(one, nn.TransformerEncoder) and getattr(one, "use_nested_tensor", False) for one in around)


def _may_be_idle(flow: Flow, mixer: Mixer) -> bool:
    """Whether its result may be shared memory, and something behind it is left to learn."""
    if overwritten(mixer.node, flow.graph):
        return False
    waiting, seen = [mixer.node], {mixer.node}
    while waiting:
        for user in waiting.pop().users:
            if any(source in flow.graph.tensors for source in user.all_input_nodes):
                return True
            if user not in seen:
                seen.add(user)
                waiting.append(user)
    return False


def _own_inputs(flow: Flow, mixer: Mixer, edit: Edit, stream: Labels) -> tuple[Labels, Edit]:
    """The inputs a layer really reads; constants that can become a bias do, though the stream still has them."""
    values = mixer.inputs.values
    varying = mixer.live_columns & np.isnan(values)
    constant = wanted_constants(mixer)
    if folds(flow, mixer):
        dropped = flow.constants == "drop"
        folded = {} if dropped else {int(i): float(values[i]) for i in np.flatnonzero(constant)}
        sums = {column: constant for column, (_, constant) in mixer.merged.items()}
        edit = dataclasses.replace(edit, folded=folded | sums)
        reads = varying
    else:
        reads = varying | constant
    own = stream[reads[stream]]
    return (own if len(own) else stream[:1]), edit


def gather_before_norms(
    flow: Flow, decision: Decision, cuts: dict[str, Cut], edits: dict[str, Edit], layout: str
) -> None:
    """Where every layer behind a norm gathers, let the norm gather what any of them reads: it is cut to that, in place.

    A layer that reads less than the norm then gives keeps a gather of its own; in ``auto`` such a norm stays whole.
    """
    mixers = {mixer.node: mixer for mixer in flow.mixers}
    for node in flow.graph.nodes:
        names = _own_vectors(flow, node)
        readers = None if names is None else _readers(flow, node, mixers)
        if not names or not readers:
            continue
        gathers = [gather for mixer in readers if (gather := edits[mixer.weight].gather) is not None]
        picked = sorted(set().union(*gathers))
        stream = decision.positions(readers[0].inputs.labels)
        alike = all(len(gather) == len(picked) for gather in gathers)
        if len(gathers) < len(readers) or len(picked) == len(stream) or not (alike or layout == "scatter"):
            continue
        for mixer, gather in zip(readers, gathers, strict=True):
            rest = None if len(gather) == len(picked) else np.searchsorted(picked, gather).tolist()
            edits[mixer.weight] = dataclasses.replace(edits[mixer.weight], gather=rest, reads=len(picked))
        for name in names:
            cuts[name] = Cut(tuple(flow.tensors[name].shape), {0: stream[picked].tolist()})
        edits[names[0]] = Edit(layer_of(node), names[0], None, 1, False, gather=picked, reads=len(stream))


def _own_vectors(flow: Flow, node: Node) -> list[str] | None:
    """The names of a norm's vectors, its scale first, if it is PyTorch's own and nothing else reads them."""
    if node.op != "call_function" or op_name(node) not in NORMS:
        return None
    layer = layer_of(node)
    owner = flow.modules.get(layer)
    if type(owner) not in NORM_SWAPS or not isinstance(owner, _BatchNorm) or layer in flow.whole:
        return None
    names = [flow.graph.tensors.get(arg(node, i, "")) for i in range(1, 5)]
    vectors = [owner.weight, owner.bias, owner.running_mean, owner.running_var]
    found = [None if name is None else flow.tensors[name] for name in names]
    if owner.weight is None or any(one is not other for one, other in zip(found, vectors, strict=True)):
        return None
    own = [name for name in names if name is not None]
    return own if all(flow.uses[name] == 1 for name in own) else None


def _readers(flow: Flow, norm: Node, mixers: dict[Node, Mixer]) -> list[Mixer] | None:
    """The layers behind a norm, its activation and pooling; None if anything else reads its result."""
    state = flow.states[norm]
    labels = (state[0] if isinstance(state, list) else state).labels
    found, waiting = [], [norm]
    while waiting:
        for user in waiting.pop().users:
            mixer, result = mixers.get(user), flow.states.get(user)
            if mixer is not None and mixer.inputs.labels is labels and type(flow.modules.get(mixer.layer)) in SWAPS:
                found.append(mixer)
            elif _is_channel_by_channel(user) and isinstance(result, State) and result.labels is labels:
                waiting.append(user)
            else:
                return None
    return found


def _is_channel_by_channel(node: Node) -> bool:
    return op_name(node).rstrip("_") in _CHANNEL_BY_CHANNEL and len(node.all_input_nodes) == 1
