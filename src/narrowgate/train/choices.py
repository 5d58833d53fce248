"""The choices of a plan that is made later, checked now: a run is not to end in an error about its options."""

from __future__ import annotations

from narrowgate.flow.plan import CONSTANTS, LAYOUTS


def check_plan_choices(constants: str, round_to: int, layout: str = "aligned") -> None:
    """Raise for options that ``ng.plan`` would refuse."""
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}; choose one of {', '.join(LAYOUTS)}")
    if constants not in CONSTANTS:
        raise ValueError(f"unknown constants {constants!r}; choose one of {', '.join(CONSTANTS)}")
    if not isinstance(round_to, int) or round_to < 1:
        raise ValueError(f"round_to must be a whole number, 1 or above, got {round_to!r}")
