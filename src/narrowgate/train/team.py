"""The processes of a run: what they add up, agree on and share. Alone, everything is as it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from narrowgate.flow import Plan
from narrowgate.train.feed import Place

if TYPE_CHECKING:
    from lightning.fabric import Fabric


@dataclass(frozen=True)
class Team:
    """This process among all of them."""

    fabric: Fabric
    place: Place

    def all_sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.place.world > 1:
            tensor = self.fabric.all_reduce(tensor, reduce_op="sum")  # type: ignore[assignment]
        return tensor

    def wrapped(self, model: nn.Module) -> Any:
        """The model with its gradients averaged over all processes; wrap it anew after a cut."""
        return self.fabric.setup_module(model)

    def agree(self, mine: Plan) -> Plan:
        """The first process's plan, on all."""
        return mine if self.place.world == 1 else Plan.from_json(self.fabric.broadcast(mine.to_json()))

    def share_buffers_(self, model: nn.Module) -> None:
        """Give every process the running statistics of the first."""
        if self.place.world > 1:
            for buffer in model.buffers():
                torch.distributed.broadcast(buffer, 0)

    def check_same(self, mine: str, what: str) -> None:
        """Stop where a process has come to another result than the first."""
        if self.place.world > 1 and self.fabric.broadcast(mine) != mine:
            raise RuntimeError(f"process {self.place.rank} {what} than process 0")
