"""Run with TRITON_INTERPRET=1: fused norms against PyTorch's own, on the CPU; prints the differences as JSON."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable

import torch
import triton.language as tl
from torch import Tensor, nn
from torch.nn import functional as F
from triton.runtime.interpreter import InterpreterBuilder

from narrowgate import models
from narrowgate.models.mobilenet import InvertedResidual as bottleneck
from narrowgate.train import depthwise, fused, norm_activation, norm_launch, wide

if not hasattr(InterpreterBuilder, "get_int1_ty"):  # Triton 3.2's interpreter has all types but this; its compiler has
    InterpreterBuilder.get_int1_ty = lambda self: tl.int1

CHANNELS_LAST = torch.channels_last
calls: list[int] = []
added: list[bool] = []
convolved: list[torch.Size] = []


def kernels() -> dict[str, list[float]]:
    """Largest differences of output, gradients and running statistics from float64, by shape and activation."""
    found = {}
    for shape in ((4, 24, 8, 8), (2, 96, 16, 16), (3, 144, 5, 5), (40, 8, 16, 16), (2, 320, 4, 4)):
        for activation, act in ((0, lambda z: z), (1, F.relu), (2, F.relu6)):
            torch.manual_seed(0)
            x, dy = torch.randn(shape) * 2 + 50, torch.randn(shape)
            weight, bias = torch.randn(shape[1]), torch.randn(shape[1])
            exact = [t.double().requires_grad_() for t in (x, weight, bias)]
            running = torch.zeros(shape[1]).double(), torch.ones(shape[1]).double()
            y = act(F.batch_norm(exact[0], *running, *exact[1:], True, 0.1, 1e-5))
            wanted = [y, *torch.autograd.grad(y, exact, dy.double()), *running]
            ours = [t.clone().requires_grad_() for t in (x.contiguous(memory_format=CHANNELS_LAST), weight, bias)]
            moved = torch.zeros(shape[1]), torch.ones(shape[1])
            norm = norm_launch.Norm(shape[1], shape[1], 0.1, 1e-5, activation)
            y = norm_activation.NormActivation.apply(*ours, moved, norm)[0]
            seen = [y, *torch.autograd.grad(y, ours, dy), *moved]
            found[f"{list(shape)} {activation}"] = [
                float(((a - b).abs().max() / a.abs().max()).detach()) for a, b in zip(wanted, seen, strict=True)
            ]
    return found


def depthwise_kernels() -> dict[str, list[float]]:
    """Largest differences of output and gradients from float64, by shape, stride and padding."""
    found = {}
    for shape in ((4, 24, 8, 8), (2, 96, 16, 16), (3, 144, 5, 7), (40, 8, 16, 16), (3, 13, 9, 6)):
        for stride, padding in ((1, 1), (1, 0), (2, 1), (2, 0), (2, 2)):
            torch.manual_seed(0)
            x, weight = torch.randn(shape).contiguous(memory_format=CHANNELS_LAST), torch.randn(shape[1], 1, 3, 3)
            exact = [t.double().requires_grad_() for t in (x, weight)]
            y = F.conv2d(*exact, stride=stride, padding=padding, groups=shape[1])
            dy = torch.randn(y.shape)  # not channels_last, as a gradient may be
            wanted = [y, *torch.autograd.grad(y, exact, dy.double())]
            ours = [t.requires_grad_() for t in (x, weight)]
            assert depthwise.fits(*ours, (stride, stride), padding, (1, 1), shape[1]) == (stride, padding)
            y = depthwise.Depthwise.apply(*ours, stride, padding)
            seen = [y, *torch.autograd.grad(y, ours, dy)]
            found[f"{list(shape)} {stride} {padding}"] = [_apart(a, b) for a, b in zip(wanted, seen, strict=True)]
    return found


def mistaken() -> bool:
    """Whether kernels that give other numbers are told from right ones."""
    right, depthwise.convolved = depthwise.convolved, lambda *args: right(*args) * 1.1
    try:
        return not depthwise.works.__wrapped__(torch.device("cpu"), torch.bfloat16)
    finally:
        depthwise.convolved = right


def looks() -> dict[str, float]:
    """A model in eval mode under autocast: how far from PyTorch's numbers, and how many convolutions were ours."""
    torch.manual_seed(0)
    net = nn.Sequential(bottleneck(3, 5, 3, 1), bottleneck(5, 5, 3, 2)).to(memory_format=CHANNELS_LAST).eval()
    x, count = torch.randn(4, 3, 8, 8).contiguous(memory_format=CHANNELS_LAST), len(convolved)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        wanted = net(x)
        with fused.Looks():
            found = net(x)
    return {"apart": _apart(wanted, found), "ours": len(convolved) - count}


class Uses(nn.Module):
    """Norms whose results are used in every way: activated, plain, both, in place, concatenated, returned."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(6))
        self.norms[4].momentum = None
        self.relu6 = nn.ReLU6(inplace=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.conv(x)
        first = F.relu(self.norms[0](x))
        both = self.norms[1](first)
        second = torch.relu(both) + both
        third = self.norms[2](second)
        self.relu6(third)  # what follows sees the activated one
        fourth = torch.cat([third, self.norms[3](third).sigmoid()], 1)[:, 4:12].contiguous(memory_format=CHANNELS_LAST)
        fifth = self.norms[4](fourth)
        return fifth * fifth.shape[1], self.norms[5](fifth)


class Odd(nn.Module):
    """Odd widths in every way: chains, sums in and out of place, each channel for itself, groups, joined, pooled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(3, 9, 3, padding=1, bias=False), nn.BatchNorm2d(9)
        self.second, self.norm2 = nn.Conv2d(9, 9, 3, padding=1), nn.BatchNorm2d(9)
        self.each, self.norm3 = nn.Conv2d(9, 9, 3, padding=1, groups=9, bias=False), nn.BatchNorm2d(9)
        self.groups, self.norm4 = nn.Conv2d(18, 6, 1, groups=3), nn.BatchNorm2d(6)
        self.last, self.fc = nn.Conv2d(6, 5, 1), nn.Linear(5, 4)
        self.pool = nn.AvgPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.second(F.relu(self.norm1(x)))
        x = self.norm2(y) + x  # both wide, and read twice
        z = self.norm3(self.each(x))
        z += x  # in place, on what has not been computed
        x = torch.cat([z, F.dropout(self.each(z), 1e-9)], 1)
        x = F.relu(self.norm4(self.groups(self.pool(x))))
        return self.fc(self.last(x).relu_().mean((2, 3)))


def dropout() -> dict[str, float]:
    """Norms with dropout behind them: how much is dropped, how alike two are, and the gradients' differences."""
    torch.manual_seed(0)
    norms = [nn.BatchNorm2d(12) for _ in range(2)]
    x = (torch.randn(64, 12, 9, 9) + 3).contiguous(memory_format=CHANNELS_LAST)
    forward = fused.Fused(_refuse).around(lambda x: [F.dropout(norm(x), 0.3) for norm in norms])
    masks, worst = [], 0.0
    for _ in range(2):
        mine = x.clone().requires_grad_()
        kept = [y / F.batch_norm(x, None, None, None, None, True) for y in forward(mine)]
        masks += [(mask.detach() * 0.7).round() for mask in kept]
        weights = [torch.randn_like(x) for _ in norms]
        results = forward(mine)
        masks += [(y.detach() != 0).float() for y in results]
        pairs = zip(results, weights, strict=True)
        found = torch.autograd.grad(sum((y * w).sum() for y, w in pairs), [mine, norms[0].weight])
        other = x.clone().requires_grad_()
        plain = [F.batch_norm(other, None, None, norm.weight, norm.bias, True) for norm in norms]
        plain = [y * mask / 0.7 for y, mask in zip(plain, masks[-2:], strict=True)]
        pairs = zip(plain, weights, strict=True)
        wanted = torch.autograd.grad(sum((y * w).sum() for y, w in pairs), [other, norms[0].weight])
        worst = max(worst, *(_apart(a, b) for a, b in zip(wanted, found, strict=True)))
    alike = max(float((a == b).float().mean()) for i, a in enumerate(masks) for b in masks[:i])
    shares = [float((mask == 0).float().mean()) for mask in masks]
    return {"gradients": worst, "alike": alike, "least": min(shares), "most": max(shares)}


def model(build: Callable[[], nn.Module], shape: tuple[int, ...], half: bool = False) -> dict[str, object]:
    """Differences of a whole model's outputs, gradients and buffers, and which activations were fused."""
    torch.manual_seed(0)
    plain = build().to(memory_format=CHANNELS_LAST).train()
    other = copy.deepcopy(plain)
    forward = fused.Fused(_refuse).around(other)
    calls.clear()
    added.clear()
    convolved.clear()
    worst = {"outputs": 0.0, "gradients": 0.0, "buffers": 0.0}
    for _ in range(2):
        x = torch.randn(shape).contiguous(memory_format=CHANNELS_LAST)
        results = []
        for net in (plain, forward):
            with torch.autocast("cpu", torch.bfloat16, half, cache_enabled=False):
                result = net(x)
            result = result if isinstance(result, tuple) else (result,)
            sum((piece * torch.linspace(-1, 1, piece.numel()).view_as(piece)).sum() for piece in result).backward()
            results.append(result)
        worst["outputs"] = max(worst["outputs"], *(_apart(a, b) for a, b in zip(*results, strict=True)))
    pairs = list(zip(plain.parameters(), other.parameters(), strict=True))
    scale = max(float(a.grad.abs().max()) for a, _ in pairs)
    worst["gradients"] = max(float((a.grad - b.grad).abs().max()) / scale for a, b in pairs)
    worst["buffers"] = max(float((a - b).abs().max()) for a, b in zip(plain.buffers(), other.buffers(), strict=True))
    return {
        **worst,
        "fused": [calls.count(kind) for kind in range(3)],
        "added": sum(added),
        "convolved": len(convolved),
    }


def _apart(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max() / a.double().abs().max().clamp(min=1e-6))


def _refuse(notice: str) -> None:
    raise AssertionError(notice)


def escapes() -> dict[str, object]:
    """What happens to a norm whose result a custom autograd function takes: the gradient must not get lost."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, dy):
            return dy * 2

    norm, notices = nn.BatchNorm2d(3), []
    x = torch.randn(2, 3, 4, 4).contiguous(memory_format=CHANNELS_LAST)
    forward = fused.Fused(notices.append).around(lambda x: Twice.apply(norm(x)))
    for _ in range(2):
        forward(x).square().sum().backward()
    return {"notices": notices, "gradient": float(norm.weight.grad.abs().min())}


def overwritten() -> dict[str, object]:
    """A batch that changes between a norm and the use of its result, where no gradient forbids it."""
    norm, notices = nn.BatchNorm2d(3), []
    x = torch.randn(2, 3, 4, 4).contiguous(memory_format=CHANNELS_LAST)
    wanted = F.relu(F.batch_norm(x, None, None, training=True))

    def model(x: Tensor) -> Tensor:
        y = norm(x)
        x.mul_(3).add_(x.square())
        return F.relu(y)

    with torch.no_grad():
        found = fused.Fused(notices.append).around(lambda x: model(x.clone(memory_format=torch.preserve_format)))(x)
    return {"notices": notices, "difference": float((found - wanted).abs().max())}


def traps() -> dict[str, float]:
    """What a model may do to lead shortcuts astray: a norm without gradients first, a weight changed on the way."""
    norm, conv = nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1, bias=False)
    with torch.no_grad():
        conv.weight.copy_(torch.eye(3)[:, :, None, None])

    def model(x: Tensor) -> Tensor:
        with torch.no_grad():
            shift = F.relu(norm(x)) * 1.0
        y = shift + x
        with torch.no_grad():
            conv.weight.mul_(2)
        return conv(y)

    x = torch.randn(2, 3, 4, 4).contiguous(memory_format=CHANNELS_LAST).requires_grad_()
    forward = fused.Fused(_refuse).around(model)
    for _ in range(2):
        x.grad = None
        forward(x).sum().backward()
    return {"gradient": float(x.grad.min()), "weight": float(conv.weight.max())}


def main() -> None:
    whole = norm_launch.forward

    def counted(*args):
        calls.append(args[-1].activation)
        return whole(*args)

    back = norm_launch.backward

    def counted_back(*args):
        added.append(args[2] is not None)
        return back(*args)

    depthwise_forward = depthwise.convolved

    def counted_convolved(*args):
        convolved.append(args[0].shape)
        return depthwise_forward(*args)

    norm_launch.forward, norm_launch.backward = counted, counted_back
    depthwise.convolved = counted_convolved
    block = nn.Sequential
    images = (4, 3, 8, 8)
    print(
        json.dumps(
            {
                "dropout": dropout(),
                "residual": model(lambda: models.PreActResNet(20, 5, 0.0), images),
                "dense": model(lambda: models.DenseNet(7, 4, 5, 0.0), images),
                "trial": norm_activation.why_not(torch.device("cpu")),
                "works": [depthwise.works(torch.device("cpu"), kind) for kind in (torch.bfloat16, torch.float32)],
                "noticed": mistaken(),
                "kernels": kernels(),
                "depthwise": depthwise_kernels(),
                "looks": looks(),
                "uses": model(Uses, (3, 3, 6, 6)),
                "sequence": model(lambda: block(nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.ReLU(True)), (4, 3, 9, 9)),
                "escapes": escapes(),
                "overwritten": overwritten(),
                "half": model(Odd, images, half=True),
                **evenly_wide(),
            }
        )
    )


def evenly_wide() -> dict[str, object]:
    """The same with even widths, which are for half precision: in float32 here, where a mistake shows."""
    wide.HALVES.append(torch.float32)
    images = (4, 3, 8, 8)
    return {
        "traps": traps(),
        "odd": model(Odd, images),
        "odd dense": model(lambda: models.DenseNet(7, 3, 5, 0.0), images),
        "odd inverted": model(lambda: nn.Sequential(bottleneck(3, 5, 3, 1), bottleneck(5, 5, 3, 1)), images),
    }


if __name__ == "__main__":
    main()
