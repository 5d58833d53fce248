"""Models nobody here wrote: all of torchvision's classifiers, its segmentation and detection models, varied timm ones.

``name@pixels`` says at which image size a model runs; without it, the size it was made for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from _zoo_others import PACKAGES, build, models
from torch import Tensor, nn

# Sizes of torchvision models that do not run at 96 pixels: windows, fixed grids, auxiliary heads that need room.
_TORCHVISION_PIXELS = {"inception_v3": 299, "maxvit_t": 224}
_SWIN_PIXELS = 112

_DETECTION_LAYERS_ONLY = "backbone of "

# Fully convolutional, or indifferent to the image size.
_TIMM_CONVOLUTIONAL = """
resnet26d seresnet33ts ecaresnet26t resnetv2_50 resnetv2_50d_gn resnetv2_50d_evos resnetaa50 resnetblur50 resnet51q
skresnet18 res2net50_26w_4s res2next50 resnest14d gcresnext26ts legacy_seresnet18 legacy_seresnext26_32x4d
densenet121 densenetblur121d rdnet_tiny dla34 dla60_res2next
cspresnet50 cspresnext50 cspdarknet53 cs3darknet_focus_s cs3sedarknet_l darknet53
vovnet39a ese_vovnet19b_dw ese_vovnet39b_evos dpn48b dpn68 xception41 xception65p legacy_xception
inception_v4 inception_resnet_v2 inception_next_atto
eca_nfnet_l0 dm_nfnet_f0 nf_regnet_b0 nf_resnet26
repvgg_a0 mobileone_s0 mobileone_s4 repvit_m0_9 repghostnet_050 ghostnet_100 ghostnetv2_100 ghostnetv3_100
lcnet_050 lcnetv2_base mobilenetv3_small_100 mobilenetv4_conv_small mobilenetv4_hybrid_medium@128 mnasnet_100
efficientnet_b0 tf_efficientnet_b0 efficientnet_es mixnet_s tinynet_e fbnetc_100 hardcorenas_a rexnet_100 rexnetr_100
gernet_s regnetx_002 regnety_002 regnetz_005 regnetv_040 hrnet_w18_small hgnet_tiny hgnetv2_b0 selecsls42b tresnet_m
convnext_atto convnextv2_atto convnext_nano_ols convmixer_768_32 poolformer_s12 poolformerv2_s12 convformer_s18
caformer_s18 mambaout_femto fasternet_t0 starnet_s1 vgg11_bn efficientvit_b0@128 nasnetalarge@96 pnasnet5large@96
edgenext_xx_small@128 mobilevit_xxs@128 mobilevitv2_050@128 pvt_v2_b0@128 cpubone_nano@128 iformer_t@128 shvit_s1@128
"""

# Attention, tokens or fixed grids: at the size they were made for.
_TIMM_FIXED = """
efficientformer_l1 efficientformerv2_s0 fastvit_t8 fastvit_sa12 coatnet_pico_rw_224 coatnet_nano_rw_224 coat_lite_tiny
maxvit_pico_rw_256 maxxvit_rmlp_nano_rw_256 botnet26t_256 halonet26t lambda_resnet26t lamhalobotnet50ts_256
mixer_s32_224 gmixer_12_224 gmlp_ti16_224 resmlp_12_224 sequencer2d_s
levit_128s levit_conv_128s levit_256 vit_tiny_patch16_224 vit_small_patch32_224 vit_relpos_small_patch16_224
vit_small_r26_s32_224 deit_tiny_patch16_224 deit_tiny_distilled_patch16_224 deit3_small_patch16_224
beit_base_patch16_224@64 eva02_tiny_patch14_224 cait_xxs24_224 xcit_nano_12_p16_224 tnt_s_patch16_224
tnt_s_legacy_patch16_224 nest_tiny volo_d1_224 convit_tiny crossvit_tiny_240 crossvit_9_dagger_240 twins_svt_small
twins_pcpvt_small visformer_tiny swin_tiny_patch4_window7_224 swinv2_tiny_window8_256 swinv2_cr_tiny_ns_224
focalnet_tiny_srf davit_tiny gcvit_xxtiny hiera_tiny_224 mvitv2_tiny pit_ti_224 pit_xs_distilled_224 nextvit_small
tiny_vit_5m_224 swiftformer_xs vitamin_small_224 efficientvit_m0 efficientvim_m1 lowformer_b0 samvit_base_patch16_224
vit_medium_patch16_rope_reg1_gap_256 naflexvit_base_patch16_gap
"""

_VIDEO = ("r3d_18", "mc3_18", "r2plus1d_18", "s3d")


@dataclass(frozen=True)
class Entry:
    """One model of the zoo; ``pixels`` is None where the model itself says."""

    name: str
    source: str
    pixels: int | None

    @property
    def key(self) -> str:
        return f"{self.source}/{self.name}"

    @property
    def may_not_trace(self) -> bool:
        """Whole detection models choose boxes by their values."""
        return self.source == "torchvision detection" and not self.name.startswith(_DETECTION_LAYERS_ONLY)


@dataclass(frozen=True)
class Loaded:
    """A model, how to make inputs for it, and their size."""

    model: nn.Module
    inputs: Callable[[int], Any]
    shape: tuple[int, ...]


class Unknown(Exception):
    """The installed package has no model of this name."""


def entries() -> list[Entry]:
    """The whole zoo: torchvision first."""
    import torchvision.models as models

    found = [_torchvision(name) for name in models.list_models(module=models)]
    found += [Entry(name, "torchvision segmentation", 96) for name in models.list_models(module=models.segmentation)]
    detection = models.list_models(module=models.detection)
    found += [Entry(name, "torchvision detection", 128) for name in detection]
    sizes = {name: 300 if name.startswith("ssd300") else 128 for name in detection}
    found += [Entry(_DETECTION_LAYERS_ONLY + name, "torchvision detection", sizes[name]) for name in detection]
    found += [Entry(name, "torchvision video", 224 if name == "s3d" else 64) for name in _VIDEO]
    found += [_timm(word, 96) for word in _TIMM_CONVOLUTIONAL.split()]
    found += [_timm(word, None) for word in _TIMM_FIXED.split()]
    return found


def other_entries(packages: Iterable[str]) -> list[Entry]:
    """Models of other libraries, which know their sizes themselves."""
    return [Entry(name, package, None) for package, named in models().items() if package in packages for name in named]


def _torchvision(name: str) -> Entry:
    pixels = _SWIN_PIXELS if name.startswith("swin") else _TORCHVISION_PIXELS.get(name, 96)
    return Entry(name, "torchvision", pixels)


def _timm(word: str, pixels: int | None) -> Entry:
    name, _, own = word.partition("@")
    return Entry(name, "timm", int(own) if own else pixels)


def load(entry: Entry) -> Loaded:
    """Build a model with random weights; nothing is downloaded."""
    if entry.source == "timm":
        return _load_timm(entry)
    if entry.source in PACKAGES:
        model, size = build(entry.source, entry.name)
        return Loaded(model, _images(size), size)
    assert entry.pixels is not None
    shape: tuple[int, ...] = (3, entry.pixels, entry.pixels)
    from torchvision.models import get_model

    if entry.source == "torchvision detection":
        return _load_detection(entry)
    options: dict[str, Any] = {"weights": None}
    if entry.source == "torchvision segmentation":
        options |= {"weights_backbone": None}
        if not entry.name.startswith("lraspp"):
            options["aux_loss"] = True
    elif entry.source == "torchvision video":
        shape = (3, 16, entry.pixels, entry.pixels) if entry.name == "s3d" else (3, 8, entry.pixels, entry.pixels)
    elif entry.name.startswith("vit"):
        options["image_size"] = 112 if entry.name == "vit_h_14" else entry.pixels
        shape = (3, options["image_size"], options["image_size"])
    elif entry.name in ("inception_v3", "googlenet"):
        options |= {"init_weights": False, "aux_logits": True}
    return Loaded(get_model(entry.name, **options), _images(shape), shape)


def _load_detection(entry: Entry) -> Loaded:
    from torchvision.models import get_model

    name = entry.name.removeprefix(_DETECTION_LAYERS_ONLY)
    shape = (3, entry.pixels or 128, entry.pixels or 128)
    options: dict[str, Any] = {"weights": None, "weights_backbone": None}
    if not name.startswith("ssd"):  # those have one size of their own
        options |= {"min_size": shape[1], "max_size": shape[1]}
    model = get_model(name, **options)
    if entry.name != name:
        return Loaded(model.backbone, _images(shape), shape)
    return Loaded(model, lambda batch: ([torch.randn(shape, dtype=torch.float64) for _ in range(batch)],), shape)


def _load_timm(entry: Entry) -> Loaded:
    import timm

    if not timm.is_model(entry.name):
        raise Unknown(f"timm {timm.__version__} has no such model")
    options: dict[str, Any] = {}
    cfg = timm.get_pretrained_cfg(entry.name)
    size = entry.pixels or cfg.input_size[-1]
    if entry.pixels and cfg.fixed_input_size:
        options["img_size"] = entry.pixels
    shape = (3, size, size)
    return Loaded(timm.create_model(entry.name, pretrained=False, **options), _images(shape), shape)


def _images(shape: tuple[int, ...]) -> Callable[[int], Tensor]:
    return lambda batch: torch.randn(batch, *shape, dtype=torch.float64)
