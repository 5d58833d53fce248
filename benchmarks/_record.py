"""What every benchmark file says about itself (command, date, versions, device), and how it is written."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def about(device: str = "cpu") -> dict[str, Any]:
    """The facts needed to make a run again and to compare it with others."""
    import torch

    return {
        "command": command(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }


def command() -> str:
    """This process's command line, with absolute paths cut to their last part."""
    arguments = [Path(a).name if os.path.isabs(a) else a for a in sys.argv[1:]]
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *arguments])


def versions() -> dict[str, str | None]:
    """Python, PyTorch, its CUDA and cuDNN, and the packages the benchmarks use."""
    import torch

    import narrowgate

    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "narrowgate": narrowgate.__version__,
        "torch": torch.__version__,
    }
    for package in ("torchvision", "numpy", "triton"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    if torch.cuda.is_available():
        found["cuda"] = torch.version.cuda
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found


def device_name(device: str) -> str:
    """The processor's own name, such as "NVIDIA H200"."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*:\s*(.+)", cpuinfo.read_text()) if cpuinfo.exists() else []
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} logical cores"


def write_json(path: Path, value: Any) -> None:
    """Write a file that is complete or not there: to a neighbour first, then renamed. Numbers in lists share a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(value, indent=2)
    text = re.sub(r"\[\s+([^\[\]{}\"]*?)\s+\]", lambda found: "[" + " ".join(found[1].split()) + "]", text)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text + "\n")
    os.replace(partial, path)


def table(head: list[str], rows: list[list[str]]) -> str:
    """Rows of text in aligned columns."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]]
    return "\n".join([lines[0].rstrip(), "-" * len(lines[0]), *(line.rstrip() for line in lines[1:])])


def quartiles(values: list[float], digits: int) -> dict[str, float]:
    """Median and quartiles, rounded."""
    import statistics

    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"median": round(median, digits), "q1": round(q1, digits), "q3": round(q3, digits)}
