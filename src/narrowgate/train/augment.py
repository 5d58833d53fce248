"""Random crops, flips and warps, and normalisation, as tensor operations that a CUDA graph can hold."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def seeded(name: str, *numbers: int) -> torch.Generator:
    """A CPU generator that depends on a name and some numbers alone; neighbouring numbers give unrelated streams."""
    text = " ".join([name, *(str(int(number)) for number in numbers)])
    # PyTorch's CPU generator looks at the lower 32 bits of a seed only, so the hash has to fill those.
    digest = hashlib.sha256(text.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))


def draw(count: int, seed: int, epoch: int, padding: int, flips: bool = True) -> Tensor:
    """Each image's (dy, dx, flip) in one epoch, as int16 [count, 3] on the CPU: a function of its arguments alone."""
    if padding < 0:
        raise ValueError(f"padding must be 0 or more, got {padding}")
    generator = seeded("narrowgate crop-flip", seed, epoch)
    draws = torch.empty(count, 3, dtype=torch.int16)
    draws[:, :2] = torch.randint(2 * padding + 1, (count, 2), generator=generator, dtype=torch.int16)
    draws[:, 2] = torch.randint(2, (count,), generator=generator, dtype=torch.int16) if flips else 0
    return draws


def crop_flip(images: Tensor, draws: Tensor, padding: int) -> Tensor:
    """Images [B, C, H, W] moved and mirrored as drawn: what zero-padding, cropping and then flipping would give.

    One gather from computed places: no padded copy, no loop, and nothing that makes the host wait for the device.
    """
    if images.dim() != 4 or draws.shape != (len(images), 3):
        raise ValueError(
            f"crop_flip takes images [B, C, H, W] and draws [B, 3], got {list(images.shape)} and {list(draws.shape)}"
        )
    batch, channels, height, width = images.shape
    dy, dx, flip = draws.long().unsqueeze(2).unbind(1)
    column = torch.arange(width, device=images.device)
    rows = torch.arange(height, device=images.device) + (dy - padding)
    columns = torch.where(flip.bool(), width - 1 - column, column) + (dx - padding)
    near_rows, near_columns = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
    inside = (near_rows == rows).unsqueeze(2) & (near_columns == columns).unsqueeze(1)
    places = near_rows.unsqueeze(2) * width + near_columns.unsqueeze(1)
    flat = places.view(batch, 1, -1).expand(-1, channels, -1)
    moved = images.reshape(batch, channels, -1).gather(2, flat).view(batch, channels, height, width)
    return moved * inside.unsqueeze(1)


def draw_warps(count: int, seed: int, epoch: int) -> Tensor:
    """Each image's (dy, dx, angle, size) in one epoch, as float32 [count, 4]: up to 2 pixels, 10 degrees, a tenth."""
    most = torch.tensor([2.0, 2.0, math.radians(10), 0.1])
    draws = (2 * torch.rand(count, 4, generator=seeded("narrowgate warp", seed, epoch)) - 1) * most
    draws[:, 3] += 1
    return draws


def warp(images: Tensor, draws: Tensor) -> Tensor:
    """Images [B, C, H, W] turned and resized about their middle, then moved, as drawn; float32, 0 from outside."""
    if images.dim() != 4 or draws.shape != (len(images), 4):
        raise ValueError(
            f"warp takes images [B, C, H, W] and draws [B, 4], got {list(images.shape)} and {list(draws.shape)}"
        )
    height, width = images.shape[2:]
    dy, dx, angle, size = draws.unbind(1)
    # For each pixel the place it comes from, in a picture that reaches from -1 to 1 in either direction.
    cosine, sine = torch.cos(angle) / size, torch.sin(angle) / size
    across, down = -2 * dx / width, -2 * dy / height
    rows = [
        [cosine, sine * height / width, cosine * across + sine * height / width * down],
        [-sine * width / height, cosine, cosine * down - sine * width / height * across],
    ]
    theta = torch.stack([torch.stack(row, 1) for row in rows], 1)
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    return F.grid_sample(images.float(), grid, align_corners=False)


class Normalise:
    """Images [B, C, H, W] of 0 to 255 to float32, ``(x / 255 - mean) / std`` by channel, on one device."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], device: torch.device | str = "cpu") -> None:
        if len(mean) != len(std) or not all(value > 0 for value in std):
            raise ValueError(f"mean and std must be as many, and std above 0; got {tuple(mean)} and {tuple(std)}")
        centre = torch.tensor(mean, dtype=torch.float64).view(1, -1, 1, 1)
        spread = torch.tensor(std, dtype=torch.float64).view(1, -1, 1, 1)
        self.scale = (1 / (255 * spread)).float().to(device)
        self.shift = (-centre / spread).float().to(device)

    def __call__(self, images: Tensor) -> Tensor:
        return torch.addcmul(self.shift, images.float(), self.scale)
