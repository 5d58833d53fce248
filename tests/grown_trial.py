"""Run with TRITON_INTERPRET=1: dense blocks that grow in place against PyTorch's own, on the CPU; prints JSON."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
import triton.language as tl
from torch import Tensor, nn
from torch.nn import functional as F
from triton.runtime.interpreter import InterpreterBuilder

from narrowgate import models
from narrowgate.train import fused, grown, wide

if not hasattr(InterpreterBuilder, "get_int1_ty"):  # Triton 3.2's interpreter has all types but this; its compiler has
    InterpreterBuilder.get_int1_ty = lambda self: tl.int1

CHANNELS_LAST = torch.channels_last
grew: list[int] = []


def apart(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max() / a.double().abs().max().clamp(min=1e-6))


def kernels() -> dict[str, list[float]]:
    """Largest differences of output, gradients and running statistics from float64, by shape and activation."""
    found = {}
    cases = [
        ((6, 10, 7, 9), (5, 6, 12), 1),
        ((3, 24, 16, 16), (12, 12, 3, 1), 2),
        ((1, 40, 9, 33), (14,), 0),
        ((2, 3, 5, 1), (2, 13), 1),
    ]
    for shape, outputs, activation in cases:
        found[f"{shape} {outputs} {activation}"] = one_block(shape, outputs, activation)
    return found


def one_block(shape: tuple[int, ...], outputs: tuple[int, ...], activation: int) -> list[float]:
    torch.manual_seed(0)
    widths = [shape[1] + sum(outputs[:i]) for i in range(len(outputs) + 1)]
    numbers = [torch.randn(width) for width in widths[:-1] for _ in range(2)]
    weights = [torch.randn(own, width, 3, 3) / 9 for own, width in zip(outputs, widths, strict=False)]
    x, dy = (
        (torch.randn(shape) + 20).contiguous(memory_format=CHANNELS_LAST),
        torch.randn(shape[0], widths[-1], *shape[2:]),
    )
    ours = [tensor.clone().requires_grad_() for tensor in (x, *numbers, *weights)]
    exact = [tensor.detach().double().requires_grad_() for tensor in ours]
    y, wanted, blocks, running = ours[0], exact[0], [], []
    for i, own in enumerate(outputs):
        gamma, beta, weight = 1 + 2 * i, 2 + 2 * i, 1 + 2 * len(outputs) + i
        layer = grown.Layer(grown.Norm(widths[i], widths[i], 0.1, 1e-5, activation), own)
        moved = torch.zeros(widths[i]), torch.ones(widths[i])
        right = tuple(tensor.double() for tensor in moved)
        block = blocks[-1] if blocks else None
        y = grown.Grown.apply(y, ours[gamma], ours[beta], ours[weight], moved, layer, block, blocks)
        z = F.batch_norm(wanted, *right, exact[gamma], exact[beta], True, 0.1, 1e-5)
        z = (lambda z: z, F.relu, F.relu6)[activation](z)
        wanted = torch.cat([wanted, F.conv2d(z, exact[weight], padding=1)], 1)
        running += list(zip(right, moved, strict=True))
    assert len({id(block) for block in blocks}) == 1
    gradients = zip(torch.autograd.grad(wanted, exact, dy.double()), torch.autograd.grad(y, ours, dy), strict=True)
    return [apart(a, b) for a, b in [(wanted.detach(), y.detach()), *gradients, *running]]


def dropout() -> dict[str, float]:
    """A layer with dropout: how much is dropped, and how far gradients are from those of the same masks."""
    torch.manual_seed(0)
    x = torch.randn(20, 6, 9, 9).contiguous(memory_format=CHANNELS_LAST).requires_grad_()
    gamma, beta = torch.randn(6).requires_grad_(), torch.randn(6).requires_grad_()
    weight = torch.randn(8, 6, 3, 3).requires_grad_()
    masks, worst, dy = [], 0.0, torch.randn(20, 14, 9, 9)
    for seed, salt in ((3, 1), (3, 2), (4, 1)):
        layer = grown.Layer(grown.Norm(6, 6, 0.1, 1e-5, 1), 8, 0.3, torch.tensor([seed], dtype=torch.int32), salt)
        y = grown.Grown.apply(x, gamma, beta, weight, None, layer, None, [])
        mask = (y.detach()[:, 6:] != 0).float()
        z = F.conv2d(F.relu(F.batch_norm(x, None, None, gamma, beta, True)), weight, padding=1)
        wanted = torch.cat([x, z * mask / 0.7], 1)
        leaves = [x, gamma, beta, weight]
        pairs = zip(torch.autograd.grad(wanted, leaves, dy), torch.autograd.grad(y, leaves, dy), strict=True)
        worst = max(worst, apart(wanted.detach(), y.detach()), *(apart(a, b) for a, b in pairs))
        masks.append(mask)
    shares = [1 - float(mask.mean()) for mask in masks]
    alike = max(float((a == b).float().mean()) for i, a in enumerate(masks) for b in masks[:i])
    return {"worst": worst, "least": min(shares), "most": max(shares), "alike": alike}


class Grows(nn.Module):
    """Norm, ReLU, convolution: a layer of a dense block."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.relu(self.norm(x)))


class Traps(nn.Module):
    """Dense layers whose maps are read in every other way as well."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 7, 11, 15, 19, 19, 23, 27)
        self.layers = nn.ModuleList(Grows(width, 4) for width in widths)
        self.layers[7].conv.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        a = torch.cat([x, self.layers[0](x)], 1)  # of the images themselves, which have no gradient
        y = self.layers[1](a)
        b = torch.cat([a, y], 1)
        early = y.mean((2, 3)) + b.mean((2, 3))[:, :4]  # its own maps read again, and the block on its way
        c = torch.cat([b, self.layers[2](b)], dim=-3)
        z = F.relu(self.layers[3].norm(c))
        d = torch.cat((c, self.layers[3].conv(z)), 1)
        late = z.sum((2, 3))  # what was convolved, read elsewhere
        e, f = (torch.cat([d, layer(d)], 1) for layer in self.layers[4:6])  # two blocks out of one
        g = torch.cat([self.layers[6](e), e], 1)  # the other way round: nothing grows
        h = torch.cat([g, self.layers[7](g)], 1)
        return early, late, e * 2, f.square(), F.avg_pool2d(g, 2), h, b


class InPlace(nn.Module):
    """A block whose maps are overwritten: what lies beside them must not change, so it can't grow in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Grows(3, 4), Grows(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x, self.first(x)], 1)
        y = torch.cat([x, self.second(x)], 1)
        y.mul_(2)
        return torch.cat([x, y], 1)


@contextmanager
def as_if_half():
    """float32 taken for the half precision of autocast: kernels are those for it, and a mistake shows."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(wide, "HALVES", HALVES))
        stack.enter_context(mock.patch.object(fused, "HALVES", HALVES))
        stack.enter_context(mock.patch.object(torch, "is_autocast_enabled", lambda *_: True))
        stack.enter_context(mock.patch.object(torch, "get_autocast_dtype", lambda *_: torch.float32))
        yield


HALVES = [*wide.HALVES, torch.float32]


def model(build: Callable[[], nn.Module], shape: tuple[int, ...], refused: bool = False) -> dict[str, object]:
    """Differences of a whole model's outputs, gradients and buffers in two steps, and how often a block grew."""
    torch.manual_seed(0)
    plain = build().to(memory_format=CHANNELS_LAST).train()
    other, notices = copy.deepcopy(plain), []
    forward = fused.Fused(notices.append).around(other)
    grew.clear()
    worst = {"outputs": 0.0}
    for _ in range(2):
        x = torch.randn(shape).contiguous(memory_format=CHANNELS_LAST)
        results = []
        for net in (plain, forward):
            with as_if_half() if net is forward else ExitStack():
                result = net(x)
            result = result if isinstance(result, tuple) else (result,)
            sum((piece * torch.linspace(-1, 1, piece.numel()).view_as(piece)).sum() for piece in result).backward()
            results.append(result)
        worst["outputs"] = max(worst["outputs"], *(apart(a, b) for a, b in zip(*results, strict=True)))
    assert bool(notices) == refused, notices
    pairs = [(a, b) for a, b in zip(plain.parameters(), other.parameters(), strict=True) if a.requires_grad]
    scale = max(float(a.grad.abs().max()) for a, _ in pairs)
    worst["gradients"] = max(float((a.grad - b.grad).abs().max()) / scale for a, b in pairs)
    worst["buffers"] = max(float((a - b).abs().max()) for a, b in zip(plain.buffers(), other.buffers(), strict=True))
    return {**worst, "grew": len(grew)}


def twice() -> str:
    """What going backward a second time says."""
    layer = Grows(3, 4)
    x = torch.randn(2, 3, 5, 5).contiguous(memory_format=CHANNELS_LAST)
    with as_if_half():
        y = fused.Fused(print).around(lambda x: torch.cat([x, layer(x)], 1))(x).sum()
    y.backward(retain_graph=True)
    try:
        y.backward()
    except RuntimeError as error:
        return str(error)
    return ""


def mistaken() -> bool:
    """Whether kernels that give other numbers are told from right ones."""
    with mock.patch.object(grown, "_complete", lambda block, channels: grown._rows(block.gradient, channels)):
        return not grown.works.__wrapped__(torch.device("cpu"), torch.float16)


def main() -> None:
    whole = grown._forward

    def counted(*args):
        grew.append(1)
        return whole(*args)

    works = [grown.works(torch.device("cpu"), kind) for kind in (torch.float16, torch.float32)]
    grown._forward = counted
    dense = models.DenseNet
    tiles = grown.Tile(64, 32), grown.Tile(32, 64, programs=20)
    found = {"works": works, "mistaken": mistaken(), "kernels": kernels(), "dropout": dropout(), "twice": twice()}
    with mock.patch.object(grown, "MULTIPLY", tiles[:1] * 3), mock.patch.object(grown, "GRADIENTS", tiles[1:] * 3):
        found["tiles"] = one_block((3, 24, 16, 16), (12, 12, 3, 1), 1)
    # The interpreter works through tiles one by one: those of whole models are larger here than on a GPU.
    grown.GATHER = grown.PREPARE = grown.Tile(128, 16)
    found |= {
        "dense": model(lambda: dense(10, 4, 5, 0.0), (4, 3, 8, 8)),
        "odd": model(lambda: dense(7, 3, 5, 0.0), (4, 3, 8, 8)),
        "long": model(lambda: dense(55, 5, 5, 0.0), (2, 3, 8, 8)),
        "traps": model(Traps, (3, 3, 6, 6)),
        "in place": model(InPlace, (3, 3, 6, 6), refused=True),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
