"""Tiny transformers and residual networks, built from their libraries' own classes."""

import pytest
import timm
import torch
import torchvision
from torch import nn

import narrowgate as ng
from narrowgate.models import MobileNetV2, PreActResNet

WIDTH, HEADS, MLP = 24, 4, 36


def vit(**options):
    return timm.create_model(
        "vit_tiny_patch16_224",
        **{"img_size": 16, "patch_size": 8, "depth": 2, "embed_dim": WIDTH, "num_heads": HEADS, "num_classes": 3}
        | {"mlp_ratio": MLP / WIDTH}
        | options,
    )


def deit():
    return timm.create_model(
        "deit_tiny_distilled_patch16_224",
        img_size=16,
        patch_size=8,
        depth=2,
        embed_dim=WIDTH,
        num_heads=HEADS,
        num_classes=3,
        mlp_ratio=MLP / WIDTH,
    )


def swin(version=""):
    return timm.create_model(
        "swinv2_tiny_window8_256" if version else "swin_tiny_patch4_window7_224",
        img_size=16,
        window_size=2,
        depths=(2,),
        num_heads=(HEADS,),
        embed_dim=WIDTH,
        num_classes=3,
    )


def torchvision_vit():
    model = torchvision.models.VisionTransformer(
        image_size=16, patch_size=8, num_layers=2, num_heads=HEADS, hidden_dim=WIDTH, mlp_dim=MLP, num_classes=3
    )
    nn.init.normal_(model.heads.head.weight)
    return model


def bert():
    transformers = pytest.importorskip("transformers", reason="BERT is built by transformers, which is not installed")
    options = {"vocab_size": 20, "num_hidden_layers": 2, "max_position_embeddings": 16}
    return transformers.BertModel(
        transformers.BertConfig(
            hidden_size=WIDTH, num_attention_heads=HEADS, intermediate_size=MLP, initializer_range=0.3, **options
        )
    )


def gpt2():
    transformers = pytest.importorskip("transformers", reason="GPT-2 is built by transformers, which is not installed")
    options = {"vocab_size": 20, "n_layer": 2, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2Model(
        transformers.GPT2Config(n_embd=WIDTH, n_head=HEADS, n_inner=MLP, use_cache=False, **options)
    )


TRANSFORMERS = {
    "vit": (vit, "pixels"),
    "deit": (deit, "pixels"),
    "swin": (swin, "pixels"),
    "torchvision-vit": (torchvision_vit, "pixels"),
    "bert": (bert, "words"),
    "gpt2": (gpt2, "words"),
}

RESIDUAL = {
    "vit": lambda: vit(init_values=0.5),
    "swin": swin,
    "swin-v2": lambda: swin("v2"),
    "torchvision-vit": torchvision_vit,
    "gpt2": gpt2,
    "timm-basic": lambda: timm.create_model("resnet10t", num_classes=3),
    "timm-bottleneck": lambda: timm.create_model("resnet26", num_classes=3),
    "torchvision-basic": lambda: torchvision.models.resnet18(num_classes=3),
    "torchvision-bottleneck": lambda: torchvision.models.resnet50(num_classes=3),
    "torchvision-inverted": lambda: torchvision.models.mobilenet_v2(num_classes=3),
    "preactivation": lambda: PreActResNet(20, 3),
    "inverted": lambda: MobileNetV2(3),
}


def example(kind, dtype=torch.float64):
    if kind == "words":
        return torch.randint(20, (3, 5))
    return torch.randn(3, 3, 16, 16, dtype=dtype)


def gated(name, groups, dtype=torch.float64, **options):
    """A model of TRANSFORMERS with open gates of various values, in eval mode, its gates, and inputs."""
    build, kind = TRANSFORMERS[name]
    torch.manual_seed(0)
    model = build().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():  # biases of zero would hide a bias that is left
            parameter.add_(torch.randn_like(parameter) * 0.05)
    gates = ng.attach_gates_(model.eval(), groups=groups, **options)
    with torch.no_grad():
        for g in gates.parameters():
            g.uniform_(0.5, 1.5)
    return model, gates, example(kind, dtype)


@torch.no_grad()
def output(model, x):
    result = model(x)
    return result if isinstance(result, torch.Tensor) else result.last_hidden_state
