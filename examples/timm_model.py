"""Narrow any timm model by its name, on an image folder: gates, training towards a size, removal, check, save."""

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="resnet18", help="any name that timm.list_models() gives")
    parser.add_argument("--data", type=Path, help="a folder with one folder a class")
    parser.add_argument("--pretrained", action="store_true", help="start from timm's weights (timm fetches them)")
    parser.add_argument("--budget", default="params: 50%", help="what is to be left, for example 'flops: 40%%'")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("small"), help="where the small network is saved")
    parser.add_argument("--smoke", action="store_true", help="some epochs on 32 generated images")
    args = parser.parse_args()
    if args.smoke:
        args.epochs, args.batch, args.workers = 6, 8, 0
    elif args.data is None or not args.data.is_dir():
        parser.exit(2, "Give --data FOLDER, with CLASS/*.jpg in it, or try --smoke.\n")

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    data = smoke_data() if args.smoke else ImageFolder(args.data)
    classes = 2 if args.smoke else len(data.classes)
    model = timm.create_model(args.model, pretrained=args.pretrained, num_classes=classes).to(device)
    if not args.smoke:
        data.transform = create_transform(**resolve_data_config({}, model=model), is_training=True)
    batches = DataLoader(data, args.batch, shuffle=True, drop_last=True, num_workers=args.workers)

    gates = ng.attach_gates_(model, placement="after-norm", keep_function=True)
    print(f"{gates.count} gates on {len(gates)} layers of {args.model}")
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

    plan = ng.plan(model, example)
    print(plan)
    small = ng.compact(model, plan)
    print(ng.verify(model, small, example))
    ng.save(small, plan, args.out)  # back with ng.load(folder, builder of the full-size network)
    print(f"saved in {args.out}")


if __name__ == "__main__":
    main()
