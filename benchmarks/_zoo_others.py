"""Models of libraries that nobody here wrote or depends on: detectors, U-Nets in 2D and 3D, transformers, diffusion.

    pip install ultralytics segmentation-models-pytorch monai diffusers vit-pytorch pytorchcv open_clip_torch

All are built with random weights; nothing is downloaded. What is not installed is left out, and said.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Build = Callable[[], nn.Module]
Shape = tuple[int, ...]

PACKAGES = {  # import name: name to install
    "ultralytics": "ultralytics",
    "segmentation_models_pytorch": "segmentation-models-pytorch",
    "monai": "monai",
    "diffusers": "diffusers",
    "vit_pytorch": "vit-pytorch",
    "pytorchcv": "pytorchcv",
    "open_clip": "open_clip_torch",
}

_YOLO = """
yolov3-tiny yolov5n yolov6n yolov8n yolov8n-cls yolov8n-seg yolov8n-pose yolov8n-obb yolov8n-ghost yolov8n-p6
yolov9t yolov9c yolov10n yolo11n yolo11n-cls yolo11n-seg yolo11n-pose yolo12n yolo26n
"""

_UNETS = "unet unetplusplus manet linknet fpn pspnet deeplabv3 deeplabv3plus pan upernet segformer"
_ENCODERS = """
mobilenet_v2 efficientnet-b0 timm-regnetx_002 densenet121 se_resnet50 mit_b0 dpn68 vgg11_bn timm-res2net50_26w_4s
tu-convnext_atto
"""

_PYTORCHCV = """
resnet18 preresnet18 resneta10 sepreresnet18 ibn_resnet50 airnet50_1x64d_r2 bam_resnet18 cbam_resnet18 resattnet56
sknet50 seresnext50_32x4d diracnet18v2 wrn20_10_1bit_cifar10 dpn68 darknet_ref darknet53 bagnet9
dla34 fishnet99 espnetv2_wd2 hrnet_w18_small_v1 vovnet27s selecsls42 hardnet39ds peleenet fractalnet_cifar10
squeezenet_v1_0 squeezeresnet_v1_0 sqnxt23_w1 shufflenet_g1_wd4 shufflenetv2_wd2 menet108_8x1_g3 mobilenet_wd4
fdmobilenet_wd4 mobilenetv2_wd4 igcv3_wd4 mobilenetv3_small_w7d20 mnasnet_b1 darts proxylessnas_cpu fbnet_cb spnasnet
efficientnet_b0 mixnet_s resnext20_16x4d_cifar10 pyramidnet110_a48_cifar10 resdropresnet20_cifar10
shakeshakeresnet20_2x16d_cifar10 xdensenet40_2_k24_bc_cifar10 nin_cifar10 bninception xception inceptionv3
inceptionresnetv2 dabnet_cityscapes cgnet_cityscapes edanet_cityscapes esnet_cityscapes fpenet_cityscapes
lednet_cityscapes linknet_cityscapes sinet_cityscapes
lwopenpose2d_mobilenet_cmupan_coco alphapose_fastseresnet101b_coco simplepose_resnet18_coco lffd20x5s320v2_widerface
centernet_resnet18_voc octresnet10_ad2 resnetbc26b
"""
_WANTS_299 = ("xception", "inceptionv3", "inceptionresnetv2")
_SCENES = ("cityscapes", "coco", "voc", "widerface")

_TOKENS = {"image_size": 64, "num_classes": 10, "dim": 48, "depth": 2, "heads": 4, "mlp_dim": 96}
_PATCHES = {**_TOKENS, "patch_size": 16}
_VIT: list[tuple[str, str, dict[str, Any]]] = [
    ("vit", "ViT", _PATCHES),
    ("simple_vit", "SimpleViT", _PATCHES),
    ("simple_vit_with_register_tokens", "SimpleViT", _PATCHES),
    ("simple_vit_with_qk_norm", "SimpleViT", _PATCHES),
    ("simple_flash_attn_vit", "SimpleViT", _PATCHES),
    ("simple_vit_with_fft", "SimpleViT", {**_PATCHES, "freq_patch_size": 8}),
    ("normalized_vit", "nViT", _PATCHES),
    ("cait", "CaiT", {**_PATCHES, "cls_depth": 1}),
    ("deepvit", "DeepViT", _PATCHES),
    ("parallel_vit", "ViT", _PATCHES),
    ("vit_for_small_dataset", "ViT", _PATCHES),
    ("learnable_memory_vit", "ViT", _PATCHES),
    ("rvt", "RvT", _PATCHES),
    ("xcit", "XCiT", {**_PATCHES, "cls_depth": 1, "local_patch_kernel_size": 3}),
    ("jumbo_vit", "JumboViT", {**_PATCHES, "num_jumbo_cls": 1, "jumbo_cls_k": 2, "jumbo_ff_mult": 2}),
    ("t2t", "T2TViT", {**_TOKENS, "t2t_layers": ((7, 4), (3, 2), (3, 2))}),
    (
        "cct",
        "CCT",
        {"img_size": 64, "embedding_dim": 48, "n_conv_layers": 2, "kernel_size": 7, "stride": 2, "padding": 3}
        | {"pooling_kernel_size": 3, "pooling_stride": 2, "pooling_padding": 1, "num_layers": 2, "num_heads": 4}
        | {"mlp_ratio": 2.0, "num_classes": 10, "positional_embedding": "learnable"},
    ),
    ("pit", "PiT", {**_TOKENS, "patch_size": 8, "dim": 32, "depth": (1, 1, 1), "mlp_dim": 64}),
    (
        "levit",
        "LeViT",
        {"image_size": 64, "num_classes": 10, "stages": 2, "dim": (32, 48), "depth": 1, "heads": (2, 4), "mlp_mult": 2},
    ),
    ("cvt", "CvT", {"num_classes": 10, "s1_emb_dim": 16, "s2_emb_dim": 32, "s3_emb_dim": 48, "s3_depth": 1}),
    (
        "regionvit",
        "RegionViT",
        {"dim": (16, 32, 48, 64), "depth": (1, 1, 1, 1), "window_size": 4, "num_classes": 10}
        | {"tokenize_local_3_conv": False, "use_peg": False},
    ),
    (
        "max_vit",
        "MaxViT",
        {"num_classes": 10, "dim_conv_stem": 16, "dim": 16, "dim_head": 8, "depth": (1, 1), "window_size": 4}
        | {"mbconv_expansion_rate": 2},
    ),
    (
        "nest",
        "NesT",
        {"image_size": 64, "patch_size": 4, "dim": 24, "heads": 3, "num_hierarchies": 3}
        | {"block_repeats": (1, 1, 1), "num_classes": 10},
    ),
    (
        "mobile_vit",
        "MobileViT",
        {"image_size": (64, 64), "dims": [24, 32, 40], "num_classes": 10}
        | {"channels": [8, 8, 12, 12, 16, 16, 24, 24, 32, 32, 48]},
    ),
]

_IN_OUT = {"in_channels": 1, "out_channels": 2}
_STEPS = {"channels": (8, 16, 32), "strides": (2, 2)}
_MONAI: list[tuple[str, str, Shape, dict[str, Any]]] = [
    ("UNet-2d", "UNet", (1, 32, 32), {"spatial_dims": 2, **_IN_OUT, **_STEPS, "num_res_units": 2}),
    ("UNet-3d", "UNet", (1, 16, 16, 16), {"spatial_dims": 3, **_IN_OUT, **_STEPS, "num_res_units": 2}),
    (
        "BasicUNet",
        "BasicUNet",
        (1, 32, 32, 32),
        {"spatial_dims": 3, **_IN_OUT, "features": (8, 8, 16, 32, 64, 8)},
    ),
    (
        "BasicUNetPlusPlus",
        "BasicUNetPlusPlus",
        (1, 32, 32),
        {"spatial_dims": 2, **_IN_OUT, "features": (8, 8, 16, 32, 64, 8)},
    ),
    (
        "DynUNet",
        "DynUNet",
        (1, 16, 16, 16),
        {"spatial_dims": 3, **_IN_OUT, "kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2]}
        | {"filters": [8, 16, 32], "res_block": True},
    ),
    ("SegResNet-3d", "SegResNet", (1, 16, 16, 16), {"spatial_dims": 3, **_IN_OUT, "init_filters": 8}),
    (
        "SegResNet-2d",
        "SegResNet",
        (1, 32, 32),
        {"spatial_dims": 2, **_IN_OUT, "init_filters": 8, "upsample_mode": "deconv"},
    ),
    ("SwinUNETR", "SwinUNETR", (1, 64, 32, 32), {"spatial_dims": 3, **_IN_OUT, "feature_size": 12}),
    (
        "UNETR",
        "UNETR",
        (1, 32, 32, 32),
        {**_IN_OUT, "img_size": (32, 32, 32), "feature_size": 8, "hidden_size": 48, "mlp_dim": 96, "num_heads": 4},
    ),
    ("VNet", "VNet", (1, 16, 16, 16), {"spatial_dims": 3, **_IN_OUT}),
    ("AttentionUnet", "AttentionUnet", (1, 32, 32), {"spatial_dims": 2, **_IN_OUT, **_STEPS}),
    ("DenseNet121-3d", "DenseNet121", (1, 32, 32, 32), {"spatial_dims": 3, **_IN_OUT}),
    ("HighResNet", "HighResNet", (1, 32, 32), {"spatial_dims": 2, **_IN_OUT}),
    ("SEResNet50", "SEResNet50", (3, 64, 64), {"spatial_dims": 2, "in_channels": 3, "num_classes": 2}),
    ("RegUNet", "RegUNet", (2, 32, 32), {"spatial_dims": 2, "in_channels": 2, "num_channel_initial": 8, "depth": 2}
     | {"out_channels": 2}),
    ("EfficientNetBN", "EfficientNetBN", (3, 64, 64), {"model_name": "efficientnet-b0", "pretrained": False}
     | {"spatial_dims": 2}),
]  # fmt: skip


class _Called(nn.Module):
    """A model that is called in a way of its own, for one tensor."""

    def __init__(self, model: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.model, x)


def models() -> dict[str, dict[str, tuple[Build, Shape]]]:
    """By package and name: what builds a model, and what one of its inputs is like."""
    found: dict[str, dict[str, tuple[Build, Shape]]] = {package: {} for package in PACKAGES}
    for name in _YOLO.split():
        found["ultralytics"][name] = (_yolo(name), (3, 256, 256) if name.endswith("p6") else (3, 128, 128))
    for kind in _UNETS.split():
        found["segmentation_models_pytorch"][f"{kind}-resnet18"] = (_unet(kind, "resnet18"), (3, 128, 128))
    for encoder in _ENCODERS.split():
        found["segmentation_models_pytorch"][f"unet-{encoder}"] = (_unet("unet", encoder), (3, 64, 64))
    scse = _unet("unet", "resnet18", decoder_attention_type="scse")
    found["segmentation_models_pytorch"]["unet-resnet18-scse"] = (scse, (3, 64, 64))
    for name, kind, shape, options in _MONAI:
        found["monai"][name] = (_made("monai.networks.nets", kind, options), shape)
    for name, build, shape in _DIFFUSERS:
        found["diffusers"][name] = (build, shape)
    for module, kind, options in _VIT:
        found["vit_pytorch"][module] = (_made(f"vit_pytorch.{module}", kind, options), (3, 64, 64))
    for name in _PYTORCHCV.split():
        found["pytorchcv"][name] = (_of_pytorchcv(name), (3, *[_pixels(name)] * 2))
    for name in ("RN50", "ViT-S-32"):
        found["open_clip"][name] = (_clip(name), (3, 224, 224))
    return found


def _pixels(name: str) -> int:
    if name.endswith("cifar10"):
        return 32
    if name in _WANTS_299:
        return 299
    return 256 if any(scene in name for scene in _SCENES) else 224


def installed() -> dict[str, str]:
    """The packages that are there, and their versions."""
    found = {}
    for package, name in PACKAGES.items():
        try:
            found[package] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            print(f"left out: {package}, which is not installed: pip install {name}")
    return found


def build(package: str, name: str) -> tuple[nn.Module, Shape]:
    """A model with random weights, all of them trainable, and what one of its inputs is like."""
    os.environ["YOLO_OFFLINE"] = os.environ["HF_HUB_OFFLINE"] = "1"
    make, shape = models()[package][name]
    model = make()
    return model.requires_grad_(), shape


def _made(module: str, kind: str, options: dict[str, Any]) -> Build:
    return lambda: getattr(importlib.import_module(module), kind)(**options)


def _yolo(name: str) -> Build:
    def build() -> nn.Module:
        from ultralytics import YOLO

        model: nn.Module = YOLO(f"{name}.yaml").model
        return model

    return build


def _unet(kind: str, encoder: str, **options: Any) -> Build:
    def build() -> nn.Module:
        import segmentation_models_pytorch as segmentation

        model: nn.Module = segmentation.create_model(kind, encoder, encoder_weights=None, classes=3, **options)
        return model

    return build


def _of_pytorchcv(name: str) -> Build:
    def build() -> nn.Module:
        from pytorchcv.model_provider import get_model

        model: nn.Module = get_model(name)
        return model

    return build


def _clip(name: str) -> Build:
    def build() -> nn.Module:
        import open_clip

        model: nn.Module = open_clip.create_model(name, pretrained=None).visual
        return model

    return build


def _diffusion(kind: str, call: Callable[[Any, Tensor], Tensor], **options: Any) -> Build:
    def build() -> nn.Module:
        import diffusers

        return _Called(getattr(diffusers, kind)(**options), call)

    return build


def _steps(x: Tensor) -> Tensor:
    return torch.full((len(x),), 3)


_BLOCKS = {"sample_size": 16, "layers_per_block": 1, "block_out_channels": (32, 64), "norm_num_groups": 8}
_CODER = {"in_channels": 3, "out_channels": 3, "block_out_channels": (16, 32), "norm_num_groups": 8} | {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "latent_channels": 4,
}
_DIFFUSERS: list[tuple[str, Build, Shape]] = [
    (
        "UNet2DModel",
        _diffusion(
            "UNet2DModel",
            lambda model, x: model(x, _steps(x)).sample,
            **_BLOCKS,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        ),
        (3, 16, 16),
    ),
    (
        "UNet2DConditionModel",
        _diffusion(
            "UNet2DConditionModel",
            lambda model, x: model(x[:, :4], _steps(x), x[:, 4:, :4].reshape(len(x), -1, 16)).sample,
            **_BLOCKS,
            in_channels=4,
            out_channels=4,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=16,
            attention_head_dim=8,
        ),
        (8, 16, 16),
    ),
    (
        "AutoencoderKL",
        _diffusion("AutoencoderKL", lambda model, x: model.decode(model.encode(x).latent_dist.mode()).sample, **_CODER),
        (3, 16, 16),
    ),
    (
        "VQModel",
        _diffusion("VQModel", lambda model, x: model.encode(x).latents, **_CODER, num_vq_embeddings=8),
        (3, 16, 16),
    ),
    (
        "DiTTransformer2DModel",
        _diffusion(
            "DiTTransformer2DModel",
            lambda model, x: model(x, _steps(x), torch.ones(len(x), dtype=torch.long)).sample,
            num_attention_heads=4,
            attention_head_dim=8,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            sample_size=8,
            num_embeds_ada_norm=10,
        ),
        (4, 8, 8),
    ),
]
