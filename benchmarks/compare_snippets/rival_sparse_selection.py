"""Sparse structure selection, by narrowgate: scaling factors moved by accelerated proximal gradient."""

from torch import Tensor, nn
from torch.nn import functional as F

import narrowgate as ng
from narrowgate.models import LeNet5
from narrowgate.rivals.apg import ApgSgd
from narrowgate.rivals.scaling import use_scaling_gates_


def train(images: Tensor, labels: Tensor, epochs: int, strength: float = 4e-3) -> nn.Module:
    model = LeNet5()
    weights = list(model.parameters())
    ng.attach_gates_(model)
    factors = use_scaling_gates_(model)
    penalty = ng.Penalty(factors, "l1", strength)
    groups = [{"params": weights}, {"params": factors.parameters()}]
    optimizer = ApgSgd(groups, penalty, lr=0.05, momentum=0.9)
    for _ in range(epochs):
        for x, y in zip(images.split(128), labels.split(128), strict=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
    return ng.compact(model.eval(), ng.plan(model, images[:2]))
