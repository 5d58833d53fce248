import subprocess
import sys

import pytest
import torch

from narrowgate import models
from narrowgate.models import DenseNet, LeNet5, MobileNetV2, ModelError, PreActResNet


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "kind", "size"),
    [
        ("resnet164", PreActResNet, 1_726_288),
        ("resnet", PreActResNet, 1_726_288),
        ("densenet40", DenseNet, 1_100_328),
        ("mobilenetv2", MobileNetV2, 2_351_872),
    ],
)
def test_the_papers_networks_by_name(name, kind, size):
    with torch.device("meta"):
        model = models.build(name, 100)
        assert isinstance(model, kind) and count(model) == size
        small = models.build(name, 7, image_shape=(1, 20, 24))
        assert small(torch.randn(2, 1, 20, 24)).shape == (2, 7)


def test_lenet_and_its_biases():
    model = models.build("lenet5", 10, image_shape=(1, 28, 28))
    assert isinstance(model, LeNet5) and count(model) == 431_080
    model = models.build("lenet5", 10, image_shape=(1, 28, 28), bias=False)
    assert count(model) == 431_080 - 20 - 50 - 500 - 10 and not any("bias" in name for name in model.state_dict())
    assert model(torch.zeros(1, 1, 28, 28)).abs().sum() == 0


def test_options_reach_the_builder():
    model = models.build("resnet", 10, depth=11, dropout=0.25)
    assert len(model.stages[0]) == 1 and model.stages[0][0].dropout.p == 0.25
    assert models.build("mobilenetv2", 10, dropout=0.0).dropout.p == 0.0


def test_networks_of_torchvision_and_timm():
    with torch.device("meta"):
        assert count(models.build("torchvision/resnet50", 1000)) == 25_557_032
        assert count(models.build("torchvision/mobilenet_v2", 1000)) == 3_504_872
        assert models.build("torchvision/mobilenet_v2", 7, dropout=0.5).classifier[0].p == 0.5
        timms = models.build("timm/resnet50", 1000)
        assert count(timms) == 25_557_032
    model = models.build("timm/mobilenetv2_050", 5, image_shape=(1, 32, 32))
    assert model(torch.randn(2, 1, 32, 32)).shape == (2, 5)
    with torch.device("meta"):
        assert models.build("torchvision/googlenet", 4).train()(torch.randn(2, 3, 64, 64)).shape == (2, 4)


OWN = "There are lenet5, resnet164, resnet, densenet40, mobilenetv2, torchvision/NAME, timm/NAME"
WRONG = [
    ("resnet146", {}, r"no network 'resnet146'; did you mean resnet164 .*\? " + OWN),
    ("MobileNet", {}, r"no network 'MobileNet'; did you mean mobilenetv2"),
    ("xyz", {}, r"^there is no network 'xyz'\. " + OWN),
    ("keras/resnet50", {}, "no network 'keras/resnet50'"),
    ("lenet5", {}, "lenet5 takes images of 1x28x28, and these are 3x32x32"),
    ("mobilenetv2", {"image_shape": (3, 4, 32)}, "takes images of at least 8x8, and these are 3x4x32"),
    ("densenet40", {"dropuot": 0.1}, "densenet40 has no option 'dropuot'; did you mean dropout\\? It takes dropout"),
    ("resnet164", {"depth": 20}, r"resnet164 has no option 'depth'\. It takes dropout"),
    ("resnet", {"depth": 21}, r"resnet can't be built with depth = 21: depth must be 9n \+ 2"),
    ("resnet", {"channels": 1}, "channels can't be an option, the data decides it"),
    ("timm/resnet18", {"num_classes": 1}, "num_classes can't be an option, the data decides it"),
    ("torchvision/resnet5", {}, "no image classifier 'resnet5'; did you mean resnet50"),
    ("torchvision/fcn_resnet50", {}, "torchvision has no image classifier 'fcn_resnet50'"),
    ("torchvision/resnet18", {"depth": 3}, "can't be built with depth = 3: .*unexpected keyword argument 'depth'"),
    ("torchvision/resnet18", {"weights": "BEST"}, "has no weights 'BEST'; it has IMAGENET1K_V1, DEFAULT"),
    ("torchvision/resnet18", {"weights": "DEFAULT"}, "for other classes than these 10. timm/NAME with pretrained"),
    ("torchvision/resnet18", {"image_shape": (1, 32, 32)}, "takes images of 3 channels, and these have 1"),
    ("timm/resnet5", {}, "timm has no model 'resnet5'; did you mean resnet50"),
    ("timm/hf_hub:someone/model", {}, "timm has no model 'hf_hub:someone/model'"),
    ("timm/resnet18", {"depth": 3}, "can't be built with depth = 3: .*unexpected keyword argument 'depth'"),
]


@pytest.mark.parametrize(("name", "options", "message"), WRONG, ids=[f"{case[0]}-{[*case[1]]}" for case in WRONG])
def test_networks_that_can_not_be_built(name, options, message):
    with pytest.raises(ModelError, match=message):
        models.build(name, 10, **options)


def test_no_classes():
    with pytest.raises(ModelError, match="at least 1 class, got 0"):
        models.build("mobilenetv2", 0)


@pytest.mark.parametrize(
    ("name", "package", "remedy"),
    [
        ("torchvision/resnet18", "torchvision", r"pip install '\.\[train\]' in the checkout"),
        ("timm/resnet18", "timm", "pip install timm"),
    ],
)
def test_a_missing_package_is_named(monkeypatch, name, package, remedy):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModelError, match=f"{name} needs {package}: {remedy}"):
        models.build(name, 10)


def test_names_for_a_help_text():
    assert models.names() == (
        "lenet5",
        "resnet164",
        "resnet",
        "densenet40",
        "mobilenetv2",
        "torchvision/NAME",
        "timm/NAME",
    )


def test_nothing_heavy_is_imported_before_it_is_needed():
    code = (
        "import sys, narrowgate, narrowgate.models, narrowgate.train.data, narrowgate.train.augment\n"
        "print([name for name in ('torchvision', 'timm', 'sklearn', 'PIL', 'lightning') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
