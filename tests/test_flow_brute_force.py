"""The kept channels against brute force: push every channel of every layer by hand and see whether the output moves."""

import pytest
import torch
from flow_helpers import Net, image, kept, mixing_layers, shrink
from torch import nn
from torch.nn import functional as F


def norm(channels):
    """A BatchNorm that maps zero to zero, so that a dead channel is zero and never another constant."""
    bn = nn.BatchNorm2d(channels)
    nn.init.uniform_(bn.weight, 0.5, 1.5)
    bn.running_var.uniform_(0.5, 1.5)
    return bn


def conv(inputs, outputs, kernel=3, **options):
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False, **options)


def chain():
    return nn.Sequential(conv(3, 6), norm(6), nn.ReLU(), conv(6, 5), nn.Tanh(), conv(5, 7, 1), conv(7, 3)), []


def depthwise():
    layers = conv(3, 8), norm(8), conv(8, 8, groups=8), nn.ReLU6(), conv(8, 8, groups=8), conv(8, 3)
    return nn.Sequential(*layers), [("0", "2", "4")]


def residual():
    def body(net, x):
        x = net.stem(x)
        x = x + net.b(F.relu(net.a(x)))
        x = x + net.d(F.relu(net.c(x)))
        return net.head(x)

    stream = {"stem": conv(3, 6), "b": conv(5, 6), "d": conv(4, 6)}
    return Net(body, **stream, a=conv(6, 5), c=conv(6, 4), head=conv(6, 3)), [tuple(stream)]


def dense():
    def body(net, x):
        x = net.stem(x)
        x = torch.cat([x, net.a(F.relu(x))], 1)
        return net.head(torch.cat([x, net.b(F.relu(net.bn(x)))], 1))

    return Net(body, stem=conv(3, 4), a=conv(4, 4), b=conv(8, 4), bn=norm(8), head=conv(12, 3)), []


def gated_product():
    def body(net, x):
        return net.head(net.a(x) * torch.sigmoid(net.up(F.relu(net.down(net.b(x).mean((2, 3), keepdim=True))))))

    parts = {"a": conv(3, 6), "b": conv(3, 6), "down": conv(6, 4, 1), "up": conv(4, 6, 1), "head": conv(6, 3)}
    return Net(body, **parts), [("a", "up")]


def two_heads():
    def body(net, x):
        x = F.relu(net.stem(x))
        return net.head1(net.a(x)), net.head2(net.b(x).flatten(1))

    head2 = nn.Linear(5 * 64, 3, bias=False)
    return Net(body, stem=conv(3, 8), a=conv(8, 5), b=conv(8, 5), head1=conv(5, 3), head2=head2), []


@torch.no_grad()
def matters(model, layer, x):
    """For each output channel of a layer, whether it varies with the input and whether pushing it moves an output."""
    seen = []
    handle = layer.register_forward_hook(lambda module, args, out: seen.append(out))
    before = outputs(model, x)
    handle.remove()
    axis = seen[0].dim() - 1 if isinstance(layer, nn.Linear) else 1
    channels = seen[0].movedim(axis, 0).flatten(1)
    result = []
    for channel, values in enumerate(channels):
        varies = (values != values[0]).any()
        moves = any(not torch.equal(pushed(model, layer, channel, axis, x, sign), before) for sign in (-3.0, 3.0))
        result.append(bool(varies) and moves)
    return result


def pushed(model, layer, channel, axis, x, size):
    def push(module, args, out):
        noise = torch.zeros_like(out)
        noise.select(axis, channel).normal_().abs_().mul_(size)
        return out + noise

    handle = layer.register_forward_hook(push)
    try:
        return outputs(model, x)
    finally:
        handle.remove()


def outputs(model, x):
    result = model(x)
    return torch.cat([part.flatten(1) for part in (result if isinstance(result, tuple) else [result])], 1)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("build", [chain, depthwise, residual, dense, gated_product, two_heads])
def test_a_channel_is_kept_if_and_only_if_it_matters(build, seed):
    torch.manual_seed(seed)
    model, streams = build()
    model.double().eval()
    last = {"chain": ["6"], "depthwise": ["5"]}.get(build.__name__, ["head", "head1", "head2"])
    with torch.no_grad():  # channel 0 lives everywhere, so that the signal reaches the output
        for name, layer in mixing_layers(model).items():
            rows, columns = (torch.rand(size) for size in layer.weight.shape[:2])
            rows[0] = columns[0] = 1
            layer.weight[rows < (0 if name in last else 0.4)] = 0
            layer.weight[:, columns < 0.2] = 0  # inputs that nobody reads
    x = image(batch=6)
    wanted = {name: matters(model, layer, x) for name, layer in mixing_layers(model).items()}
    for stream in streams:
        together = [any(flags) for flags in zip(*(wanted[name] for name in stream), strict=True)]
        wanted.update(dict.fromkeys(stream, together))
    plan, _ = shrink(model, x)
    for name, flags in wanted.items():
        channels = kept(plan, f"{name}.weight") or list(range(len(flags)))
        assert channels == [i for i, flag in enumerate(flags) if flag], name
