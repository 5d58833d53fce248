"""Lightning: a callback narrows the network of a LightningModule to half of its parameters while it trains."""

import argparse
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import narrowgate as ng
from narrowgate.integrations.lightning import NarrowgateCallback, Settings


def build() -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in ((1, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class Digits(LightningModule):
    """An ordinary module but for the line that attaches gates."""

    def __init__(self, lr: float, epochs: int) -> None:
        super().__init__()
        self.model = build()
        ng.attach_gates_(self.model, placement="after-norm")
        self.lr, self.epochs = lr, epochs

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        images, labels = batch
        hits = (self.model(images).argmax(1) == labels).float()
        self.log("accuracy", hits.mean(), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="params: 50%", help="what is to be left, for example 'flops: 40%%'")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--resume", type=Path, help="a checkpoint of Lightning's to go on from")
    parser.add_argument("--out", type=Path, default=Path("small"), help="where the small network is saved")
    parser.add_argument("--smoke", action="store_true", help="a few epochs on a few images")
    args = parser.parse_args()
    if args.smoke:
        args.epochs = 4

    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.images[:, None] / 16).float(), torch.tensor(digits.target)
    count = 300 if args.smoke else 1500
    train = DataLoader(TensorDataset(images[:count], labels[:count]), 64, shuffle=True)
    test = DataLoader(TensorDataset(images[1500:], labels[1500:]), 297)

    narrow = NarrowgateCallback(Settings(kind="l1", budget=args.budget, every=2), example_inputs=images[:2])
    trainer = Trainer(
        max_epochs=args.epochs,
        callbacks=[narrow],
        accelerator="cpu",
        default_root_dir=args.out.parent,
        logger=False,
        enable_progress_bar=not args.smoke,
    )
    trainer.fit(Digits(args.lr, args.epochs), train, test, ckpt_path=args.resume)

    print(narrow.result)
    print(f"accuracy {float(trainer.callback_metrics['accuracy']):.1%}")
    narrow.result.save(args.out)
    again = ng.load(args.out, build)  # how to get it back
    print(f"saved in {args.out}: {sum(p.numel() for p in again.parameters()):,} parameters")


if __name__ == "__main__":
    main()
