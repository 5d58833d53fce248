"""The processes of a run: what they add up, agree on and share. Alone, everything is as it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from narrowgate.flow import Plan
from narrowgate.flow.trace import buffers_kept
from narrowgate.train.feed import Place
from narrowgate.train.shrink import random_numbers_kept
from narrowgate.train.watch import TrainingError

if TYPE_CHECKING:
    from lightning.fabric import Fabric


@dataclass(frozen=True)
class Team:
    """This process among all of them."""

    fabric: Fabric
    place: Place

    @contextmanager
    def first_alone(self) -> Iterator[None]:
        """What only the first process does, such as writing: if it can't, all end, and none waits in vain."""
        problem: Exception | None = None
        try:
            yield
        except Exception as error:
            problem = error
        told = None
        if self.place.world > 1:
            told = self.fabric.broadcast(None if problem is None else str(problem))
        if problem is not None:
            raise problem
        if told is not None:
            raise TrainingError(f"the first process can't go on: {told}")

    def all_sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.place.world > 1:
            tensor = self.fabric.all_reduce(tensor, reduce_op="sum")  # type: ignore[assignment]
        return tensor

    def wrapped(self, model: nn.Module, example: Tensor) -> Any:
        """The model with its gradients averaged over all processes; wrap it anew after a cut.

        Parameters that get no gradient, such as those of a branch whose last layer hands out constants, are left as
        they are: the wrapper would wait for them.
        """
        unread = _without_gradient(model, example)
        for parameter in unread:
            parameter.requires_grad_(False)
        try:
            return self.fabric.setup_module(model)
        finally:
            for parameter in unread:
                parameter.requires_grad_(True)

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


def _without_gradient(model: nn.Module, example: Tensor) -> list[Tensor]:
    """The parameters that train and that the output does not depend on, in the model's present mode."""
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with random_numbers_kept(model), buffers_kept(model.modules()):
        output = model(torch.cat([example, example]))  # one image may have no statistics
        found = torch.autograd.grad(output.sum(), learning, allow_unused=True)
    return [parameter for parameter, gradient in zip(learning, found, strict=True) if gradient is None]
