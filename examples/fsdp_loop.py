"""Train a small transformer with gates under FSDP2, and remove heads and neurons while it trains.

    torchrun --nproc_per_node 2 examples/fsdp_loop.py

The task is made here: which word is the most frequent. Lines that a loop without gates would not have are
marked with their number.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import narrowgate as ng

WORDS, TOKENS = 8, 16


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(*qkv.unbind(0)).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.mlp = nn.LayerNorm(width), Mlp(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, width: int = 32, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def batch_of(size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Sentences, and the word that is most frequent in each."""
    x = torch.randint(WORDS, (size, TOKENS), generator=generator)
    return x, F.one_hot(x, WORDS).sum(1).argmax(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--steps", type=int, default=30, help="steps an epoch")
    parser.add_argument("--strength", type=float, default=4.0, help="of the penalty")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.exit(2, "Start it with torchrun --nproc_per_node 2 examples/fsdp_loop.py\n")

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    rank = dist.get_rank()
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device("cpu")

    def shard(model: nn.Module) -> None:
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)

    torch.manual_seed(0)  # the same weights on every process
    model = Transformer().to(device)
    gates = ng.attach_gates_(model, groups=("heads", "neurons"))  # 1. before fully_shard
    shard(model)
    penalty = ng.Penalty(gates, "bounded-l1", strength=args.strength)  # 2.
    lr = 3e-3
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    data = torch.Generator().manual_seed(rank)
    example = batch_of(2, data)[0].to(device)
    for epoch in range(args.epochs):
        for _ in range(args.steps):
            x, y = (t.to(device) for t in batch_of(32, data))
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            penalty.proximal_(lr)  # 3.
        closed = gates.closed_fraction()  # on all processes, as all that reads gates
        plan = ng.shrink_sharded_(model, optimizer, example, shard=shard)  # 4. on all processes, too
        if rank == 0:
            cut = "" if plan is None else f"  {plan.parameters_before:,} -> {plan.parameters_after:,} parameters"
            print(f"epoch {epoch + 1}  loss {loss.item():.2f}  {closed:.0%} of the gates closed{cut}")

    with ng.gathered(model):  # 5. without shard=, the model stays whole
        last = ng.plan(model, example)
        small = ng.compact(model, last)
        ng.verify(model, small, example)
    if rank == 0:
        x, y = (t.to(device) for t in batch_of(2000, torch.Generator().manual_seed(100)))
        with torch.no_grad():
            accuracy = (small(x).argmax(1) == y).float().mean().item()
        full = sum(p.numel() for p in Transformer().parameters())
        left = sum(p.numel() for p in small.parameters())
        print(f"accuracy {accuracy:.1%}  {full:,} -> {left:,} parameters, same function as the gated network")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
