"""One record of all runs that there are, and the files made of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _compare_keep import Kept, in_order, keep
from _compare_lines import lines_added
from _compare_methods import NETWORKS, Job
from _compare_page import PAGE, blocks, lines_table, markdown, results_of
from _compare_plot import draw
from _compare_runner import Work, WorkError
from _compare_summary import points_of, summary_of
from _record import ROOT, write_json
from _torch_pruning import version

from narrowgate.reproduce.page import between_markers

Record = dict[str, Any]


def gather(jobs: Sequence[Job], work: Work, about: Record, last: Path | None = None) -> Record:
    """Points, verdicts, and by name what is missing or failed.

    Args:
        last: an earlier result, whose points stand in for those that have no run in the work folder.
    """
    path = work.folder / "settings.json"
    if not path.exists():
        raise WorkError(f"{work.folder} holds no runs: run them first, without --collect")
    settings = json.loads(path.read_text())
    runs = {job: found for job in jobs if (found := work.read(job)) is not None}
    times = {job: json.loads(work.latency(job).read_text()) for job in runs if work.latency(job).exists()}
    kept = Kept() if last is None else keep(last, settings, runs)
    networks = {}
    for name in dict.fromkeys(job.network for job in jobs):
        new = [{"date": about["date"][:10]} | point for point in points_of(name, runs, times)]
        points = in_order(name, [*new, *kept.points.get(name, [])])
        networks[name] = {"title": NETWORKS[name].title, **summary_of(name, points), "points": points}
    return {
        "what": "pruning from the same start for as many epochs",
        "about": {**about, "torch_pruning": version() or kept.torch_pruning},
        "settings": settings,
        "devices": sorted({*(run.get("device", settings["device"]) for run in runs.values()), *kept.devices}),
        "judged_on": "held-out training" if settings["validation"] else "test",
        "seeds": sorted({seed for found in networks.values() for point in found["points"] for seed in point["seeds"]}),
        "runs": len(runs) + len(kept.runs),
        "core_hours": round(sum(run.get("seconds", 0.0) for run in [*runs.values(), *kept.runs]) / 3600, 2),
        "missing": {job.name: work.last_words(job) for job in jobs if job not in runs and not kept.holds(job)},
        "failed": {job.name: run["failure"] for job, run in runs.items() if "failure" in run},
        "lines": lines_added(),
        "networks": networks,
    }


def write_all(record: Record, family: str, out: Path | None) -> list[str]:
    """JSON, Markdown and plot, into a folder or where the documentation has them; what was written."""
    result = results_of(family, out)
    write_json(result, record)
    page = result.with_suffix(".md")
    page.write_text(
        f"# Pruned from the same start: {family}\n\n{markdown(record)}\n{lines_table(record['lines'])}",
        encoding="utf-8",
    )
    drawn = draw(record, (ROOT / "docs" / "img" if out is None else out) / f"compare-{family}")
    written = [str(path) for path in (result, page, *drawn)]
    if out is None:
        PAGE.write_text(between_markers(PAGE.read_text(encoding="utf-8"), blocks()), encoding="utf-8")
        written.append(str(PAGE))
    missing = len(record["missing"])
    return [*written, f"{record['runs']} runs" + (f", {missing} missing" if missing else "")]
