"""What two processes do under fully_shard, and what one does alone; test_sharded.py compares the two."""

import copy
import faulthandler
import traceback

import torch
import torch.distributed as dist
from helpers import spread_gates_
from torch import nn
from torch.nn import functional as F

import narrowgate as ng

STEPS, CUT_AFTER = 8, 4
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x):
        batch, tokens, _ = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(*qkv.unbind(0)).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.mlp = Attention(width, 4), Mlp(width, 13)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """The output layer is tied to the embedding, as in language models."""

    inputs = (4, 6)

    def __init__(self, width=8, words=11):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).mean(1)


class ConvBlock(nn.Module):
    def __init__(self, into, out):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(into, out, 3, padding=1, bias=False), nn.BatchNorm2d(out)

    def forward(self, x):
        return torch.relu(self.bn(self.conv(x)))


class ConvNet(nn.Module):
    inputs = (4, 3, 6, 6)

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([ConvBlock(3, 7), ConvBlock(7, 9)])
        self.head = nn.Linear(9, 5)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 5), nn.Linear(5, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class ResidualNet(nn.Module):
    """Three branches; one gate has a number for each, so its numbers serve three blocks."""

    inputs = (4, 6)

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Residual(6) for _ in range(3))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def groups(self):
        rows = range(6)
        return {f"branch {i}": [(f"blocks.{i}.down.{key}", 0, rows) for key in ("weight", "bias")] for i in range(3)}


NETWORKS = {"transformer": Transformer, "conv": ConvNet, "residual": ResidualNet}


def start(network, **options):
    """A gated model with some gates closed, its gates, and batches: the same numbers in every process."""
    torch.manual_seed(1)
    model = NETWORKS[network]().double()
    if network == "transformer":
        options = {"groups": ("heads", "neurons")} | options
    elif network == "conv":
        options = {"placement": "after-norm"} | options
    elif network == "residual":
        options = {"groups": model.groups()} | options
    gates = ng.attach_gates_(model, **options)
    spread_gates_(gates, 0.3)
    with torch.no_grad():
        for g in gates.parameters():  # at least one open, one closed, and one that a proximal step will close
            g[:3] = torch.tensor([1.0, 0.0, 0.02])
            g[g.abs() < 1e-3] = 0.0  # where a penalty in the loss leaves them
    shape = model.inputs
    words = network == "transformer"
    batches = [torch.randint(11, shape) if words else torch.randn(shape).double() for _ in range(STEPS)]
    return model, gates, batches


def penalty_for(gates, how):
    kind, strength = ("l1", 3e-2) if how == "loss" else ("bounded-l1", 0.05)
    return ng.Penalty(gates, kind, strength, weights={gates.names[0]: 1.5})


def train(model, optimizer, penalty, how, batches):
    for batch in batches:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        if how == "loss":
            loss = loss + penalty()
        loss.backward()
        optimizer.step()
        if how == "proximal":
            penalty.proximal_(0.1)


def shard_with(fully_shard, mesh, wrapping, **options):
    def shard(model):
        for block in () if wrapping == "root" else model.blocks:
            fully_shard(block, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)

    return shard


def state_of(model, optimizer):
    """The optimizer's state by the names of parameters."""
    names = {p: name for name, p in model.named_parameters()}
    return {names[p]: dict(state) for p, state in optimizer.state.items()}


def alone(network, optimizer, how, options):
    """One process with the whole batch: what two have to end with."""
    model, gates, batches = start(network, **options)
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    penalty = penalty_for(gates, how)
    train(model, optimizer, penalty, how, batches[:CUT_AFTER])
    plan = ng.plan(model, batches[0][:2], training=True)
    ng.compact_(model, plan, optimizer=optimizer)
    train(model, optimizer, penalty, how, batches[CUT_AFTER:])
    return {
        "weights": model.state_dict(),
        "state": state_of(model, optimizer),
        "values": gates.values(),
        "penalty": penalty().detach(),
        "plan": plan.to_json(),
    }


def together(team, network, optimizer, how, options, wrapping, same_batch):
    """The same with half of the batch for each of two processes (or all of it for both), sharded."""
    model, gates, batches = start(network, **options)
    shard = team.shard(wrapping)
    shard(model)
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    penalty = penalty_for(gates, how)
    mine = batches if same_batch else [batch.chunk(2)[team.rank] for batch in batches]
    train(model, optimizer, penalty, how, mine[:CUT_AFTER])
    objects = [model, *gates.modules()]
    plan = ng.shrink_sharded_(model, optimizer, batches[0][:2], shard=shard)
    assert all(a is b for a, b in zip(objects, [model, *gates.modules()], strict=True))
    assert all(type(p).__name__ == "DTensor" for p in model.parameters())
    train(model, optimizer, penalty, how, mine[CUT_AFTER:])
    values, amount = gates.values(), penalty().detach()
    with ng.gathered(model, optimizer, shard=shard):
        found = {
            "weights": copy.deepcopy(model.state_dict()),
            "state": copy.deepcopy(state_of(model, optimizer)),
            "values": values,
            "penalty": amount,
            "plan": plan.to_json(),
        }
        last = ng.plan(model, batches[0][:2])
        small = ng.compact(model, last)
        ng.verify(model, small, batches[0][:2])
        found["small"] = last.parameters_after
    return found


class Team:
    def __init__(self, rank):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.rank, self.fully_shard = rank, fully_shard
        self.mesh = init_device_mesh("cpu", (2,))
        self.replicas = init_device_mesh(
            "cpu", (2, 1), mesh_dim_names=("copy", "part")
        )  # hybrid: two copies, each sharded over one process

    def shard(self, wrapping="blocks", **options):
        mesh = self.replicas if wrapping == "replicas" else self.mesh
        return shard_with(self.fully_shard, mesh, wrapping, **options)


def work(rank, folder, cases):
    """Do all cases, one after the other, and write down what came of each."""
    faulthandler.enable()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=2)
    team = Team(rank)
    for name, (function, *arguments) in cases.items():
        try:
            found = function(team, *arguments)
        except Exception:
            found = {"failed": traceback.format_exc()}
        torch.save(found, f"{folder}/{name}.{rank}.pt")
    dist.destroy_process_group()
