"""Attention heads, neurons and whole branches of a vision transformer: gates, training to a size, removal, check."""

import argparse
from pathlib import Path

import timm
import torch
from timm.data import create_transform, resolve_data_config
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchvision.datasets import ImageFolder

import narrowgate as ng


def smoke_data() -> Dataset:
    """Noise, brighter in one channel for each of two classes."""
    labels = torch.arange(32) % 2
    images = torch.randn(32, 3, 32, 32)
    images[torch.arange(32), labels] += 1
    return TensorDataset(images, labels)


def build(name: str, classes: int, pretrained: bool, smoke: bool) -> torch.nn.Module:
    """The full-size network; a tiny one of the same kind for a try."""
    tiny = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 4} if smoke else {}
    return timm.create_model(name, pretrained=pretrained, num_classes=classes, **tiny)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="vit_tiny_patch16_224", help="a ViT, DeiT or Swin of timm")
    parser.add_argument("--data", type=Path, help="a folder with one folder a class")
    parser.add_argument("--pretrained", action="store_true", help="start from timm's weights (timm fetches them)")
    parser.add_argument("--budget", default="params: 60%", help="what is to be left, for example 'flops: 50%%'")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("small"), help="where the small network is saved")
    parser.add_argument("--smoke", action="store_true", help="some epochs of a tiny network on 32 generated images")
    args = parser.parse_args()
    if args.smoke:
        args.epochs, args.batch, args.workers = 4, 8, 0
    elif args.data is None or not args.data.is_dir():
        parser.exit(2, "Give --data FOLDER, with CLASS/*.jpg in it, or try --smoke.\n")

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    data = smoke_data() if args.smoke else ImageFolder(args.data)
    classes = 2 if args.smoke else len(data.classes)
    model = build(args.model, classes, args.pretrained, args.smoke).to(device)
    if not args.smoke:
        data.transform = create_transform(**resolve_data_config({}, model=model), is_training=True)
    batches = DataLoader(data, args.batch, shuffle=True, drop_last=True, num_workers=args.workers)

    gates = ng.attach_gates_(model, groups=("heads", "neurons", "blocks"), keep_function=True)
    print(gates)
    penalty = ng.Penalty(gates, "l1", strength=1e-4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    example = next(iter(batches))[0][:2].to(device)
    budget = ng.Budget(args.budget, model, example, penalty, args.epochs, optimizer=optimizer)
    for epoch in range(args.epochs):
        model.train()
        total = 0.0
        for images, labels in batches:
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            (loss + penalty()).backward()
            optimizer.step()
            total += float(loss.detach())
        budget.step(epoch)
        print(f"epoch {epoch + 1:3}  loss {total / len(batches):.3f}  would leave {budget.left:.1%}")

    for name, values in gates.values().items():
        print(f"{name}: {int((values > 0).sum())} of {len(values)} open")
    plan = ng.plan(model, example)  # layout="scatter" for Swin, whose heads stay in the aligned layout
    print(plan)
    small = ng.compact(model, plan)
    print(ng.verify(model, small, example))
    ng.save(small, plan, args.out)  # back with ng.load(folder, builder of the full-size network)
    print(f"saved in {args.out}")


if __name__ == "__main__":
    main()
