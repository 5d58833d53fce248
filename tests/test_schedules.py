import pytest

from narrowgate.schedules import Constant, Exponential, LinearThenExponential, Stepped, as_schedule, paper


def test_constant():
    assert [Constant(0.3)(epoch) for epoch in (0, 7)] == [0.3, 0.3]


def test_stepped_takes_a_new_value_at_each_step():
    schedule = Stepped((1.0, 2.0, 3.0), (2, 5))
    assert [schedule(epoch) for epoch in range(7)] == [1, 1, 2, 2, 2, 3, 3]


def test_exponential():
    assert [Exponential(2.0, 0.5)(epoch) for epoch in range(3)] == [2.0, 1.0, 0.5]


def test_linear_then_exponential_also_between_whole_epochs():
    schedule = LinearThenExponential(start=1.0, drop=0.4, switch=0.2, rate=0.25)
    assert [schedule(epoch) for epoch in range(5)] == pytest.approx([1.0, 0.6, 0.2, 0.05, 0.0125])
    uneven = LinearThenExponential(start=1.0, drop=0.5, switch=0.25, rate=0.25)
    assert [uneven(epoch) for epoch in range(4)] == pytest.approx([1.0, 0.5, 0.125, 0.03125])


# sigma: 2.0 minus 0.02 an epoch reaches 0.2 at epoch 90, and shrinks by 1 % an epoch from there
SIGMA = {0: 2.0, 1: 1.98, 89: 0.22, 90: 0.2, 91: 0.198, 119: 0.2 * 0.99**29, 120: 0.2 * 0.99**30, 239: 0.2 * 0.99**149}


@pytest.mark.parametrize("network", ["resnet-164", "densenet-40"])
def test_the_papers_schedules_of_its_deep_networks(network):
    schedules = paper(network)
    assert {epoch: schedules["sigma"](epoch) for epoch in SIGMA} == pytest.approx(SIGMA, rel=1e-12)
    assert [schedules["strength"](epoch) for epoch in (0, 119, 120, 239)] == [1e-4, 1e-4, 5e-4, 5e-4]
    assert set(schedules) == {"strength", "sigma"}


def test_the_papers_schedule_of_mobilenet():
    schedules = paper("mobilenet-v2")
    assert set(schedules) == {"sigma"}
    assert [schedules["sigma"](epoch) for epoch in (0, 1, 2, 240)] == pytest.approx([2, 1.98, 1.9602, 2 * 0.99**240])


def test_an_unknown_network_lists_the_known_ones():
    with pytest.raises(ValueError, match="'vgg'; it has resnet-164, densenet-40, mobilenet-v2"):
        paper("vgg")


def test_the_papers_schedules_cannot_be_changed_by_accident():
    paper("resnet-164").clear()
    assert paper("resnet-164")


def test_as_schedule():
    assert as_schedule("strength", 1) == Constant(1.0)
    schedule = Stepped((1.0, 2.0), (3,))
    assert as_schedule("strength", schedule) is schedule
    with pytest.raises(TypeError, match="strength must be a number or a schedule"):
        as_schedule("strength", [1.0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Stepped((1.0,), (3,)), "1 steps need 2 values, got 1"),
        (lambda: Stepped((1.0, 2.0, 3.0), (5, 5)), "steps must be increasing epochs"),
        (lambda: Stepped((1.0, 2.0, 3.0), (5, 3)), "steps must be increasing epochs"),
        (lambda: Exponential(0.0, 0.9), "start and rate must be above 0"),
        (lambda: Exponential(1.0, 0.0), "start and rate must be above 0"),
        (lambda: LinearThenExponential(1.0, 0.1, 2.0, 0.9), "need 0 < switch <= start"),
        (lambda: LinearThenExponential(1.0, 0.0, 0.5, 0.9), "drop > 0"),
    ],
)
def test_schedules_that_make_no_sense(make, message):
    with pytest.raises(ValueError, match=message):
        make()
