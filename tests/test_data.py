import builtins
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from narrowgate.train.data import Data, DataError, load_data
from narrowgate.train.recipe import DataPart

SHARED = Path(__file__).parents[2] / "shared" / "data"
random = np.random.default_rng(0)


def arrays(train=60, test=20, shape=(6, 5, 3), classes=4):
    """A small data set as numpy.savez takes it; every class occurs."""
    found = {}
    for part, count in (("train", train), ("test", test)):
        found[f"x_{part}"] = random.integers(0, 256, (count, *shape), dtype=np.uint8)
        found[f"y_{part}"] = np.arange(count) % classes
    return found


def save(folder, **changes):
    path = folder / "images.npz"
    np.savez(path, **{key: value for key, value in (arrays() | changes).items() if value is not None})
    return str(path)


def load(path, source="npz", seed=0, download=False, **options):
    return load_data(DataPart(source=source, **options), str(path), download, seed)


def test_an_array_file(tmp_path):
    found = arrays()
    data = load(save(tmp_path, **found))
    assert isinstance(data, Data) and data.image_shape == (3, 6, 5) and data.classes == 4
    assert data.train.images.dtype == torch.uint8 and data.train.labels.dtype == torch.int64
    assert (data.train.images.numpy() == found["x_train"].transpose(0, 3, 1, 2)).all()
    assert (data.test.images.numpy() == found["x_test"].transpose(0, 3, 1, 2)).all()
    assert data.train.labels.tolist() == found["y_train"].tolist() and len(data.test) == 20
    assert data.validation is None and data.held_out is data.test
    scaled = data.train.images.double() / 255
    assert data.mean == pytest.approx(scaled.mean((0, 2, 3)).tolist(), abs=1e-9)
    assert data.std == pytest.approx(scaled.std((0, 2, 3), unbiased=False).tolist(), abs=1e-9)
    assert repr(data.train) == "ImageSet(60 images of 3 x 6 x 5)"


def test_the_recipes_own_path_and_one_that_goes_before_it(tmp_path):
    path = save(tmp_path)
    assert len(load_data(DataPart(source="npz", path=path), None, False, 0).train) == 60
    assert len(load_data(DataPart(source="npz", path="elsewhere.npz"), path, False, 0).train) == 60


@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 1), (1, 6, 5), (3, 6, 5), (6, 5, 3)])
def test_where_the_channels_are(tmp_path, shape):
    found = arrays(shape=shape)
    data = load(save(tmp_path, **found))
    images = found["x_train"].reshape(60, 1, 6, 5) if 3 not in shape else found["x_train"]
    wanted = images.transpose(0, 3, 1, 2) if shape == (6, 5, 3) else images
    assert (data.train.images.numpy() == wanted).all() and data.train.images.is_contiguous()


def test_floating_point_images_and_labels_in_a_column(tmp_path):
    found = arrays()
    scaled = {key: (found[key] / 255).astype(np.float32) for key in ("x_train", "x_test")}
    column = {
        "y_train": found["y_train"].astype(np.uint8)[:, None],
        "y_test": found["y_test"].astype(np.int16)[:, None],
    }
    ours, wanted = load(save(tmp_path, **scaled, **column)), load(save(tmp_path, **found))
    assert torch.equal(ours.train.images, wanted.train.images) and torch.equal(ours.test.images, wanted.test.images)
    assert torch.equal(ours.train.labels, wanted.train.labels)


def test_a_validation_split(tmp_path):
    path = save(tmp_path, **arrays(train=80))
    whole, data, again = load(path), load(path, validation=20), load(path, validation=20)
    assert (len(data.train), len(data.validation), data.held_out) == (60, 20, data.validation)
    assert data.validation.labels.bincount().tolist() == [5, 5, 5, 5]
    assert torch.equal(data.validation.images, again.validation.images)
    assert not torch.equal(data.validation.images, load(path, validation=20, seed=1).validation.images)

    def rows(*sets):
        return sorted(bytes(image.flatten().tolist()) for each in sets for image in each.images)

    assert rows(data.train, data.validation) == rows(whole.train)
    labelled = {
        bytes(image.flatten().tolist()): label for image, label in zip(*vars(whole.train).values(), strict=True)
    }
    for image, label in zip(*vars(data.validation).values(), strict=True):
        assert labelled[bytes(image.flatten().tolist())] == label
    assert data.mean != whole.mean, "the held-out images must not count"


def test_an_uneven_validation_split_keeps_the_shares_of_classes(tmp_path):
    labels = np.array([0] * 40 + [1] * 15 + [2] * 5)
    data = load(save(tmp_path, y_train=labels, y_test=np.zeros(20, int)), validation=12)
    assert data.validation.labels.bincount().tolist() == [8, 3, 1]


WRONG = {
    "no key": ({"y_test": None}, r"has no y_test \(found: x_train, y_train, x_test\); save it with numpy.savez"),
    "shape": ({"x_train": np.zeros((60, 6), np.uint8)}, r"x_train has shape 60 x 6; it must be N x H x W"),
    "no channels": (
        {"x_test": np.zeros((20, 6, 5, 7), np.uint8)},
        "x_test has shape 20 x 6 x 5 x 7, which has no axis",
    ),
    "either": ({"x_train": np.zeros((60, 3, 5, 3), np.uint8)}, "could be read with channels first or last"),
    "flat images": ({"x_train": np.zeros((60, 0, 5), np.uint8)}, "x_train has shape 60 x 0 x 5"),
    "dtype": ({"x_train": np.zeros((60, 6, 5, 3), np.int64)}, "x_train is int64; it must be uint8, or floating point"),
    "range": (
        {"x_train": np.full((60, 6, 5, 3), 255.0)},
        "x_train is float64 from 255 to 255; .* without normalisation",
    ),
    "nan": ({"x_train": np.full((60, 6, 5, 3), np.nan)}, "x_train is float64 from nan to nan"),
    "labels": ({"y_train": np.arange(60) / 2}, "y_train is float64 of shape 60; it must be a row of integers"),
    "one-hot": (
        {"y_train": np.eye(60, 4, dtype=int)},
        "y_train is int64 of shape 60 x 4; it must be a row of integers",
    ),
    "negative": ({"y_train": np.arange(60) % 4 - 1}, "y_train holds labels from -1 to 2, but there are 3 classes"),
    "from 1": (
        {"y_train": np.arange(60) % 4 + 1, "y_test": np.arange(20) % 4 + 1},
        "y_train and y_test start at 1; count classes from 0",
    ),
    "unnamed": (
        {"classes": np.array(["cat", "dog"])},
        "y_train holds labels from 0 to 3, but there are 2 classes; .* 0 to 1",
    ),
    "huge": (
        {"y_train": np.where(np.arange(60) == 7, 5_000_000, np.arange(60) % 4)},
        "y_train holds the label 5000000, but there are 60 training images; count classes from 0, or give the names",
    ),
    "unknown": ({"y_test": np.arange(20) % 5}, "y_test holds labels from 0 to 4, but there are 4 classes; .* 0 to 3"),
    "count": ({"y_train": np.zeros(59, int)}, "x_train holds 60 images but y_train 59 labels"),
    "empty": ({"x_test": np.zeros((0, 6, 5, 3), np.uint8), "y_test": np.zeros(0, int)}, "x_test is empty"),
    "sizes": ({"x_test": np.zeros((20, 5, 6, 3), np.uint8)}, "training images are 3 x 6 x 5 but test images 3 x 5 x 6"),
    "constant": ({"x_train": np.zeros((60, 6, 5, 3), np.uint8)}, "channel 0 of the training images has the same value"),
    "objects": ({"y_train": np.array([{}] * 60, dtype=object)}, r"can't be read as an .npz file of plain arrays"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_arrays_that_can_not_be_used(tmp_path, changes, message):
    path = save(tmp_path, **changes)
    with pytest.raises(DataError, match=message) as caught:
        load(path)
    assert path in str(caught.value) or "channel 0" in message


def test_a_small_part_of_a_data_set_may_lack_classes(tmp_path):
    from_1, from_2 = (np.arange(60) % 3 + first for first in (1, 2))
    assert load(save(tmp_path, y_train=from_1)).classes == 4  # the test images have class 0
    assert load(save(tmp_path, y_train=from_2, y_test=from_2[:20])).classes == 5  # nobody counts from 2
    named = {"y_train": from_1, "y_test": from_1[:20], "classes": np.array(list("abcdefg"))}
    assert load(save(tmp_path, **named)).classes == 7
    ignored = {"numbers": np.array([0, 1]), "pickled": np.array(["a", "b"], dtype=object), "one": np.array("a")}
    for classes in ignored.values():
        assert load(save(tmp_path, classes=classes)).classes == 4


def test_files_that_are_no_archives(tmp_path):
    np.save(tmp_path / "one.npy", np.zeros(3))
    (tmp_path / "text.npz").write_text("x_train, y_train")
    (tmp_path / "empty.npz").touch()
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(DataError, match=r"one.npy holds one array, not four"):
        load(tmp_path / "one.npy")
    for name in ("text.npz", "empty.npz", "folder.npz"):
        pattern = rf"{name} can't be read as an .npz file of plain arrays \(.*get it again"
        with pytest.raises(DataError, match=pattern) as found:
            load(tmp_path / name)
        assert "allow_pickle" not in str(found.value)


def test_a_pickle_is_never_opened(tmp_path):
    path = tmp_path / "bad.npz"

    class Bomb:
        def __reduce__(self):
            return Path.touch, (tmp_path / "exploded",)

    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(DataError):
        load(path)
    np.savez(path, **arrays() | {"y_train": np.array([Bomb()], dtype=object)})
    with pytest.raises(DataError, match="plain arrays"):
        load(path)
    assert not (tmp_path / "exploded").exists()


def test_a_damaged_archive_is_noticed(tmp_path):
    path = Path(save(tmp_path))
    whole, wanted = path.read_bytes(), load(path)
    noticed = 0
    for place in random.integers(0, len(whole), 150):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << random.integers(8)
        path.write_bytes(damaged)
        try:
            data = load(path)
        except DataError:
            noticed += 1
            continue
        assert torch.equal(data.train.images, wanted.train.images), f"byte {place} changed the images"
        assert torch.equal(data.test.labels, wanted.test.labels), f"byte {place} changed the labels"
    assert noticed > 100
    for length in (10, len(whole) // 2, len(whole) - 5):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError):
            load(path)


@pytest.mark.parametrize(
    ("count", "message"), [(60, "leaves nothing of 60 training images"), (-1, "0 or more, got -1")]
)
def test_validation_images_that_do_not_exist(tmp_path, count, message):
    with pytest.raises(DataError, match=message):
        load_data(_Part(validation=count), save(tmp_path), False, 0)


class _Part:
    """A recipe's part that recipes themselves may refuse."""

    def __init__(self, **fields):
        standard = {"source": "npz", "path": "", "augment": "none", "validation": 0, "size": 0, "workers": 0}
        self.__dict__.update(standard | fields)


def test_choices_that_do_not_fit(tmp_path):
    with pytest.raises(DataError, match=r"unknown data source 'svhn'; choose one of npz, mnist"):
        load_data(_Part(source="svhn"), None, False, 0)
    with pytest.raises(DataError, match="augment = 'imagenet' is for image folders"):
        load_data(_Part(augment="imagenet"), save(tmp_path), False, 0)
    with pytest.raises(DataError, match="augment = 'crop-flip' is for images in memory"):
        load_data(_Part(source="folder", augment="crop-flip"), str(tmp_path), False, 0)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("npz", "numpy.savez wrote, with x_train, y_train, x_test and y_test"),
        ("folder", r"folder with train/CLASS/\*.jpg"),
        ("mnist", r"torchvision.datasets.MNIST has as root, .* --download fetches"),
        ("cifar10", r"torchvision.datasets.CIFAR10 has as root"),
        ("cifar100", r"torchvision.datasets.CIFAR100 has as root"),
    ],
)
def test_missing_data_says_how_to_get_it(tmp_path, source, message):
    with pytest.raises(
        DataError, match=f"source '{source}' needs a path: set data.path or pass --data PATH.*{message}"
    ):
        load("", source)
    with pytest.raises(DataError, match=f"nowhere does not exist.*{message}"):
        load(tmp_path / "nowhere", source)
    if source not in ("npz", "folder"):
        with pytest.raises(DataError, match=f"gives no {source}: Dataset not found.*{message}"):
            load(tmp_path, source)
        assert not list(tmp_path.iterdir()), "nothing may be downloaded unasked"


def test_digits_are_the_demos():
    from narrowgate.demo import Digits

    data, demo = load("", "digits"), Digits.load()
    assert (data.classes, data.image_shape, len(data.train), len(data.test)) == (10, (1, 8, 8), 1198, 599)
    assert torch.equal(data.train.labels, demo.y_train) and torch.equal(data.test.labels, demo.y_test)
    assert torch.equal(data.train.images, (demo.x_train * 255).round().byte()) and data.train.images.max() == 255
    with pytest.raises(DataError, match=r"'digits' .* reads no file: leave out mine.npz, or set data.source"):
        load("mine.npz", "digits")


def fake_mnist(root, train=30, test=12):
    """Tiny files in MNIST's own format."""
    folder = root / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for prefix, count in (("train", train), ("t10k", test)):
        images = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        header = struct.pack(">IIII", 2051, count, 28, 28)
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        labels = (np.arange(count) % 10).astype(np.uint8)
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, count) + labels.tobytes())
    return folder, images


def test_torchvisions_mnist_folder(tmp_path):
    folder, test_images = fake_mnist(tmp_path)
    data = load(tmp_path, "mnist")
    assert (len(data.train), len(data.test), data.classes, data.image_shape) == (30, 12, 10, (1, 28, 28))
    assert (data.test.images.numpy()[:, 0] == test_images).all()
    assert data.mean == (0.1307,) and data.std == (0.3081,)
    labels = folder / "train-labels-idx1-ubyte"
    labels.write_bytes(labels.read_bytes()[:-3])
    with pytest.raises(DataError, match=r"gives no mnist: .+\. It is the folder"):
        load(tmp_path, "mnist")


@pytest.mark.parametrize(("source", "classes"), [("cifar10", 10), ("cifar100", 100)])
def test_torchvisions_cifar_folders(tmp_path, monkeypatch, source, classes):
    from torchvision import datasets

    reader = datasets.CIFAR10 if source == "cifar10" else datasets.CIFAR100
    folder = tmp_path / reader.base_folder
    folder.mkdir()
    key = "labels" if source == "cifar10" else "fine_labels"
    for name, _ in reader.train_list + reader.test_list:
        pixels = random.integers(0, 256, (classes, 3072), dtype=np.uint8)
        (folder / name).write_bytes(pickle.dumps({"data": pixels, key: list(range(classes))}))
    (folder / reader.meta["filename"]).write_bytes(pickle.dumps({reader.meta["key"]: []}))
    with pytest.raises(DataError, match=f"gives no {source}: Dataset not found or corrupted"):
        load(tmp_path, source)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, md5: Path(path).exists())
    data = load(tmp_path, source)
    assert len(data.train) == classes * len(reader.train_list) and len(data.test) == classes
    assert (data.classes, data.image_shape) == (classes, (3, 32, 32))
    assert (data.test.images.numpy() == pixels.reshape(-1, 3, 32, 32)).all()
    assert data.test.labels.tolist() == list(range(classes)) and data.mean[0] in (0.4914, 0.5071)


def test_an_array_file_in_a_folders_place(tmp_path):
    path = save(tmp_path, **arrays(shape=(32, 32, 3)))
    data = load(path, "cifar100")
    assert (data.classes, data.mean) == (100, (0.5071, 0.4865, 0.4409))
    with pytest.raises(DataError, match=r"images are 3 x 32 x 32, but mnist's are 1 x 28 x 28; .* data.source = .npz."):
        load(path, "mnist")
    with pytest.raises(DataError, match="y_train holds labels from 0 to 11, but there are 10 classes"):
        load(save(tmp_path, **arrays(shape=(32, 32, 3), classes=12)), "cifar10")


@pytest.mark.parametrize(
    ("source", "package", "named"),
    [
        ("cifar10", "torchvision", "torchvision"),
        ("folder",) + ("torchvision",) * 2,
        ("digits", "sklearn", "scikit-learn"),
    ],
)
def test_a_missing_package_is_named(tmp_path, monkeypatch, source, package, named):
    found = builtins.__import__

    def missing(name, *rest, **options):
        if name.split(".")[0] == package:
            raise ImportError(name)
        return found(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(DataError, match=rf"source '{source}' needs {named}: pip install '\.\[train\]' in the checkout"):
        load("" if source == "digits" else tmp_path, source)


def test_downloads_go_through_torchvision_and_only_when_asked(tmp_path, monkeypatch):
    asked = []

    def refuse(self):
        asked.append(self.root)
        raise OSError("no network")

    monkeypatch.setattr("torchvision.datasets.MNIST.download", refuse)
    root = tmp_path / "new"
    with pytest.raises(DataError, match="does not exist"):
        load(root, "mnist")
    assert not asked
    with pytest.raises(DataError, match="gives no mnist: no network"):
        load(root, "mnist", download=True)
    assert asked == [str(root)]


@pytest.mark.skipif(not SHARED.exists(), reason="the shared data folder is not there")
def test_real_mnist():
    data = load(SHARED / "mnist.npz", "mnist", validation=5000)
    assert (len(data.train), len(data.validation), len(data.test)) == (55_000, 5000, 10_000)
    assert data.train.labels.bincount().sum() == 55_000 and data.classes == 10
    plain = load(SHARED / "mnist.npz")
    assert plain.mean == pytest.approx((0.1307,), abs=5e-5) and plain.std == pytest.approx((0.3081,), abs=5e-5)
