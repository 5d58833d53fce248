"""How heavy the page of a 240-epoch run of ResNet-164 is, and how long Chromium takes to open it.

    python benchmarks/report_page.py

Needs Chromium (or CHROMIUM=path). The run is real in form and made up in numbers: the network and its gates are those
of the recipe, gates fall at speeds of their own, and what is closed at the end is removed. Writes
``benchmarks/report_page.json``. Targets: below 6 MB, open in below 2 s.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from pathlib import Path

import torch
from _record import ROOT, about, quartiles, table, write_json

from narrowgate.flow import compact, plan
from narrowgate.report import write_report
from narrowgate.storage import save
from narrowgate.train.finish import Result
from narrowgate.train.log import EpochRow, RunLog
from narrowgate.train.recipe import Recipe
from narrowgate.train.run_folder import RECIPE, SMALL
from narrowgate.train.setup import build
from narrowgate.train.training import Size

sys.path.insert(0, str(ROOT / "tests"))
from chromium import Page, find

TARGET_BYTES, TARGET_SECONDS = 6_000_000, 2.0


def make_run(folder: Path, recipe: Recipe) -> None:
    """A finished run's folder, without its checkpoints."""
    torch.manual_seed(0)
    parts = build(recipe, 100, (3, 32, 32), torch.device("cpu"))
    gates, epochs, example = parts.gates, recipe.train.epochs, torch.randn(2, 3, 32, 32)
    assert gates is not None
    full = Size.of(parts.model, example)
    folder.mkdir(parents=True)
    (folder / RECIPE).write_text(recipe.to_toml())
    log = RunLog(folder, tensorboard=False)
    start = gates.flat().detach().clone()
    speed = torch.rand_like(start) * 2.2
    for epoch in range(1, epochs + 1):
        gates.assign_((start - speed * epoch / epochs).clamp(min=0))
        closed = gates.closed_fraction()
        event = "shrunk 1,000,000 -> 900,000 in 2.0 s" if epoch % 24 == 0 else ""
        size = [round(number * (1 - 0.7 * closed)) for number in dataclasses.astuple(full)]
        share = epoch / epochs
        row = EpochRow(
            epoch=epoch, epochs=epochs, lr=0.1, strength=1e-4, sigma=1.0, train_loss=4 * (1 - share) + 0.1,
            train_accuracy=0.2 + 0.79 * share, accuracy=0.2 + 0.55 * share, closed=closed, parameters=size[0],
            multiply_adds=size[1], seconds=12.3, images_per_second=4000.0, event=event,
        )  # fmt: skip
        log.epoch(row, gates)
    log.close()
    made = plan(parts.model.eval(), example)
    small = compact(parts.model, made)
    save(small, made, folder / SMALL)
    left = Size.of(small, example)
    Result(
        accuracy=0.75, accuracy_gated=0.75, accuracy_removed=0.75, validation_accuracy=None,
        parameters=left.parameters, parameters_full=full.parameters, multiply_adds=left.multiply_adds,
        multiply_adds_full=full.multiply_adds, closed=gates.closed_fraction(), max_error=1e-6, closed_by_threshold=0,
        finetune_epochs=0, epochs=epochs, seconds=3000.0, device="made up", processes=1, recipe_digest="",
    ).save(folder)  # fmt: skip


def measure(page: Path, repeats: int) -> list[float]:
    """Seconds from asking for a page to its first frame, each in a fresh browser."""
    seconds = []
    for _ in range(repeats):
        with Page(find()) as browser:
            seconds.append(browser.open(page))
            assert not browser.errors, browser.errors
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "cifar100-resnet164-l1-exp.toml")
    parser.add_argument("--repeats", type=int, default=7, help="fresh browsers for each page (default 7)")
    parser.add_argument("--keep", type=Path, help="a new folder for the run and the pages")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "report_page.json")
    options = parser.parse_args()
    if find() is None:
        parser.error("no Chromium found: install one, or name it in CHROMIUM")
    recipe = Recipe.load(options.recipe)
    results, rows = {}, []
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        make_run(folder / "run", recipe)
        for count in (1, 10):
            started = time.perf_counter()
            page = write_report([folder / "run"] * count, folder / f"{count}.html")
            written = time.perf_counter() - started
            seconds = measure(page, options.repeats)
            size = page.stat().st_size
            results[f"{count} runs"] = {"bytes": size, "seconds_to_write": round(written, 2),
                                        "seconds_to_open": quartiles(seconds, 3)}  # fmt: skip
            rows.append([str(count), f"{size / 1e6:.2f} MB", f"{quartiles(seconds, 3)['median']:.2f} s"])
    print(table(["runs", "weighs", "opens in"], rows))
    one = results["1 runs"]
    met = one["bytes"] < TARGET_BYTES and one["seconds_to_open"]["median"] < TARGET_SECONDS
    print(f"targets ({TARGET_BYTES / 1e6:.0f} MB, {TARGET_SECONDS:.0f} s) {'met' if met else 'MISSED'}")
    network = f"{recipe.model.name}, {recipe.train.epochs} epochs"
    targets = {"bytes": TARGET_BYTES, "seconds": TARGET_SECONDS}
    write_json(options.out, {**about(), "network": network, "targets": targets, "pages": results})


if __name__ == "__main__":
    main()
