"""From a decision to the few numbers of a layer that removed constants change."""

from __future__ import annotations

import dataclasses

import numpy as np
from torch import nn

from narrowgate.flow.analysis import Flow, Mixer
from narrowgate.flow.couplings import GROUPED
from narrowgate.flow.cuts import Counted, Edit
from narrowgate.flow.decide import Decision, folds, wanted_constants
from narrowgate.flow.mixing import is_saved
from narrowgate.flow.movement import arg
from narrowgate.flow.trace import op_name

NORMS = ("batch_norm", "_native_batch_norm_legit_no_training")


def edit_of(flow: Flow, decision: Decision, mixer: Mixer, carrier: int | None) -> Edit:
    """What changes of a layer: constants that go into its bias or to a carrier, rows that become constants."""
    values, labels = mixer.stand_in, mixer.output.labels
    transposed = mixer.out_axis == 1
    columns = mixer.inputs.labels
    gone = ~decision.kept[columns] & wanted_constants(mixer) if len(mixer.live_columns) else np.zeros(0, bool)
    lost = {int(i): float(mixer.inputs.values[i]) for i in np.flatnonzero(gone)}
    folded = lost if folds(flow, mixer) and flow.constants != "drop" else {}
    folded = folded | {column: constant for column, (_, constant) in mixer.merged.items()}
    carried: dict[int, float] = {}
    if carrier is not None and not folded:
        carried = {i: value / float(mixer.inputs.values[carrier]) for i, value in lost.items()}
    rows: dict[int, float] = {}
    if not mixer.shared:
        bias = 0.0 if mixer.bias is None else flow.tensors[mixer.bias].detach().double().cpu().numpy()
        so_already = mixer.zero_rows & (values == bias)
        constant = np.flatnonzero(decision.kept[labels] & ~mixer.needed_rows & ~np.isnan(values) & ~so_already)
        rows = {int(i): float(values[i]) for i in constant}
    new_groups = mixer.groups
    if mixer.groups > 1 and mixer.groups == len(columns):
        new_groups = len(decision.positions(columns))
    edit = Edit(
        mixer.layer,
        mixer.weight,
        mixer.bias,
        mixer.groups,
        transposed,
        rows,
        folded,
        carried,
        carrier if carried else None,
        {column: factors for column, (factors, _) in mixer.merged.items()},
        new_groups=new_groups,
    )
    return with_place_for_constants(flow, mixer, edit)


def with_place_for_constants(flow: Flow, mixer: Mixer, edit: Edit, idle: bool = False) -> Edit:
    """The edit with what a layer without bias does with constants: the norm behind takes them, or they are a new bias.

    ``idle`` is for a layer that computes nothing any more: what stands in its place is known otherwise.
    """
    needed = edit.bias is None and (bool(edit.folded) or any(value != 0 for value in edit.rows.values()))
    mean = _mean_behind(flow, mixer) if needed and not idle else None
    return dataclasses.replace(edit, new_bias=needed and mean is None, mean=mean)


def _mean_behind(flow: Flow, mixer: Mixer) -> str | None:
    """The running mean of the norm that alone reads a layer's result; less the constant, it does what a bias would.

    In training such a norm takes off the mean of its batch, so a bias in front of it would do nothing but cost time.
    """
    users = list(mixer.node.users)
    if mixer.shared or not flow.seen_in_training or len(users) != 1 or op_name(users[0]) not in NORMS:
        return None
    norm, output = users[0], flow.state(mixer.node)
    sources = [arg(norm, i, "") for i in range(5)]
    name = flow.graph.tensors.get(sources[3])
    if sources[0] is not mixer.node or mixer.node in sources[1:] or name is None:
        return None
    alone = flow.uses[name] == 1 and name not in flow.graph.written.values()
    alone = alone and not isinstance(flow.tensors[name], nn.Parameter) and is_saved(flow, name)
    along = output.axis == 1 and flow.tensors[name].shape == (output.shape[1],)
    by_batch = op_name(norm) == "batch_norm" and bool(arg(norm, 5, "training"))
    return name if alone and along and not by_batch else None


def counted_norms(flow: Flow, decision: Decision) -> dict[str, Edit]:
    """For each norm across channels that loses some, what it has to count all the same, by its weight's name."""
    edits = {}
    for layer, norm in flow.across.items():
        kept = decision.kept[norm.labels]
        if kept.all():
            continue
        size = len(kept) // norm.groups
        gone = ~kept.reshape(norm.groups, size)
        constants = np.where(gone, np.nan_to_num(norm.values, nan=0.0).reshape(norm.groups, size), 0.0)
        means = constants.sum(1) / np.maximum(1, gone.sum(1))
        spreads = np.where(gone, np.square(constants - means[:, None]), 0.0).sum(1)
        members = np.flatnonzero(kept) // size
        counted = Counted(norm.axis, size, members.tolist(), means.tolist(), spreads.tolist())
        edits[norm.weight] = Edit(layer, norm.weight, None, 1, False, counted=counted)
    return edits


def left_by_group(flow: Flow, decision: Decision, weight: str) -> list[list[int]] | None:
    """For a grouped convolution, what stays of its second axis in each group, counted within the group."""
    labels = flow.axis_labels.get((weight, GROUPED))
    if labels is None or decision.kept[labels].all():
        return None
    groups = decision.kept[labels].reshape(-1, flow.tensors[weight].shape[1])
    return [np.flatnonzero(group).tolist() for group in groups]
