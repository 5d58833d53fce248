"""The tables of a recipe: a frozen dataclass each, a field a key, checked when made; docs and errors come from here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from narrowgate.train.recipe.gating import GatesPart, MethodPart, PenaltyPart
from narrowgate.train.recipe.part import Part, key
from narrowgate.train.recipe.values import Flag, Many, Number, Table, Target, Text


@dataclass(frozen=True)
class ModelPart(Part):
    TABLE = "model"
    MEANING = "which network"
    name: str = field(
        metadata=key(Text(filled=True), "a name that `narrowgate.models` knows, `torchvision/NAME` or `timm/NAME`")
    )
    options: Mapping[str, object] = field(
        default_factory=dict, metadata=key(Table(), "arguments for the network's builder")
    )


@dataclass(frozen=True)
class DataPart(Part):
    TABLE = "data"
    MEANING = "what it learns from"
    source: str = field(
        metadata=key(
            Text(("npz", "mnist", "cifar10", "cifar100", "folder", "digits")),
            "an array file, a data set as torchvision stores it, image folders, or scikit-learn's digits (no file)",
        )
    )
    path: str = field(default="", metadata=key(Text(), "where the data lies, unless `--data` says it"))
    augment: str = field(
        default="none",
        metadata=key(
            Text(("none", "crop-flip", "shift", "warp", "imagenet")),
            "training images: as they are; moved by up to 4 pixels and flipped; moved by up to 2 pixels (digits); "
            "that, turned by up to 10 degrees and resized by up to a tenth; or resized crops and flips (for `folder`)",
        ),
    )
    validation: int = field(
        default=0,
        metadata=key(Number(0, whole=True), "training images held out; if above 0, these are evaluated during the run"),
    )
    size: int = field(
        default=0, metadata=key(Number(0, whole=True), "height and width of images from `folder`; 0 means 224")
    )
    workers: int = field(default=4, metadata=key(Number(0, whole=True), "processes that read images from `folder`"))


@dataclass(frozen=True)
class OptimizerPart(Part):
    TABLE = "optimizer"
    MEANING = "how weights move"
    kind: str = field(default="sgd", metadata=key(Text(("sgd", "adamw")), "the optimizer"))
    lr: float = field(default=0.1, metadata=key(Number(above=0), "the learning rate at the start, after any warm-up"))
    momentum: float = field(default=0.9, metadata=key(Number(0, below=1), "the momentum of `sgd`"))
    nesterov: bool = field(default=False, metadata=key(Flag(), "Nesterov's form of momentum, for `sgd`"))
    weight_decay: float = field(default=0.0, metadata=key(Number(0), "weight decay of all parameters"))


@dataclass(frozen=True)
class LrPart(Part):
    TABLE = "lr"
    MEANING = "how the learning rate changes"
    schedule: str = field(
        default="step",
        metadata=key(
            Text(("step", "cosine", "constant")), "drops at given epochs, a cosine to 0 at the end, or no change"
        ),
    )
    drops: tuple[int, ...] = field(
        default=(),
        metadata=key(Many(Number(1, whole=True)), "for `step`: epochs, from 0, that are the first at a lower rate"),
    )
    factor: float = field(
        default=0.1, metadata=key(Number(above=0, high=1), "for `step`: what each drop multiplies the rate by")
    )
    warmup: float = field(
        default=0.0, metadata=key(Number(0), "epochs over which the rate rises from 0 in a straight line")
    )


@dataclass(frozen=True)
class TrainPart(Part):
    TABLE = "train"
    MEANING = "how long and how"
    epochs: int = field(metadata=key(Number(1, whole=True), "passes over the training images"))
    batch: int = field(default=128, metadata=key(Number(1, whole=True), "images a step, in each process"))
    precision: str = field(
        default="32",
        metadata=key(Text(("32", "bf16")), "single precision, or bfloat16 where PyTorch's autocast has it"),
    )
    seed: int = field(
        default=0, metadata=key(Number(0, below=2**63, whole=True), "decides weights, order and augmentation")
    )
    label_smoothing: float = field(
        default=0.0, metadata=key(Number(0, below=1), "share of the target spread over all classes")
    )
    evaluate_every: int = field(default=1, metadata=key(Number(1, whole=True), "epochs between evaluations"))
    graph: str = field(
        default="auto", metadata=key(Text(("auto", "off")), "whole steps as CUDA graphs where that works, or never")
    )
    compile: bool = field(default=False, metadata=key(Flag(), "run the model through `torch.compile`"))
    deterministic: bool = field(
        default=False, metadata=key(Flag(), "only operations that give the same bits every time")
    )


@dataclass(frozen=True)
class TeacherPart(Part):
    TABLE = "teacher"
    MEANING = "a trained network to learn from as well"
    run: str = field(
        default="",
        metadata=key(
            Text(), "the folder of a finished run whose network's answers are learned beside the labels; empty: none"
        ),
    )
    share: float = field(
        default=0.9, metadata=key(Number(above=0, high=1), "its answers' share of the loss; the labels have the rest")
    )
    temperature: float = field(
        default=4.0, metadata=key(Number(above=0), "what the logits of both are divided by before they are compared")
    )


@dataclass(frozen=True)
class ShrinkPart(Part):
    TABLE = "shrink"
    MEANING = "when dead channels go"
    when: str = field(
        default="end", metadata=key(Text(("end", "during", "off")), "after training, during it as well, or never")
    )
    every: int = field(default=5, metadata=key(Number(1, whole=True), "for `during`: epochs between looks"))
    share: float = field(
        default=0.05,
        metadata=key(
            Number(0, high=1), "for `during`: cut once this share of the gates left has closed since the last cut"
        ),
    )
    layout: str = field(
        default="aligned", metadata=key(Text(("aligned", "scatter", "auto")), "the layout of the final model")
    )
    constants: str = field(
        default="exact",
        metadata=key(Text(("exact", "fold", "drop")), "what becomes of dead channels that are constants other than 0"),
    )
    round_to: int = field(default=1, metadata=key(Number(1, whole=True), "keep widths at multiples of this"))
    batch: int = field(
        default=0,
        metadata=key(
            Number(0, whole=True),
            "for `during`: after a cut, take as many images a step as the full network had multiply-adds for, "
            "up to this; 0: batches stay as they are",
        ),
    )


@dataclass(frozen=True)
class BudgetPart(Part):
    TABLE = "budget"
    MEANING = "how small to end, instead of a strength"
    target: str = field(
        default="",
        metadata=key(
            Target(), "the share of the ungated network's parameters or multiply-adds left at the end; empty: no budget"
        ),
    )
    arrive: float = field(
        default=0.7,
        metadata=key(
            Number(above=0, high=1), "when the target is met, as a share of the epochs; the rest trains at that size"
        ),
    )
    steer: bool = field(
        default=True,
        metadata=key(
            Flag(),
            "move the strength so that the target is met in time; `false`: `penalty.strength` stays as it is until "
            "the target is met, by `arrive` at the latest",
        ),
    )


@dataclass(frozen=True)
class FinishPart(Part):
    TABLE = "finish"
    MEANING = "what happens after training"
    threshold: float | None = field(
        default=None,
        metadata=key(
            Number(0, optional=True), "close gates below this value; `none`: 1e-4 for linear gates, 0 for others"
        ),
    )
    close: float = field(
        default=0.0,
        metadata=key(
            Number(0, below=1),
            "close the smallest gates until this share of all is closed; each layer keeps its largest",
        ),
    )
    per_layer: bool = field(default=False, metadata=key(Flag(), "that share of each layer's gates instead of all"))
    finetune_epochs: int = field(
        default=0, metadata=key(Number(0, whole=True), "epochs of fine-tuning after removal; the paper: at most 3")
    )
    finetune_lr: float = field(default=0.001, metadata=key(Number(above=0), "the learning rate of fine-tuning"))


@dataclass(frozen=True)
class CheckpointPart(Part):
    TABLE = "checkpoint"
    MEANING = "what a killed run can go on from"
    every: int = field(default=1, metadata=key(Number(1, whole=True), "epochs between checkpoints"))
    keep: int = field(default=2, metadata=key(Number(1, whole=True), "how many of the latest to keep"))
    best: bool = field(default=True, metadata=key(Flag(), "keep the one with the best accuracy too"))


PARTS: tuple[type[Part], ...] = (
    ModelPart,
    DataPart,
    MethodPart,
    GatesPart,
    PenaltyPart,
    OptimizerPart,
    LrPart,
    TrainPart,
    TeacherPart,
    ShrinkPart,
    BudgetPart,
    FinishPart,
    CheckpointPart,
)
