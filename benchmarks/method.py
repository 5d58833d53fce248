"""What the paper does not say about its method, measured on a CPU in seconds.

- closing: where float32 ``1 - exp(-g*g)`` becomes 0, and what ``-expm1(-g*g)`` is there.
- jitter: 1000 gates under an l1 penalty alone, SGD with momentum 0.9. How far from 0 do they stay, and how many are
  closed at one moment? The same with a proximal step.
- invariance: a network of two convolutions with BatchNorm, trained on scikit-learn's digits. All factors on the second
  convolution's channels are set to one value, before the norm or after it: how large is the loss's gradient by them?

    python benchmarks/method.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from _record import ROOT, about, write_json
from torch import Tensor, nn
from torch.nn import functional as F

from narrowgate.gates import CLOSING_POINT, ExponentialGate
from narrowgate.gateset import Gates
from narrowgate.penalties import Penalty

OUT = ROOT / "results" / "method.json"
MOMENTUM, GATES, STEPS = 0.9, 1000, 3000
PULLS = ((0.1, 1e-3), (0.1, 1e-4), (0.01, 1e-3), (0.01, 1e-4), (0.001, 1e-3), (0.001, 1e-4))
VALUES = (1.0, 0.1, 0.01, 0.001)


def main(out: Path = OUT) -> None:
    torch.manual_seed(0)
    facts = {"closing": closing(), "jitter": [jitter(*pull) for pull in PULLS], "invariance": invariance()}
    write_json(out, {"what": "the method, without a training run", **about(), **facts})
    print(out.read_text())


def closing() -> dict[str, float]:
    """The largest float32 g that closes by rounding, found by walking the floats around 2**-12.5."""
    g = torch.tensor(CLOSING_POINT * 0.999)
    top = torch.tensor(1.0)
    largest = g
    for _ in range(100_000):
        if 1 - torch.exp(-g * g) == 0:
            largest = g
        elif g > CLOSING_POINT * 1.001:
            break
        g = torch.nextafter(g, top)
    return {
        "two_to_the_minus_12_5": CLOSING_POINT,
        "largest_closed_float32": float(largest),
        "smallest_open_float32": float(torch.nextafter(largest, top)),
        "minus_expm1_there": float(-torch.expm1(-largest * largest)),
    }


def jitter(lr: float, strength: float) -> dict[str, Any]:
    """Gates that only a penalty pulls, after they have reached 0."""
    row: dict[str, Any] = {"lr": lr, "strength": strength, "momentum": MOMENTUM}
    row["lr_times_strength_over_one_minus_momentum"] = float(f"{lr * strength / (1 - MOMENTUM):.4g}")
    for name in ("in_the_loss", "proximal"):
        gate = ExponentialGate(GATES)
        far = 200 * lr * strength / (1 - MOMENTUM)  # some hundred steps away from 0
        with torch.no_grad():
            gate.g.copy_(torch.linspace(far, 2 * far, GATES))
        gates = Gates("exponential", {"gate": gate})
        penalty = Penalty(gates, "l1", strength)
        optimizer = torch.optim.SGD([gate.g], lr=lr, momentum=MOMENTUM)
        farthest = 0.0
        for step in range(STEPS):
            optimizer.zero_grad()
            if name == "in_the_loss":
                penalty().backward()
                optimizer.step()
            else:
                penalty.proximal_(lr / (1 - MOMENTUM))
            if step >= STEPS - 500:
                farthest = max(farthest, float(gate.g.detach().abs().max()))
        closed = float((gate.g.abs() < CLOSING_POINT).float().mean())
        row[name] = {"farthest_from_0": float(f"{farthest:.4g}"), "closed_at_the_end": round(closed, 4)}
    return row


class Small(nn.Module):
    """conv-BN-ReLU twice, with a factor a channel before and after the second norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.conv2, self.norm2 = nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)
        self.fc = nn.Linear(32, 10)

    def forward(self, images: Tensor, before: Tensor, after: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(images)))
        x = F.relu(self.norm2(self.conv2(x) * before) * after)
        out: Tensor = self.fc(x.mean((2, 3)))
        return out


def invariance() -> dict[str, Any]:
    """The mean size of the loss's gradient by a factor, in float64 and train mode, with factors of several sizes."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16).view(-1, 1, 8, 8), torch.tensor(labels)
    model, ones = Small().double(), torch.ones(32, 1, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(5):
        for batch in torch.randperm(len(y)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch], ones, ones), y[batch]).backward()
            optimizer.step()
    found: dict[str, Any] = {"eps": model.norm2.eps, "values": list(VALUES)}
    for name in ("before_norm", "after_norm"):
        found[name] = []
        for value in VALUES:
            factor = (ones * value).requires_grad_()
            pair = (factor, ones) if name == "before_norm" else (ones, factor)
            (gradient,) = torch.autograd.grad(F.cross_entropy(model(x, *pair), y), factor)
            found[name].append(float(f"{gradient.abs().mean():.3g}"))
    return found


if __name__ == "__main__":
    main()
