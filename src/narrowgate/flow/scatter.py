"""The scatter layout: give a layer its own narrower inputs and outputs where the stream it works on stays wider."""

from __future__ import annotations

import dataclasses

import numpy as np
from torch import nn

from narrowgate.flow.analysis import Flow, Mixer
from narrowgate.flow.cuts import Cut, Edit
from narrowgate.flow.decide import Decision, folds, wanted_constants
from narrowgate.flow.layers import SWAPS
from narrowgate.flow.multihead import is_attention
from narrowgate.flow.state import Labels
from narrowgate.flow.trace import overwritten


def narrow_to_own_channels(flow: Flow, decision: Decision, mixer: Mixer, edit: Edit, cuts: dict[str, Cut]) -> Edit:
    """The layer's edit with index maps, its weight and bias cut to the channels it alone needs; unchanged if none."""
    owner = flow.modules.get(mixer.layer)
    alone = type(owner) in SWAPS and isinstance(owner, nn.Module) and owner.weight is flow.tensors[mixer.weight]
    attention = is_attention(owner) and mixer.weight.startswith(mixer.layer)
    if mixer.shared or mixer.groups != 1 or not (alone or attention) or mixer.layer in flow.whole:
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
    new_bias = edit.bias is None and (bool(edit.folded) or any(value != 0 for value in rows.values()))
    return dataclasses.replace(
        edit, gather=gather, scatter=scatter, fill=fill, reads=len(stream_in), rows=rows, new_bias=new_bias
    )


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
