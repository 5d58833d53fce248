"""Tensors of which each process holds a part, as ``fully_shard`` leaves them: read whole, write one's own part.

Gates are small, so they are read whole on every process: then all that looks at them is the same with and without
sharding. Reading is a collective operation: all processes have to do it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: object) -> TypeGuard[DTensor]:
    """Whether this is a DTensor; the module that defines them is not loaded to ask."""
    if type(tensor) in (nn.Parameter, Tensor):
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def whole(tensor: Tensor) -> Tensor:
    """All of a vector, on every process; a tensor that is not sharded is returned as it is.

    Its gradient is averaged over the processes, as ``fully_shard`` averages those of all parameters.
    """
    return whole_each([tensor])[0] if is_sharded(tensor) else tensor


def whole_each(tensors: Sequence[Tensor]) -> list[Tensor]:
    """``whole`` of many vectors, with one collective operation for all that are sharded alike."""
    found = list(tensors)
    alike: dict[Any, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if is_sharded(tensor):
            alike.setdefault((tensor.device_mesh, tuple(tensor.placements), tensor.dtype), []).append(i)
    for (mesh, placements, _), places in alike.items():
        parts = [tensors[i].to_local() for i in places]  # type: ignore[attr-defined]
        vectors = _Gather.apply(mesh, _sharded_axis(placements), [tensors[i].numel() for i in places], *parts)
        for i, vector in zip(places, vectors, strict=True):
            found[i] = vector
    return found


@torch.no_grad()
def put_(tensor: Tensor, values: Tensor) -> None:
    """Write whole values into a tensor; of one that is sharded, each process writes its part."""
    if is_sharded(tensor):
        tensor.to_local().copy_(part_of(values, tensor).to_local())
    else:
        tensor.copy_(values)


def part_of(values: Tensor, like: DTensor) -> DTensor:
    """Whole values, equal on every process, sharded as another tensor is; nothing is sent."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    everywhere = DTensor.from_local(values.detach().to(like.device), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(placements=like.placements)


def is_gathered(module: nn.Module, tensor: Tensor) -> bool:
    """Whether ``fully_shard`` manages a module's tensor, and what is there now is a copy that it will throw away."""
    return "_is_fsdp_managed_module" in module.__dict__ and not is_sharded(tensor)


def check_whole(model: nn.Module, error: type[Exception] = ValueError, instead: str = "") -> None:
    """Raise if a model is sharded, for what needs the whole of it; ``instead`` ends the remedy."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_sharded(tensor):
            raise error(
                f"{name!r} is sharded by fully_shard: each process has a part of it. Call this inside `with "
                f"ng.gathered(model):`{instead}"
            )


def _sharded_axis(placements: Sequence[Any]) -> int:
    """The axis of the mesh over which a vector is sharded."""
    from torch.distributed.tensor import Shard

    split = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
    if len(split) != 1 or type(placements[split[0]]) is not Shard:
        raise ValueError(
            f"gates are sharded as {tuple(placements)}; only what fully_shard makes of an ordinary model can be read. "
            "Leave gated layers out of tensor parallelism"
        )
    return split[0]


class _Gather(torch.autograd.Function):
    """Vectors from their parts, of which all but the last are of one size, as torch.chunk makes them."""

    @staticmethod
    def forward(ctx: Any, mesh: DeviceMesh, axis: int, sizes: list[int], *parts: Tensor) -> tuple[Tensor, ...]:
        processes = mesh.size(axis)
        chunks = [-(-size // processes) for size in sizes]
        ctx.mesh, ctx.sizes, ctx.chunks, ctx.place = mesh, sizes, chunks, mesh.get_local_rank(axis)
        mine = torch.cat([F.pad(part, (0, chunk - len(part))) for part, chunk in zip(parts, chunks, strict=True)])
        theirs = [torch.empty_like(mine) for _ in range(processes)]
        torch.distributed.all_gather(theirs, mine, group=mesh.get_group(axis))
        pieces = torch.split(torch.stack(theirs), chunks, 1)
        return tuple(piece.reshape(-1)[:size].clone() for piece, size in zip(pieces, sizes, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        total = torch.cat(gradients)
        for axis in range(ctx.mesh.ndim):
            torch.distributed.all_reduce(total, group=ctx.mesh.get_group(axis))
        total /= ctx.mesh.size()
        starts = [ctx.place * chunk for chunk in ctx.chunks]
        parts = zip(torch.split(total, ctx.sizes), starts, ctx.chunks, strict=True)
        return None, None, None, *(part[start : start + chunk].clone() for part, start, chunk in parts)
