"""Prune torchvision's ResNet-50 on an image folder to a size of your choice: gates, training, removal, check, save."""

import argparse
import tempfile
from pathlib import Path

import torch
import torchvision
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

import narrowgate as ng


def loaders(folder: Path, size: int, batch: int, workers: int) -> tuple[DataLoader, DataLoader]:
    """Batches of folder/train and folder/val, each of which has one folder a class."""
    normalise = [transforms.ToTensor(), transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    crop = [transforms.RandomResizedCrop(size, scale=(0.3, 1.0)), transforms.RandomHorizontalFlip()]
    centre = [transforms.Resize(size * 8 // 7), transforms.CenterCrop(size)]
    train = ImageFolder(folder / "train", transforms.Compose([*crop, *normalise]))
    val = ImageFolder(folder / "val", transforms.Compose([*centre, *normalise]))
    return (
        DataLoader(train, batch, shuffle=True, drop_last=True, num_workers=workers),
        DataLoader(val, batch, num_workers=workers),
    )


def write_smoke_images(folder: Path) -> None:
    """Two classes of small images: reddish and bluish."""
    for split in ("train", "val"):
        for name, colour in (("blue", (40, 40, 200)), ("red", (200, 40, 40))):
            (folder / split / name).mkdir(parents=True)
            for i in range(8):
                Image.new("RGB", (40, 40), tuple(c + 5 * i for c in colour)).save(folder / split / name / f"{i}.png")


@torch.no_grad()
def accuracy(model: nn.Module, batches: DataLoader, device: str) -> float:
    model.eval()
    hits = [(model(images.to(device)).argmax(1) == labels.to(device)).float() for images, labels in batches]
    return float(torch.cat(hits).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="a folder with train/ and val/, each with one folder a class")
    parser.add_argument("--budget", default="params: 50%", help="what is to be left, for example 'flops: 40%%'")
    parser.add_argument(
        "--pretrained", action="store_true", help="start from ImageNet weights (torchvision fetches them)"
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--size", type=int, default=224, help="of the images")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("small"), help="where the small network is saved")
    parser.add_argument("--smoke", action="store_true", help="a few epochs of a short ResNet on generated images")
    args = parser.parse_args()
    if args.smoke:
        args.data, args.epochs, args.batch, args.size, args.workers = Path(tempfile.mkdtemp()), 3, 8, 32, 0
        write_smoke_images(args.data)
    if args.data is None or not (args.data / "train").is_dir():
        parser.exit(2, "Give --data FOLDER, with train/CLASS/*.jpg and val/CLASS/*.jpg in it, or try --smoke.\n")

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    train, val = loaders(args.data, args.size, args.batch, args.workers)
    if args.smoke:
        model = torchvision.models.ResNet(torchvision.models.resnet.Bottleneck, [1, 1, 1, 1])
    else:
        model = torchvision.models.resnet50(weights="DEFAULT" if args.pretrained else None)
    model.fc = nn.Linear(model.fc.in_features, len(train.dataset.classes))
    model.to(device)

    gates = ng.attach_gates_(model, placement="after-norm", keep_function=True)  # it computes what it did
    penalty = ng.Penalty(gates, "l1", strength=1e-4)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(train))
    example = next(iter(val))[0][:2].to(device)
    budget = ng.Budget(args.budget, model, example, penalty, args.epochs, optimizer=optimizer)
    for epoch in range(args.epochs):
        model.train()
        for images, labels in train:
            loss = F.cross_entropy(model(images.to(device)), labels.to(device)) + penalty()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        budget.step(epoch)
        print(f"epoch {epoch + 1:3}  accuracy {accuracy(model, val, device):.1%}  would leave {budget.left:.1%}")

    plan = ng.plan(model, example)
    small = ng.compact(model, plan)
    print(ng.verify(model, small, example))
    sizes = f"{plan.parameters_before:,} -> {plan.parameters_after:,} parameters"
    print(f"{sizes}, accuracy {accuracy(small, val, device):.1%}")
    ng.save(small, plan, args.out)  # back with ng.load(folder, builder of the full-size network)
    print(f"saved in {args.out}")


if __name__ == "__main__":
    main()
