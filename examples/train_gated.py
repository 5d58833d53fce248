"""Train LeNet-5 on MNIST, or any .npz file of the same four arrays: train_plain.py has no gates, train_gated.py has."""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

import narrowgate as ng
from narrowgate.models import LeNet5

NO_DATA = """Give the data with --data FILE.npz: any file with the arrays x_train (N, 28, 28) uint8, y_train, x_test
and y_test will do. torchvision can make one of MNIST:

    import numpy as np
    from torchvision.datasets import MNIST
    train, test = MNIST("data", train=True, download=True), MNIST("data", train=False)
    np.savez("mnist.npz", x_train=train.data, y_train=train.targets, x_test=test.data, y_test=test.targets)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="a .npz file with x_train, y_train, x_test and y_test")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.data is None or not args.data.is_file():
        parser.exit(2, NO_DATA if args.data is None else f"There is no file {args.data}. {NO_DATA}")

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    with np.load(args.data) as file:
        x_train, x_test = (torch.from_numpy(file[key]).to(device)[:, None] / 255 for key in ("x_train", "x_test"))
        y_train, y_test = (torch.from_numpy(file[key]).to(device).long() for key in ("y_train", "y_test"))

    model = LeNet5().to(device)
    gates = ng.attach_gates_(model)
    penalty = ng.Penalty(gates, "bounded-l1", strength=3e-3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    drops = [max(1, args.epochs // 2), max(1, args.epochs * 3 // 4)]
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, drops, gamma=0.1)
    for epoch in range(args.epochs):
        model.train()
        for batch in torch.randperm(len(y_train), device=device).split(128):
            loss = F.cross_entropy(model(x_train[batch]), y_train[batch]) + penalty()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        model.eval()
        with torch.no_grad():
            guesses = torch.cat([model(x).argmax(1) for x in x_test.split(1000)])
        print(f"epoch {epoch + 1:3}  error {(guesses != y_test).float().mean():.2%}")
    print("left:", {name: int((value > 0).sum()) for name, value in gates.values().items()})


if __name__ == "__main__":
    main()
