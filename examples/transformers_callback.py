"""Hugging Face: a callback narrows a ResNet of transformers to half of its parameters while a Trainer trains it."""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from transformers import ResNetConfig, ResNetForImageClassification, Trainer, TrainingArguments
from transformers.trainer_utils import EvalPrediction

import narrowgate as ng
from narrowgate.integrations.transformers import NarrowgateCallback, Settings


def build() -> ResNetForImageClassification:
    config = ResNetConfig(
        num_channels=1, embedding_size=32, hidden_sizes=[32, 64], depths=[1, 1], num_labels=10, layer_type="basic"
    )
    return ResNetForImageClassification(config)


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="params: 50%", help="what is to be left, for example 'flops: 40%%'")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where the Trainer keeps its checkpoints")
    parser.add_argument("--resume", type=Path, help="one of them to go on from")
    parser.add_argument("--out", type=Path, default=Path("small"), help="where the small network is saved")
    parser.add_argument("--smoke", action="store_true", help="a few epochs on a few images")
    args = parser.parse_args()
    if args.smoke:
        args.epochs = 4

    digits = load_digits()
    images = torch.tensor(digits.images[:, None] / 16).float().repeat_interleave(4, 2).repeat_interleave(4, 3)
    data = [{"pixel_values": x, "labels": int(y)} for x, y in zip(images, digits.target, strict=True)]

    torch.manual_seed(0)
    model = build()
    ng.attach_gates_(model, placement="after-norm")  # before the Trainer, which makes the optimizer
    narrow = NarrowgateCallback(Settings(kind="l1", budget=args.budget, every=2), {"pixel_values": images[:2]})
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(args.runs),
            num_train_epochs=args.epochs,
            learning_rate=args.lr,
            per_device_train_batch_size=64,
            logging_strategy="epoch",
            save_strategy="epoch",
            report_to=[],
            use_cpu=True,
            dataloader_pin_memory=False,
            disable_tqdm=True,
        ),
        train_dataset=data[: 300 if args.smoke else 1500],
        eval_dataset=data[1500:],
        compute_metrics=accuracy,
        callbacks=[narrow],
    )
    if args.resume:
        narrow.resume_(trainer, args.resume)  # cuts the fresh model, so that the weights fit
    trainer.train(resume_from_checkpoint=str(args.resume) if args.resume else None)

    print(narrow.result)
    print(f"accuracy {trainer.evaluate()['eval_accuracy']:.1%}")
    narrow.result.save(args.out)
    again = ng.load(args.out, build)  # how to get it back
    print(f"saved in {args.out}: {sum(p.numel() for p in again.parameters()):,} parameters")


if __name__ == "__main__":
    main()
