"""Forwards that keep tensors for their next call: planned before the first one, nothing without numbers is left."""

from functools import lru_cache, wraps

import pytest
import torch
from flow_helpers import close_, count, image
from torch import nn
from torch.nn import functional as F

import narrowgate as ng

TABLES = {}
ROWS = []


def ramp(size):
    return torch.linspace(-1, 1, size, dtype=torch.float64)


@lru_cache(None)
def remembered(size):
    return ramp(size)


@lru_cache(maxsize=3)
def remembered_pair(size):
    return ramp(size), ramp(size) + 1


def decorated(function):
    cached = lru_cache(maxsize=3)(function)
    return wraps(function)(lambda size: cached(size))


class Keeps(nn.Module):
    """Multiplies by a table that it makes once, each in another way."""

    last = None
    size, made = None, torch.empty(0)
    shared = None
    inside = staticmethod(decorated(ramp))

    def __init__(self, how):
        super().__init__()
        self.how, self.own = how, {}
        self.known = torch.empty(0)
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 4, 1)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        return self.conv2(x * getattr(self, self.how)(x.shape[-1]))

    def function(self, size):
        return remembered(size)

    def bounded(self, size):
        return remembered_pair(size)[1]

    def decorated(self, size):
        return Keeps.inside(size)

    def table(self, size):
        if size not in TABLES:
            TABLES[size] = ramp(size)
        return TABLES[size]

    def row(self, size):
        if not ROWS:
            ROWS.append(ramp(size))
        return ROWS[0]

    def own_table(self, size):
        if size not in self.own:
            self.own[size] = ramp(size)
        return self.own[size]

    def attribute(self, size):
        if self.last is None:
            self.last = ramp(size)
        return self.last

    def for_a_size(self, size):
        if self.size != size:
            self.size, self.made = size, ramp(size)
        return self.made

    def known_for_a_size(self, size):
        if self.size != size:
            self.size, self.known = size, ramp(size)
        return self.known

    def in_a_layer(self, size):
        if self.size != size:
            self.size, self.conv1.made = size, ramp(size)
        return self.conv1.made

    def of_the_class(self, size):
        if Keeps.shared is None:
            Keeps.shared = ramp(size)
        return Keeps.shared

    def buffer(self, size):
        if not hasattr(self, "ramp"):
            self.register_buffer("ramp", ramp(size), persistent=False)
        return self.ramp


WAYS = """
function bounded decorated table row own_table attribute for_a_size known_for_a_size in_a_layer
of_the_class buffer
""".split()


@pytest.mark.parametrize("layout", ["aligned", "scatter"])
@pytest.mark.parametrize("how", WAYS)
def test_what_is_kept_has_numbers(how, layout):
    remembered.cache_clear()
    remembered_pair.cache_clear()
    TABLES.clear()
    ROWS.clear()
    Keeps.shared = None
    model, x = Keeps(how).double().eval(), image()
    close_(model.conv1, [1, 2])
    small = ng.compact(model, ng.plan(model, x, layout=layout))
    assert count(small) < count(model)
    factor = ramp(6) + (how == "bounded")
    wanted = model.conv2(F.relu(model.conv1(x)) * factor)
    torch.testing.assert_close(model(x), wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(small(x), wanted, rtol=0, atol=1e-12)
    ng.plan(model, x, layout=layout)


def test_what_was_kept_before_stays():
    TABLES.clear()
    model, x = Keeps("table").double().eval(), image()
    close_(model.conv1, [1, 2])
    model(x)
    table = TABLES[6]
    ng.plan(model, x)
    assert list(TABLES) == [6] and TABLES[6] is table
