"""How much memory it takes to plan a model of 22 GB without weights, and to plan and cut one that lies on disk."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import narrowgate as ng

WIDTH = 1024


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_width = heads, width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens = x.shape[:2]
        made = self.qkv(self.norm1(x)).reshape(batch, tokens, 3, self.num_heads, self.head_width)
        heads = nn.functional.scaled_dot_product_attention(*made.permute(2, 0, 3, 1, 4).unbind(0))
        x = x + self.proj(heads.transpose(1, 2).reshape(batch, tokens, -1))
        return x + self.fc2(nn.functional.gelu(self.fc1(self.norm2(x))))


def transformer(width: int, heads: int, depth: int) -> nn.Module:
    """Blocks and an output layer."""
    return nn.Sequential(*(Block(width, heads) for _ in range(depth)), nn.Linear(width, 10)).eval()


def without_weights(width: int = 8192, heads: int = 64, depth: int = 7) -> dict[str, float]:
    """Plan from the gates alone: every second neuron and every fourth head closed."""
    with torch.device("meta"):
        model = transformer(width, heads, depth)
    ng.attach_gates_(model, groups=["heads", "neurons"])
    assert isinstance(model, nn.Sequential)
    for block in list(model)[:-1]:
        view: Any = block.proj.gate_in
        view.g = torch.arange(width) // (width // heads)
        for gate, size, step in ((view.shared, heads, 4), (block.fc1.gate, 4 * width, 2)):
            gate.g = nn.Parameter(torch.ones(size))
            gate.g.data[::step] = 0
    before, start = _peak(), time.perf_counter()
    plan = ng.plan(model, torch.empty(1, 16, width, device="meta"))
    return _result(plan, 4 * plan.parameters_before, before, start)


def on_disk(depth: int = 24) -> nn.Module:
    """A model on the meta device with gates on its neurons."""
    with torch.device("meta"):
        model = transformer(WIDTH, 16, depth)
    ng.attach_gates_(model, groups="neurons")
    return model


def write_weights(model: nn.Module, folder: Path) -> None:
    """Random weights for it, none of them zero, a file each; every second gate is closed."""
    from safetensors.torch import save_file

    folder.mkdir()
    files = {}
    for name, tensor in model.state_dict().items():
        real = torch.empty(tensor.shape).uniform_(0.5, 1.0)
        if "gate" in name:
            real[::2] = 0
        save_file({name: real}, folder / f"{name}.safetensors")
        files[name] = f"{name}.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def from_disk(folder: Path) -> dict[str, float]:
    """Plan that model and write the small one, with a layer in memory at a time."""
    from narrowgate.streamed import Checkpoint, compact_to

    model, big = on_disk(), folder / "big"
    before, start = _peak(), time.perf_counter()
    weights = Checkpoint(big)
    plan = ng.plan(model, torch.empty(1, 16, WIDTH, device="meta"), weights=weights)
    compact_to(folder / "small", model, plan, weights)
    result = _result(plan, sum(path.stat().st_size for path in big.iterdir()), before, start)
    return result | {"written_bytes": (folder / "small" / "model.safetensors").stat().st_size}


def measure() -> dict[str, dict[str, float]]:
    """Both, each in a process of its own, since a process's peak never falls."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        write_weights(on_disk(), Path(folder) / "big")
        for kind in ("without_weights", "from_disk"):
            command = [sys.executable, __file__, kind, folder]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[kind] = json.loads(done.stdout.splitlines()[-1])
    return found


def _result(plan: ng.Plan, size: int, before: int, start: float) -> dict[str, float]:
    return {
        "model_bytes": size,
        "grown_bytes": _peak() - before,
        "seconds": round(time.perf_counter() - start, 1),
        "parameters": plan.parameters_before,
        "parameters_small": plan.parameters_after,
    }


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _import_all() -> None:
    """Plan something small, so that what is imported on the way does not count."""
    small = transformer(16, 2, 1)
    gates = ng.attach_gates_(small, groups="neurons")
    gates.parameters()[0].data[0] = 0
    ng.plan(small, torch.randn(1, 4, 16))


if __name__ == "__main__":
    _import_all()
    print(json.dumps(without_weights() if sys.argv[1] == "without_weights" else from_disk(Path(sys.argv[2]))))
