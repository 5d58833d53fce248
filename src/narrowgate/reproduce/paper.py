"""The numbers of Mummadi et al. that its text and tables give; what is only drawn in its figures is not here."""

from __future__ import annotations

from dataclasses import dataclass

LENET = (20, 50, 800, 500)
"""LeNet-5-Caffe whole: channels of two convolutions, flattened features, neurons."""
EPOCHS = {"resnet164": 240, "densenet40": 130, "mobilenetv2": 240}
"""Of the CIFAR-100 runs."""
NETWORKS = {"mobilenetv2": "MobileNetV2", "densenet40": "DenseNet-40", "resnet164": "ResNet-164"}
WIDEST_INSENSITIVE = 1e-3
"""Figure 3: exponential gates give the same network at every threshold up to this one."""


@dataclass(frozen=True)
class Kind:
    """A way to prune: a regulariser on a sort of gate, with or without a schedule for sigma."""

    regulariser: str
    gate: str
    scheduled: bool = False

    def __str__(self) -> str:
        if self.gate == "none":
            return "no gates"
        return f"{self.regulariser} + {self.gate}{', scheduled' if self.scheduled else ''}"


BASELINE = Kind("none", "none")


@dataclass(frozen=True)
class LeNetRow:
    """A row of Table 1. ``recipe`` is empty for the rows that the paper cites from Louizos et al."""

    method: str
    regulariser: str
    strength: float
    kept: tuple[int, int, int, int]
    error: float
    recipe: str = ""
    epochs: int = 60


TABLE_1 = (
    LeNetRow("l0, Louizos et al.", "l0", 0.0, (20, 25, 45, 462), 0.9),
    LeNetRow("l0, Louizos et al.", "l0", 0.0, (9, 18, 65, 25), 1.0),
    LeNetRow("l2, 5e-4", "l2", 5e-4, (8, 19, 117, 24), 0.79, "mnist-lenet5-l2-exp-5e-4", 200),
    LeNetRow("l1, 1e-3", "l1", 1e-3, (8, 13, 37, 25), 0.98, "mnist-lenet5-l1-exp-1e-3"),
    LeNetRow("bounded-l1, 4e-3", "bounded-l1", 4e-3, (9, 17, 43, 25), 0.92, "mnist-lenet5-bounded-l1-exp-4e-3"),
    LeNetRow("bounded-l1, 3e-3", "bounded-l1", 3e-3, (9, 20, 54, 27), 0.67, "mnist-lenet5-bounded-l1-exp-3e-3"),
)


@dataclass(frozen=True)
class CifarRow:
    """A marker of Figure 2; without numbers where only the plot has them. Both numbers are percentages."""

    network: str
    kind: Kind
    recipe: str
    pruned: float | None = None
    accuracy: float | None = None


def _figure_2() -> tuple[CifarRow, ...]:
    known = {
        ("mobilenetv2", "l1-exp"): [("", 75.83, 75.33)],
        ("densenet40", "l1-exp-scheduled"): [("", 69.0, 74.42)],
        # Which strength belongs to which marker is not said; the weaker one prunes less.
        ("resnet164", "bounded-l1-exp"): [("-1e-4", 30.73, 77.28), ("-5e-4", 47.0, 76.58)],
        ("resnet164", "bounded-l1-exp-scheduled"): [("", 58.5, 76.23)],
    }
    kinds = {"baseline": BASELINE, "l2-exp": Kind("l2", "exp")}
    for gate in ("lin", "exp"):
        for regulariser in ("l1", "bounded-l1"):
            kinds[f"{regulariser}-{gate}"] = Kind(regulariser, gate)
            kinds[f"{regulariser}-{gate}-scheduled"] = Kind(regulariser, gate, True)
    rows = []
    for network in NETWORKS:
        for name, kind in kinds.items():
            stem = f"cifar100-{network}-{name}"
            points = known.get((network, name))
            if points is None:
                rows.append(CifarRow(network, kind, stem))
            else:
                rows += [CifarRow(network, kind, stem + end, pruned, accuracy) for end, pruned, accuracy in points]
    return tuple(rows)


FIGURE_2 = _figure_2()


@dataclass(frozen=True)
class ImageNetRow:
    """A row of Table 2, MobileNetV2 on ImageNet: percentages, and millions of parameters and of operations."""

    kind: Kind
    recipe: str
    top1: float
    top5: float
    parameters: float
    flops: float


TABLE_2 = (
    ImageNetRow(BASELINE, "imagenet-mobilenetv2-baseline", 70.1, 89.25, 3.56, 320.2),
    ImageNetRow(Kind("l1", "lin"), "imagenet-mobilenetv2-l1-lin", 69.54, 89.14, 3.37, 275.0),
    ImageNetRow(Kind("bounded-l1", "lin"), "imagenet-mobilenetv2-bounded-l1-lin", 69.9, 89.17, 3.40, 280.0),
    ImageNetRow(Kind("l2", "exp"), "imagenet-mobilenetv2-l2-exp", 70.7, 90.0, 3.56, 312.8),
    ImageNetRow(Kind("l1", "exp"), "imagenet-mobilenetv2-l1-exp", 69.9, 89.438, 3.00, 280.0),
)


@dataclass(frozen=True)
class ResNet50Row:
    """What the text says of a marker of Figure 4: sparsity in percent, and points of top-1 lost."""

    kind: Kind
    recipe: str
    strength: float | None = None
    sparsity: float | None = None
    top1_lost: float | None = None


# The text gives "39 % and 73 % sparsity ... at different regularization strengths", the caption names 5e-5 and 1e-4 for
# two markers: that they are the same two is likely, not said.
FIGURE_4 = (
    ResNet50Row(BASELINE, "imagenet-resnet50-baseline"),
    ResNet50Row(Kind("l2", "exp"), "imagenet-resnet50-l2-exp"),
    ResNet50Row(Kind("l1", "exp"), "imagenet-resnet50-l1-exp-1e-5", 1e-5),
    ResNet50Row(Kind("l1", "exp"), "imagenet-resnet50-l1-exp-5e-5", 5e-5, 39.0, 1.3),
    ResNet50Row(Kind("l1", "exp"), "imagenet-resnet50-l1-exp-1e-4", 1e-4, 73.0, 5.4),
    ResNet50Row(Kind("l1", "lin"), "imagenet-resnet50-l1-lin"),
)


def lenet_weights(kept: tuple[float, ...]) -> float:
    """Weights of a LeNet-5 of these widths, biases left out: the paper's network has none."""
    conv1, conv2, features, neurons = kept
    return 25 * conv1 + 25 * conv1 * conv2 + features * neurons + 10 * neurons
