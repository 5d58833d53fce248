"""The processes of a run; here there is one, with PyTorch's own wrapper around its network."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from narrowgate.train.feed import Place
from narrowgate.train.team import Team
from narrowgate.train.watch import TrainingError


@pytest.fixture
def team(tmp_path):
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("no gloo in this build of torch")
    dist.init_process_group("gloo", f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield Team(SimpleNamespace(setup_module=DistributedDataParallel), Place(torch.device("cpu")))
    dist.destroy_process_group()


def test_what_the_first_process_can_not_write_ends_all_of_them():
    sent = []

    def team_at(rank, broadcast):
        return Team(SimpleNamespace(broadcast=broadcast), Place(torch.device("cpu"), rank, 2))

    with team_at(0, sent.append).first_alone():
        pass
    with pytest.raises(OSError, match="disk full"), team_at(0, sent.append).first_alone():
        raise OSError("disk full")
    assert sent == [None, "disk full"]
    with team_at(1, lambda mine: None).first_alone():
        pass
    second = team_at(1, lambda mine: "disk full")
    with pytest.raises(TrainingError, match="first process can't go on: disk full"), second.first_alone():
        pass


class Constant(nn.Module):
    """What the scatter layout makes of a layer without a channel of its own."""

    def forward(self, x):
        return x.new_zeros(len(x), 4)


class DeadBranch(nn.Module):
    """Its branch computes something, of which nothing arrives; frozen parameters and a norm come along."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.branch = nn.Sequential(nn.Linear(4, 2), Constant())
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        x = self.norm(x)
        return self.last(x + self.branch(x) + self.frozen(x))


def test_parameters_of_a_dead_branch_are_not_waited_for(team):
    torch.manual_seed(0)
    model = DeadBranch()
    random, buffers = torch.get_rng_state(), [buffer.clone() for buffer in model.buffers()]
    wrapped = team.wrapped(model, torch.randn(1, 4, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(torch.get_rng_state(), random)
    assert all(map(torch.equal, model.buffers(), buffers))
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["frozen.weight", "frozen.bias"]
    for _ in range(3):  # the second step would find the first one's gradients not all in
        wrapped(torch.randn(8, 4)).square().mean().backward()
    learned = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert learned == {"norm.weight", "norm.bias", "last.weight", "last.bias"}
