"""Random networks for the remover: a list of steps drawn one by one, each applied to values made before it."""

import torch
from flow_helpers import close_, mixing_layers, settle_
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

MAX_CHANNELS = 24


class RandomNet(nn.Module):
    """Runs ``steps`` = (function, layer names, input numbers, numbers) over a growing list of values."""

    def __init__(self):
        super().__init__()
        self.steps = []
        self.outputs = []

    def forward(self, x):
        values = [x]
        for function, layers, inputs, numbers in self.steps:
            values.append(function(*[getattr(self, name) for name in layers], *[values[i] for i in inputs], *numbers))
        return [values[i] for i in self.outputs]

    def operations(self):
        return [step[0].__name__ for step in self.steps]


class Builder:
    """Draws steps with ``rng`` (anything with random.Random's methods) and keeps the shape of every value."""

    def __init__(self, rng, size):
        self.rng = rng
        self.net = RandomNet()
        self.shapes = [(3, size, size)]

    def layer(self, module):
        name = f"{type(module).__name__.lower()}{len(list(self.net.children()))}"
        setattr(self.net, name, module)
        return name

    def step(self, function, shape, *inputs, layers=(), numbers=()):
        self.net.steps.append((function, [n if isinstance(n, str) else self.layer(n) for n in layers], inputs, numbers))
        self.shapes.append(tuple(shape))
        return len(self.shapes) - 1

    def pick(self, where):
        """A value for which ``where(shape)`` holds, late ones first; None if there is none."""
        fitting = [i for i, shape in enumerate(self.shapes) if where(shape)]
        return self.rng.choice(fitting[-3:]) if fitting else None

    def width(self):
        return self.rng.choice([2, 3, 4, 6, 8])

    # -- the steps -----------------------------------------------------------------------------------------------------
    def convolution(self, i, out=None, same=False):
        channels, height, width = self.shapes[i]
        kernel = self.rng.choice([1, 3, 3])
        padding = kernel // 2 if same or height < 4 else self.rng.choice([0, kernel // 2, 1])
        stride = 1 if same or height < 5 else self.rng.choice([1, 1, 2])
        groups = self.rng.choice([1, 1, 1, 2, 3])
        out = out or self.width()
        if channels % groups or out % groups:
            groups = 1
        conv = nn.Conv2d(channels, out, kernel, stride, padding, groups=groups, bias=self.rng.random() < 0.5)
        sizes = [(n + 2 * padding - kernel) // stride + 1 for n in (height, width)]
        return self.step(apply, (out, *sizes), i, layers=[conv])

    def depthwise(self, i):
        channels, *sizes = self.shapes[i]
        out = channels * (2 if channels < 6 and self.rng.random() < 0.3 else 1)
        conv = nn.Conv2d(channels, out, 3, padding=1, groups=channels, bias=self.rng.random() < 0.5)
        return self.step(apply, (out, *sizes), i, layers=[conv])

    def upsampling_convolution(self, i):
        channels, *sizes = self.shapes[i]
        if max(sizes) > 8:
            return self.convolution(i)
        out = self.width()
        conv = nn.ConvTranspose2d(channels, out, 2, 2, bias=self.rng.random() < 0.5)
        return self.step(apply, (out, *[2 * n for n in sizes]), i, layers=[conv])

    def norm(self, i):
        channels = self.shapes[i][0]
        kinds = [nn.BatchNorm2d(channels)] * 4 + [nn.GroupNorm(1, channels), nn.InstanceNorm2d(channels, affine=True)]
        norm = self.rng.choice(kinds) if len(self.shapes[i]) == 3 else nn.BatchNorm1d(channels)
        if isinstance(norm, nn.InstanceNorm2d) and self.shapes[i][1] * self.shapes[i][2] == 1:
            norm = nn.BatchNorm2d(channels)
        return self.step(apply, self.shapes[i], i, layers=[norm])

    def activation(self, i):
        function = self.rng.choice([F.relu, F.relu, F.relu6, F.gelu, F.silu, torch.sigmoid, F.leaky_relu, torch.tanh])
        return self.step(function, self.shapes[i], i)

    def activation_in_place(self, i):
        return self.step(relu_in_place, self.shapes[i], i)

    def pointwise(self, i):
        functions = [clamp, where_positive, one_minus, halve, absolute, shifted, F.dropout, F.dropout2d]
        function = self.rng.choice(functions)
        return self.step(function, self.shapes[i], i, numbers=[0.5, False] if "dropout" in function.__name__ else [])

    def gated(self, i):
        """A gated linear unit over channels, behind a layer that makes their number even."""
        i = self.convolution(i, out=2 * self.width(), same=True)
        return self.step(F.glu, (self.shapes[i][0] // 2, *self.shapes[i][1:]), i, numbers=[1])

    def inverted(self, i):
        """Wide inside, a padded depthwise layer between two activations, narrow again, as in MobileNetV2.

        A kernel of three has four parts: with many constants beside the border, some are sums of others.
        """
        i = self.norm(self.convolution(i, out=self.rng.choice([8, MAX_CHANNELS]), same=True))
        i = self.step(F.relu6, self.shapes[i], i)
        channels = self.shapes[i][0]
        kernel, padding = self.rng.choice([((3, 1), (1, 0)), ((1, 3), (0, 1)), (3, 1)])
        deep = nn.Conv2d(channels, channels, kernel, padding=padding, groups=channels, bias=self.rng.random() < 0.5)
        i = self.norm(self.step(apply, self.shapes[i], i, layers=[deep]))
        i = self.step(self.rng.choice([F.relu, F.relu6, F.leaky_relu]), self.shapes[i], i)
        out = self.width()
        return self.step(apply, (out, *self.shapes[i][1:]), i, layers=[nn.Conv2d(channels, out, 1)])

    def scale(self, i):
        """A learned factor or summand for each channel, some of them zero."""
        channels, *sizes = self.shapes[i]
        vector = torch.randn(channels, *[1] * len(sizes)).masked_fill_(torch.rand(channels, *[1] * len(sizes)) < 0.3, 0)
        name = f"vector{len(list(self.net.parameters()))}"
        self.net.register_parameter(name, nn.Parameter(vector))
        return self.step(self.rng.choice([multiply, add]), self.shapes[i], i, layers=[name])

    def pad(self, i):
        channels, *sizes = self.shapes[i]
        if max(sizes) > 8 or min(sizes) < 2:
            return self.pointwise(i)
        return self.step(self.rng.choice([zero_pad, reflect_pad]), (channels, *[n + 2 for n in sizes]), i)

    def repeat(self, i):
        channels, *sizes = self.shapes[i]
        return self.step(repeat_channels, (2 * channels, *sizes), i) if channels <= 8 else self.slice(i)

    def slice(self, i):
        channels, *sizes = self.shapes[i]
        if self.rng.random() < 0.5 or channels < 3:
            return self.step(every_second_row, (channels, (sizes[0] + 1) // 2, sizes[1]), i)
        return self.step(without_first_channel, (channels - 1, *sizes), i)

    def pool(self, i):
        channels, height, width = self.shapes[i]
        if height < 4:
            return self.activation(i)
        function = self.rng.choice([max_pool, avg_pool, avg_pool_without_border])
        return self.step(function, (channels, (height - 1) // 2 + 1, (width - 1) // 2 + 1), i)

    def resize(self, i):
        channels, height, width = self.shapes[i]
        if height > 8:
            return self.pool(i)
        return self.step(self.rng.choice([nearest, bilinear]), (channels, 2 * height, 2 * width), i)

    def residual(self, i):
        """Two layers and the way around them."""
        branch = self.activation(self.norm(self.convolution(i, same=True)))
        branch = self.convolution(branch, out=self.shapes[i][0], same=True)
        if self.rng.random() < 0.5:
            branch = self.norm(branch)
        return self.step(add, self.shapes[i], branch, i)

    def join(self, i):
        """Add, subtract or multiply with another value of the same shape, made if there is none."""
        other = self.pick(lambda shape: shape == self.shapes[i] and len(shape) == 3 and shape[0] > 3)
        if other is None or other == i:
            other = self.convolution(i, out=self.shapes[i][0], same=True)
        return self.step(self.rng.choice([add, subtract, multiply]), self.shapes[i], i, other)

    def concatenate(self, i):
        other = self.pick(lambda shape: shape[1:] == self.shapes[i][1:])
        channels = self.shapes[i][0] + self.shapes[other][0]
        if channels > MAX_CHANNELS:
            return self.convolution(i)
        return self.step(concatenate, (channels, *self.shapes[i][1:]), i, other)

    def squeeze_excite(self, i):
        channels = self.shapes[i][0]
        layers = [nn.Conv2d(channels, 3, 1), nn.Conv2d(3, channels, 1)]
        return self.step(squeeze_excite, self.shapes[i], i, layers=layers)

    def use_again(self, i):
        """A layer that another value went through already."""
        name = self.rng.choice([None, *[n for n, m in self.net.named_children() if keeps_shape(m)]])
        width = getattr(self.net, name).in_channels if name else None
        fitting = self.pick(lambda shape: len(shape) == 3 and shape[0] == width)
        if fitting is None:
            i = self.convolution(i, out=self.shapes[i][0], same=True)
            name, fitting = self.net.steps[-1][1][0], i
        return self.step(apply, self.shapes[fitting], fitting, layers=[name])

    def shuffle(self, i):
        groups = next((g for g in (2, 3) if self.shapes[i][0] % g == 0), 1)
        return self.step(channel_shuffle, self.shapes[i], i, numbers=[groups])

    def swap_halves(self, i):
        return self.step(swap_halves, self.shapes[i], i)

    def pixel_shuffle(self, i):
        channels, height, width = self.shapes[i]
        if channels % 4 or height > 8:
            return self.swap_halves(i)
        return self.step(F.pixel_shuffle, (channels // 4, 2 * height, 2 * width), i, numbers=[2])

    def channels_last_linear(self, i):
        channels, *sizes = self.shapes[i]
        out = self.width()
        return self.step(channels_last, (out, *sizes), i, layers=[nn.Linear(channels, out)])

    def mean_of_space(self, i):
        return self.step(mean_of_space, self.shapes[i][:1], i)

    def flatten(self, i):
        channels, height, width = self.shapes[i]
        if height * width > 36:
            return self.mean_of_space(i)
        features = channels * height * width
        if self.rng.random() < 0.3:
            return self.step(hard_coded_view, (features,), i, numbers=[features])
        return self.step(flatten, (features,), i)

    def linear(self, i):
        out = self.width()
        return self.step(apply, (out,), i, layers=[nn.Linear(self.shapes[i][0], out, bias=self.rng.random() < 0.7)])

    def head(self, i):
        if len(self.shapes[i]) == 3:
            i = self.flatten(i) if self.rng.random() < 0.5 else self.mean_of_space(i)
        i = self.activation(self.linear(i)) if self.rng.random() < 0.5 else i
        return self.step(apply, (3,), i, layers=[nn.Linear(self.shapes[i][0], 3)])


IMAGE_STEPS = (
    "convolution convolution convolution depthwise upsampling_convolution norm norm activation activation_in_place "
    "pool resize residual residual join concatenate squeeze_excite use_again use_again shuffle swap_halves "
    "pixel_shuffle channels_last_linear pointwise scale pad repeat slice"
).split()
ALL_STEPS = [*IMAGE_STEPS, "gated", "inverted"]


def random_network(rng, steps=(3, 9), kinds=IMAGE_STEPS):
    """A network with random wiring, random statistics and random closed filters, and inputs for it."""
    torch.manual_seed(rng.randrange(2**31))
    builder = Builder(rng, rng.choice([5, 6, 8]))
    last = builder.convolution(0)
    for _ in range(rng.randint(*steps)):
        i = builder.pick(lambda shape: len(shape) == 3) if rng.random() < 0.3 else last
        last = getattr(builder, rng.choice(kinds))(i)
    heads = [last, *[builder.pick(lambda shape: len(shape) == 3) for _ in range(rng.choice([0, 0, 1]))]]
    builder.net.outputs = [builder.head(i) for i in heads]
    if rng.random() < 0.15:
        builder.net.outputs.append(last)
    inputs = torch.randn(2, *builder.shapes[0], dtype=torch.float64)
    for layer in mixing_layers(builder.net).values():
        nn.init.kaiming_normal_(layer.weight)  # so that the signal lives through many layers
    close_some_(builder.net, rng)
    settle_(builder.net, torch.randn(8, *builder.shapes[0], dtype=torch.float64))
    close_norms_(builder.net, rng)
    return builder.net, inputs


@torch.no_grad()
def close_some_(net, rng):
    """Closed filters with and without bias, and closed inputs; never all of one layer."""
    for layer in mixing_layers(net).values():
        width = getattr(layer, "out_channels", None) or layer.out_features
        share = rng.choice([0.0, 0.3, 0.5, 0.8])
        closed = torch.rand(width) < share
        closed[torch.randint(width, ())] = False
        for channel in closed.nonzero().flatten().tolist():
            close_(layer, [channel], rng.choice([None, None, torch.randn(()).item()]))
        if rng.random() < 0.2:
            layer.weight.masked_fill_(torch.rand(1, layer.weight.shape[1], *[1] * (layer.weight.dim() - 2)) < 0.3, 0)


@torch.no_grad()
def close_norms_(net, rng):
    """Scales that are zero, so that the shift is all that is left."""
    for norm in net.modules():
        if isinstance(norm, (_BatchNorm, nn.GroupNorm)) and rng.random() < 0.2:
            norm.weight[torch.rand(len(norm.weight)) < 0.3] = 0


def keeps_shape(module):
    return (
        isinstance(module, nn.Conv2d)
        and module.in_channels == module.out_channels
        and module.stride == (1, 1)
        and (2 * module.padding[0] == module.kernel_size[0] - 1)
    )


def apply(layer, x):
    return layer(x)


def relu_in_place(x):
    """On a copy: the value itself may be used again."""
    return x.clone().relu_()


def clamp(x):
    return x.clamp(-0.4, 0.9)


def where_positive(x):
    return torch.where(x > 0.05, x, 0.3)


def one_minus(x):
    return 1 - x


def halve(x):
    return x / 2


def absolute(x):
    return x.abs()


def shifted(x):
    return x + 0.25


def zero_pad(x):
    return F.pad(x, (1, 1, 1, 1))


def reflect_pad(x):
    return F.pad(x, (1, 1, 1, 1), mode="reflect")


def repeat_channels(x):
    return x.repeat(1, 2, 1, 1)


def every_second_row(x):
    return x[:, :, ::2]


def without_first_channel(x):
    return x[:, 1:]


def max_pool(x):
    return F.max_pool2d(x, 3, 2, padding=1)


def avg_pool(x):
    return F.avg_pool2d(x, 3, 2, padding=1)


def avg_pool_without_border(x):
    return F.avg_pool2d(x, 3, 2, padding=1, count_include_pad=False)


def nearest(x):
    return F.interpolate(x, scale_factor=2)


def bilinear(x):
    return F.interpolate(x, scale_factor=2, mode="bilinear")


def add(x, y):
    return x + y


def subtract(x, y):
    return x - y


def multiply(x, y):
    return x * y


def concatenate(x, y):
    return torch.cat([x, y], 1)


def squeeze_excite(down, up, x):
    return x * torch.sigmoid(up(F.relu(down(x.mean((2, 3), keepdim=True)))))


def channel_shuffle(x, groups):
    batch, channels, *sizes = x.shape
    return x.view(batch, groups, channels // groups, *sizes).transpose(1, 2).reshape(batch, channels, *sizes)


def swap_halves(x):
    first, second = x.tensor_split(2, 1)
    return torch.cat([second, first], 1)


def channels_last(linear, x):
    return linear(x.movedim(1, -1)).movedim(-1, 1)


def mean_of_space(x):
    return x.mean((2, 3))


def flatten(x):
    return x.flatten(1)


def hard_coded_view(x, features):
    return x.view(-1, features) if x.is_contiguous() else x.reshape(-1, features)
