"""What to do when a smaller network is not faster."""

from __future__ import annotations

from narrowgate.measure.timings import Latency, Timing

_SMALL_BATCH = 8


def advice(result: Latency) -> list[str]:
    """A line for each thing to try, from what was measured; none where the small network is faster everywhere."""
    not_faster = [timing for timing in result.timings if timing.verdict != "faster"]
    if not not_faster:
        return []
    lines = [f"Not faster: {'; '.join(map(_place, not_faster))}."]
    if result.multiply_adds_left > 0.95:
        lines.append(
            f"{result.multiply_adds_left:.0%} of the multiply-adds are left, so there is little to gain: prune more."
        )
        return lines
    if result.indexed_layers:
        lines.append(
            f"{result.indexed_layers} layers pick their channels by index, which takes time: plan with "
            'layout="aligned" (no index operations), or "auto" (only where it measures faster).'
        )
    if result.odd_widths:
        lines.append(f"{result.odd_widths} layers have widths that are no multiple of 8: plan with round_to=8.")
    lines += _larger_batches(result, not_faster)
    launches = {t.batch for t in not_faster if t.device == "cuda" and t.mode == "eager"}
    if launches:
        lines.append("On a GPU, eager runs mostly wait for launches: use a CUDA graph, or torch.compile.")
    if len(lines) == 1:
        lines.append("Nothing in the network explains it: compare on an idle machine, with more --rounds.")
    return lines


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


def _place(timing: Timing) -> str:
    return f"{timing.device} {timing.mode}, batch {timing.batch} ({timing.ratio.median:.2f} of the time)"
