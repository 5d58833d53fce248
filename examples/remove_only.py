"""Sparsify with something else, and only remove with narrowgate: PyTorch's own pruning, or network slimming by hand."""

import argparse
import copy

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

import narrowgate as ng


def build() -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in ((1, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def train(model: nn.Module, images: Tensor, labels: Tensor, epochs: int, slimming: float = 0.0) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(labels)).split(64):
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            scales = [norm.weight for norm in model.modules() if isinstance(norm, nn.BatchNorm2d)]
            optimizer.zero_grad()
            (loss + slimming * sum(scale.abs().sum() for scale in scales)).backward()
            optimizer.step()
    model.eval()


def sparsify_with_torch(model: nn.Module, images: Tensor, labels: Tensor, share: float, epochs: int) -> None:
    """Mask the filters of smallest norm in each convolution, and train on under the masks."""
    convolutions = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    for layer in convolutions:
        prune.ln_structured(layer, "weight", amount=share, n=2, dim=0)
    train(model, images, labels, epochs)
    for layer in convolutions:
        prune.remove(layer, "weight")  # the masks become zeros


def sparsify_by_slimming(model: nn.Module, images: Tensor, labels: Tensor, share: float, epochs: int) -> None:
    """Train with an l1 penalty on BatchNorm's scales, then set the smallest of all layers to zero, shifts included."""
    train(model, images, labels, epochs, slimming=5e-3)
    norms = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
    limit = torch.cat([norm.weight.abs() for norm in norms]).quantile(share)
    with torch.no_grad():
        for norm in norms:
            small = norm.weight.abs() < limit
            norm.weight[small] = 0
            norm.bias[small] = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10, help="of training, and of sparsifying")
    parser.add_argument("--share", type=float, default=0.5, help="of filters or scales that become zero")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="one epoch on a few images")
    args = parser.parse_args()
    if args.smoke:
        args.epochs = 1

    torch.manual_seed(args.seed)
    digits = load_digits()
    images, labels = torch.tensor(digits.images[:, None] / 16).float(), torch.tensor(digits.target)
    test_images, test_labels = images[1500:], labels[1500:]
    images, labels = images[: 300 if args.smoke else 1500], labels[: 300 if args.smoke else 1500]

    def accuracy(model: nn.Module) -> float:
        with torch.no_grad():
            return float((model(test_images).argmax(1) == test_labels).float().mean())

    trained = build()
    train(trained, images, labels, args.epochs)
    print(f"trained: accuracy {accuracy(trained):.1%}")
    for sparsify in (sparsify_with_torch, sparsify_by_slimming):
        model = copy.deepcopy(trained)
        sparsify(model, images, labels, args.share, args.epochs)
        plan = ng.plan(model, images[:2])  # finds what is zero, whoever made it so
        small = ng.compact(model, plan)
        check = ng.verify(model, small, images[:8])
        print(f"{sparsify.__name__}: accuracy {accuracy(model):.1%} with zeros, {accuracy(small):.1%} without")
        print(f"  {plan.parameters_before:,} -> {plan.parameters_after:,} parameters, {check}")
        train(small, images, labels, args.epochs)  # zeroing changed what the network computes; removing did not
        print(f"  fine-tuned: accuracy {accuracy(small):.1%}")


if __name__ == "__main__":
    main()
