"""What to do when a smaller network is not faster."""

from __future__ import annotations

from narrowgate.measure.timings import Latency, Timing

_SMALL_BATCH = 8
_NOTHING = "Nothing in the network explains it: compare on an idle machine, with more --rounds."
_NEAR = 0.05  # shares of time and of activations that are alike


def advice(result: Latency) -> list[str]:
    """A line for each thing to try, from what was measured; none where the small network is faster everywhere."""
    not_faster = [timing for timing in result.timings if timing.verdict != "faster"]
    if not not_faster:
        return []
    where = [_places(not_faster, verdict) for verdict in ("slower", "no clear difference")]
    return [line for line in where if line] + (_remedies(result, not_faster) or [_NOTHING])


def _remedies(result: Latency, not_faster: list[Timing]) -> list[str]:
    if result.multiply_adds_left > 0.95:
        left = f"{result.multiply_adds_left:.0%} of the multiply-adds are left"
        return [f"{left}, so there is little to gain: prune more."]
    lines = []
    if result.indexed_layers:
        lines.append(
            f"{_layers(result.indexed_layers, 'picks its', 'pick their')} channels by index, which takes time: plan "
            'with layout="aligned" (no index operations), or "auto" (only where it measures faster).'
        )
    if result.odd_widths:
        odd = _layers(result.odd_widths, "has a width that is", "have widths that are")
        lines.append(f"{odd} no multiple of 8: plan with round_to=8.")
    lines += _larger_batches(result, not_faster)
    launches = {t.batch for t in not_faster if t.device == "cuda" and t.mode == "eager"}
    if launches:
        lines.append("On a GPU, eager runs mostly wait for launches: use a CUDA graph, or torch.compile.")
    return lines


def _layers(count: int, one: str, several: str) -> str:
    return f"1 layer {one}" if count == 1 else f"{count} layers {several}"


def reason(result: Latency, timing: Timing) -> str:
    """Why a network saves less time than multiply-adds in one way of running: the first cause that the numbers show."""
    if result.indexed_layers:
        return f"index operations: {_layers(result.indexed_layers, 'picks its', 'pick their')} channels"
    if fixed := _fixed_costs(result, timing):
        return fixed
    was, now = result.activations
    if was and result.multiply_adds_left < now / was and timing.ratio.median <= now / was + _NEAR:
        return f"bandwidth-bound: {now / was:.0%} of the activations are left to be moved"
    if timing.device == "cuda" and result.odd_widths:
        return f"odd widths: {_layers(result.odd_widths, 'is', 'are')} no multiple of 8 wide"
    rate = result.multiply_adds_left / timing.ratio.median
    return f"less efficient kernels: narrower layers do {rate:.0%} as many multiply-adds a second"


def _fixed_costs(result: Latency, timing: Timing) -> str:
    """What shows that time hardly depends on the amount of work: the next batch size takes little longer, or less."""
    alike = sorted((t for t in result.timings if (t.device, t.mode) == (timing.device, timing.mode)), key=_batch)
    others = [t for t in alike if t.batch > timing.batch] or [t for t in alike[::-1] if t.batch < timing.batch]
    if not others:
        return ""
    less, more = sorted((timing, others[0]), key=_batch)
    times, images = more.after.median / less.after.median, more.batch / less.batch
    if times > images**0.5:
        return ""
    shown = f"{images:.3g} times the batch takes {times:.1f} times as long"
    graphs = [t for t in result.timings if t.mode == "graph" and t.batch == timing.batch]
    if timing.mode != "graph" and graphs and graphs[0].after.median < 0.7 * timing.after.median:
        return f"launch-bound: a CUDA graph takes {graphs[0].after.median / timing.after.median:.0%} of this; {shown}"
    return f"fixed costs of each layer: {shown}"


def _batch(timing: Timing) -> int:
    return timing.batch


def _larger_batches(result: Latency, not_faster: list[Timing]) -> list[str]:
    small = [t for t in not_faster if t.batch <= _SMALL_BATCH]
    faster = {(t.device, t.mode) for t in result.timings if t.verdict == "faster" and t.batch > _SMALL_BATCH}
    if any((t.device, t.mode) in faster for t in small):
        return [
            "It is faster at larger batches: at small ones fixed costs of each layer rule. Batch requests if you can."
        ]
    tried = max(t.batch for t in result.timings)
    if small and tried <= _SMALL_BATCH:
        return [f"Fixed costs of each layer rule at small batches, and {tried} was the largest: try --batches 1,64."]
    return []


def _places(timings: list[Timing], verdict: str) -> str:
    """Where a verdict was found, with the middle half of the ratios; empty if nowhere."""
    found = [
        f"{t.device} {t.mode}, batch {t.batch} ({t.ratio.q1:.0%} to {t.ratio.q3:.0%} of the time)"
        for t in timings
        if t.verdict == verdict
    ]
    return f"{verdict.capitalize()}: {'; '.join(found)}." if found else ""
