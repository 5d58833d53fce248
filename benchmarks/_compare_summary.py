"""From runs to points (means over seeds), the noise between seeds, and who keeps fewer parameters at equal accuracy."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from _compare_methods import NETWORKS, Job

Record = dict[str, Any]


def points_of(network: str, runs: Mapping[Job, Record], times: Mapping[Job, Record]) -> list[Record]:
    """A point for each method and size of which a run finished, in the order of the methods."""
    found = []
    for name, method in NETWORKS[network].methods.items():
        for size, value in enumerate(method.values):
            mine = {
                job: run for job, run in runs.items() if (job.network, job.method, job.size) == (network, name, size)
            }
            finished = {job: run for job, run in mine.items() if "failure" not in run}
            if finished:
                timed = [times[job] for job in finished if job in times]
                head = {"method": name, "label": method.label, "ours": method.ours, "key": method.key, "value": value}
                failed = [job.seed for job in mine if job not in finished]
                found.append(head | {"failed_seeds": failed} | _mean(finished, timed))
    return found


def _mean(runs: Mapping[Job, Record], timed: Sequence[Record]) -> Record:
    values = list(runs.values())
    accuracies = [run["accuracy"] for run in values]
    whole = [run["removal"]["whole_step"] for run in values]
    zeros = [run["removal"]["zeros_only"] for run in values if "zeros_only" in run["removal"]]
    return {
        "seeds": [job.seed for job in runs],
        "accuracy": statistics.fmean(accuracies),
        "accuracy_deviation": statistics.stdev(accuracies) if len(accuracies) > 1 else None,
        "accuracy_after_removal": statistics.fmean(run["accuracy_after_removal"] for run in values),
        "parameters": statistics.fmean(run["parameters"] for run in values),
        "parameters_full": values[0]["parameters_full"],
        "multiply_adds": statistics.fmean(run["multiply_adds"] for run in values),
        "multiply_adds_full": values[0]["multiply_adds_full"],
        "largest_change": max(one["largest_change"] for one in whole),
        "predictions_changed": statistics.fmean(one["predictions_changed"] for one in whole),
        "zeros_largest_change": max((one["largest_change"] for one in zeros), default=None),
        "zeros_predictions_changed": max((one["predictions_changed"] for one in zeros), default=None),
        "latency": timed[0] if timed else None,
        "runs": [
            {key: run[key] for key in ("accuracy", "parameters", "seconds", "cut_after_epochs")} for run in values
        ],
    }


def summary_of(network: str, points: Sequence[Record]) -> Record:
    """The dense network, the noise, and a verdict for each rival."""
    dense = next((point for point in points if point["method"] == "dense"), None)
    floor = None if dense is None else dense["accuracy"] - NETWORKS[network].usable
    pruned = [point for point in points if point["method"] != "dense"]
    usable = [point for point in pruned if floor is None or point["accuracy"] >= floor]
    noise = noise_of(usable)
    ours = [point for point in usable if point["ours"]]
    rivals = dict.fromkeys(point["method"] for point in pruned if not point["ours"])
    return {
        "dense_accuracy": None if dense is None else dense["accuracy"],
        "floor": floor,
        "noise": noise,
        "verdicts": {name: duel([p for p in usable if p["method"] == name], ours, noise or 0.0) for name in rivals},
    }


def noise_of(points: Sequence[Record]) -> float | None:
    """The median over all points of the deviation between seeds; None where each has one seed."""
    deviations = [point["accuracy_deviation"] for point in points if point["accuracy_deviation"] is not None]
    return statistics.median(deviations) if deviations else None


def duel(theirs: Sequence[Record], ours: Sequence[Record], noise: float) -> Record:
    """Who keeps fewer parameters at equal accuracy, asked both ways.

    For each of their points: the smallest of ours that is as accurate, up to the noise. And for each of our points that
    none of ours beats: the smallest of theirs. ``ratio`` is ours over theirs.
    """
    asked = [_answer(point, ours, noise) for point in theirs]
    back = [_answer(point, theirs, noise) for point in front(ours)]
    won = sum(answer["fewer"] for answer in asked)
    lost = len(asked) - won
    beaten = sum(answer["fewer"] for answer in back)
    ratios = [answer["parameters"] / answer["of"]["parameters"] for answer in asked if answer["parameters"]]
    if not theirs or not ours:
        verdict = "not compared"
    elif won and not lost and not beaten:
        verdict = "narrowgate"
    elif beaten and not won:
        verdict = "rival"
    else:
        verdict = "mixed"
    return {
        "verdict": verdict,
        "their_points": len(asked),
        "we_keep_fewer_at": won,
        "our_front_points": len(back),
        "they_keep_fewer_at": beaten,
        "ratio": statistics.geometric_mean(ratios) if ratios else None,
        "at_their_accuracy": asked,
        "at_our_accuracy": back,
    }


def _answer(point: Record, others: Sequence[Record], noise: float) -> Record:
    """The smallest of the others that is as accurate as a point, and whether it is smaller."""
    equal = [other for other in others if other["accuracy"] >= point["accuracy"] - noise]
    best = min(equal, key=lambda other: other["parameters"], default=None)
    return {
        "of": _brief(point),
        "by": None if best is None else _brief(best),
        "parameters": None if best is None else best["parameters"],
        "fewer": best is not None and best["parameters"] < point["parameters"],
    }


def _brief(point: Record) -> Record:
    return {key: point[key] for key in ("method", "value", "accuracy", "parameters")}


def front(points: Sequence[Record]) -> list[Record]:
    """The points that no other beats in both accuracy and parameters."""
    return [
        one
        for one in points
        if not any(
            other["accuracy"] >= one["accuracy"]
            and other["parameters"] <= one["parameters"]
            and (other["accuracy"], other["parameters"]) != (one["accuracy"], one["parameters"])
            for other in points
        )
    ]
