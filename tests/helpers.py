"""What several test files share."""

import copy
import os
import shutil
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import narrowgate as ng
from narrowgate.batched import forget_prepared_gates_

needs_cpp_compiler = pytest.mark.skipif(
    "CXX" not in os.environ and not any(shutil.which(name) for name in ("g++", "clang++", "c++")),
    reason="torch.compile needs a C++ compiler and none was found",
)
# Warnings of torch.compile about itself, in some versions of it, with or without narrowgate.
compiles = pytest.mark.filterwarnings(
    r"ignore:The \.grad attribute of a Tensor",
    "ignore:Skipping serialization of",
    r"ignore:`torch\.jit\.script_method` is deprecated",
)


def spread_gates_(gates, closed=0.3):
    """Give every gate another parameter, and close about this share of them."""
    for g in gates.parameters():
        with torch.no_grad():
            g.uniform_(0.2, 1.5).mul_(torch.randn_like(g).sign())
            g.masked_fill_(torch.rand_like(g) < closed, 1e-5)


def layer_by_layer(model):
    """A copy of a gated model whose layers compute their own weights instead of all at once."""
    model = copy.deepcopy(model)
    for module in model.modules():
        forget_prepared_gates_(module)
    return model


def gradients(model):
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def assert_same(ours, theirs, **tolerances):
    torch.testing.assert_close(ours, theirs, **({"rtol": 0, "atol": 0} | tolerances))


class ConvNet(nn.Module):
    """Convolutions of several kinds with and without bias, a norm, and two linear layers, for 3 x 8 x 8."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(6)
        self.depthwise = nn.Conv2d(6, 6, 3, groups=6, bias=False)
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.conv2 = nn.Conv2d(4, 5, 1)
        self.fc1 = nn.Linear(5, 7)
        self.fc2 = nn.Linear(7, 2)

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.up(self.depthwise(x)))
        x = torch.tanh(self.conv2(x)).mean((2, 3))
        return self.fc2(torch.relu(self.fc1(x)))


def images(batch=4, dtype=torch.float32):
    return torch.randn(batch, 3, 8, 8, dtype=dtype)


def named(*names):
    """A filter that chooses the modules of these names."""
    return lambda name, module: name in names


@contextmanager
def unchanged(model):
    """A context in which neither a tensor nor the class of any module of the model may change."""
    state, types = copy.deepcopy(model.state_dict()), [type(module) for module in model.modules()]
    yield
    assert_same(model.state_dict(), state)
    assert [type(module) for module in model.modules()] == types


class Residual(nn.Module):
    def __init__(self, branch):
        super().__init__()
        self.branch = branch

    def forward(self, x):
        return x + self.branch(x)


class OwnLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x).relu()


def gates_at(*g, dtype=torch.float64, kind="exponential"):
    """Gates of one layer with these parameters, which are all that a penalty looks at."""
    model = nn.Sequential(nn.Linear(2, len(g), dtype=dtype))
    gates = ng.attach_gates_(model, kind, last=True)
    gates.assign_(torch.tensor(g, dtype=dtype))
    return gates


def parameters_of(gates):
    return gates.flat().detach()


def value_and_gradient(gates, penalty):
    for g in gates.parameters():
        g.grad = None
    value = penalty()
    value.backward()
    return value.item(), torch.cat([g.grad for g in gates.parameters()]).tolist()
