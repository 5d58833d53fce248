"""Random networks: whatever the wiring, the small model computes the same function in every layout."""

import copy
import random

import pytest
from flow_helpers import (
    TOLERANCE,
    assert_same_function,
    assert_trains,
    assert_untouched,
    call,
    count,
    more_like,
    spread_of,
)
from flow_networks import ALL_STEPS, random_network
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import narrowgate as ng
from narrowgate.flow.plan import LAYOUTS

removed = []


@settings(max_examples=100, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False))
def check_random_network(rng):
    model, inputs = random_network(rng, kinds=ALL_STEPS)
    before = copy.deepcopy(model)
    round_to = rng.choice([1, 1, 1, 2, 4])
    for layout in LAYOUTS:
        try:
            plan = ng.plan(model, inputs, layout=layout, round_to=round_to)
        except ng.CollapseError:
            outputs = call(model, more_like(inputs))
            assert all(spread_of(output) <= TOLERANCE for output in outputs)
            return
        small = ng.compact(model, plan)
        assert plan.parameters_after == count(small) <= count(model)
        assert_untouched(model, before)
        assert_same_function(model, small, inputs)
        assert_trains(model, small, more_like(inputs))
        removed.append(count(model) - count(small))


def test_random_networks():
    removed.clear()
    check_random_network()
    assert sum(n > 0 for n in removed) > len(removed) / 2, "hardly anything was removed: the test is blind"


@pytest.mark.parametrize("seed", [0, 1])
def test_a_seed_is_a_network(seed):
    """The benchmark names networks by seed."""
    (first, x), (second, y) = (random_network(random.Random(seed), kinds=ALL_STEPS) for _ in range(2))
    assert str(first) == str(second) and first.operations() == second.operations()
    assert all((a == b).all() for a, b in zip(first(x), second(y), strict=True))
