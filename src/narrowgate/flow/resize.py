"""After a cut: the layers' own numbers of channels follow their weights."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from narrowgate.flow.cuts import Edit
from narrowgate.flow.layers import IndexedLayer, IndexedNorm, index_, narrow_norm_
from narrowgate.flow.multihead import Widen, index_attention_
from narrowgate.swap import is_conv1d


def resize_(model: nn.Module, edits: dict[str, Edit], widths: dict[str, int]) -> None:
    """Make the layers' own numbers of channels agree with their weights, and index those of the scatter layout.

    ``widths`` are numbers that no weight tells, by module and attribute: ``"block.width"``.
    """
    for edit in edits.values():
        if edit.counted is not None:
            narrow_norm_(model.get_submodule(edit.layer), edit.counted)
        if edit.gather is not None or edit.scatter is not None:
            _index(model.get_submodule(edit.layer), edit)
            block = model.get_submodule(edit.layer.rpartition(".")[0])
            if isinstance(block, nn.TransformerEncoderLayer):  # its fast path reads its layers' weights past them
                block.activation_relu_or_gelu = 0
    groups = {edit.layer: edit.new_groups for edit in edits.values()}
    for name, width in widths.items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, width)
    for name, module in model.named_modules(remove_duplicate=False):
        if "weight" not in {*module._parameters, *module._buffers}:
            continue  # none, or a computed one, which stays whole; spectral_norm's takes a step whenever it is read
        if isinstance(module, _ConvNd):
            module.groups = groups.get(name, module.groups)
            first, second = module.weight.shape[:2]
            if module.transposed:  # where a group has one channel left, whole groups go
                module.groups = min(module.groups, first)
            inputs, outputs = (first, second * module.groups) if module.transposed else (second * module.groups, first)
            module.in_channels, module.out_channels = _seen(module, module.in_channels, inputs, outputs)
        elif isinstance(module, nn.Linear):
            outputs, inputs = module.weight.shape
            module.in_features, module.out_features = _seen(module, module.in_features, inputs, outputs)
        elif is_conv1d(module):
            module.nx, module.nf = module.weight.shape
        elif isinstance(module, _NormBase) and not isinstance(module, IndexedNorm):
            vector = module.weight if module.weight is not None else module.running_mean
            module.num_features = module.num_features if vector is None else len(vector)
        elif isinstance(module, nn.GroupNorm) and module.affine:
            module.num_channels = len(module.weight)
        elif isinstance(module, nn.LayerNorm) and module.elementwise_affine and module.weight.dim() == 1:
            module.normalized_shape = (len(module.weight),)
        elif isinstance(module, nn.Embedding):
            module.embedding_dim = module.weight.shape[1]
        elif isinstance(module, nn.PReLU):
            module.num_parameters = len(module.weight)
    for edit in edits.values():  # what a forward reads off a layer is what the rest of the model sees
        if edit.gather is not None or edit.scatter is not None:
            layer = model.get_submodule(edit.layer)
            if isinstance(layer, nn.MultiheadAttention):
                continue
            if isinstance(layer, IndexedNorm):
                layer.num_features = edit.reads or 0
                continue
            suffix = "features" if isinstance(layer, nn.Linear) else "channels"
            setattr(layer, f"in_{suffix}", edit.reads)
            setattr(layer, f"out_{suffix}", getattr(layer, f"out_{suffix}") if edit.fill is None else len(edit.fill))


def _seen(layer: nn.Module, reads: int, inputs: int, outputs: int) -> tuple[int, int]:
    """How many channels the rest of the model sees a layer read and give out: of an indexed one, not its weight's."""
    if not isinstance(layer, IndexedLayer):
        return inputs, outputs
    return inputs if layer.gather is None else reads, outputs if layer.fill is None else len(layer.fill)


def _index(layer: nn.Module, edit: Edit) -> None:
    if isinstance(layer, nn.MultiheadAttention):
        inside = edit.weight.endswith("in_proj_weight")
        index_attention_(layer, inside, Widen(edit.gather, edit.scatter, edit.fill, edit.reads or 0))
    else:
        index_(layer, edit.gather, edit.scatter, edit.fill)
