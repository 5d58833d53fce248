import copy

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers import assert_same, images, spread_gates_
from torch import nn

import narrowgate as ng


def train_replica(rank, world, folder, model, batches):
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=world)
    torch.set_num_threads(1)
    model = copy.deepcopy(model)  # it came in memory shared by the processes
    train_on(nn.parallel.DistributedDataParallel(model), [batch.chunk(world)[rank] for batch in batches])
    torch.save(model.state_dict(), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def train_on(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


@pytest.mark.slow
@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="no gloo in this build of torch")
def test_two_ddp_processes_end_where_one_with_twice_the_batch_does(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.Flatten(), nn.Linear(80, 3)).double()
    spread_gates_(ng.attach_gates_(model))
    before = copy.deepcopy(model.state_dict())
    batches = [images(4, torch.float64) for _ in range(3)]
    single = copy.deepcopy(model)
    mp.spawn(train_replica, (2, str(tmp_path), model, batches), nprocs=2)
    train_on(single, batches)
    for rank in range(2):
        trained = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert_same(trained, single.state_dict(), rtol=1e-12, atol=1e-14)
    assert not torch.equal(before["0.gate.g"], single[0].gate.g)
