import numpy as np
import pytest
import torch
from PIL import Image

from narrowgate.train.data import DataError, FolderData, load_data
from narrowgate.train.recipe import DataPart

random = np.random.default_rng(0)


def write(folder, counts, size=(40, 48)):
    """Images of noise, each with its own number in the blue channel, in one folder a class."""
    number = 0
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for i in range(count):
            pixels = random.integers(0, 256, (*size, 3), dtype=np.uint8)
            pixels[..., 2] = number
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
            number += 1


@pytest.fixture
def root(tmp_path):
    write(tmp_path / "train", {"cat": 9, "dog": 8, "owl": 6})
    write(tmp_path / "val", {"cat": 3, "dog": 2, "owl": 2})
    return tmp_path


def load(root, seed=0, **options):
    standard = {"source": "folder", "augment": "imagenet", "size": 16, "workers": 0}
    return load_data(DataPart(**standard | options), str(root), False, seed)


def numbers(batches):
    """Which images came, batch by batch."""
    return [images[:, 2].flatten(1).float().mean(1).round().int().tolist() for images, _ in batches]


def joined(batches):
    return [number for batch in numbers(batches) for number in batch]


def test_a_folder(root):
    data = load(root)
    assert isinstance(data, FolderData)
    assert (data.classes, data.image_shape, data.train_size, data.held_out_size) == (3, (3, 16, 16), 23, 7)
    assert data.mean == (0.485, 0.456, 0.406) and load(root, size=0).image_shape == (3, 224, 224)
    images, labels = next(data.loader("train", 4))
    assert images.dtype == torch.uint8 and images.shape == (4, 3, 16, 16) and labels.dtype == torch.int64
    seen = [(joined([batch])[0], batch[1].item()) for batch in data.loader("held-out", 1)]
    assert seen == list(enumerate([0, 0, 0, 1, 1, 2, 2]))


def test_training_is_a_function_of_seed_and_epoch(root):
    data = load(root)
    first = list(data.loader("train", 4, seed=1, epoch=2))
    assert len(first) == 5 and len(set(joined(first))) == 20
    torch.rand(1)
    state = torch.get_rng_state()
    again = list(data.loader("train", 4, seed=1, epoch=2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for one, two in zip(first, again, strict=True) for a, b in zip(one, two, strict=True))
    for other in ({"seed": 1, "epoch": 3}, {"seed": 2, "epoch": 2}):
        assert numbers(data.loader("train", 4, **other)) != numbers(first)


def by_number(data, split, epoch):
    """The images of a split in one epoch, each by its number."""
    return {joined([(images, labels)])[0]: images for images, labels in data.loader(split, 1, epoch=epoch)}


def test_crops_change_with_the_epoch_and_evaluation_does_not(root):
    for augment, split, size, same in (
        ("imagenet", "train", 23, 0),
        ("none", "train", 23, 23),
        ("imagenet", "test", 7, 7),
    ):
        data = load(root, augment=augment)
        one, two = by_number(data, split, 0), by_number(data, split, 1)
        assert len(one) == size and sum(torch.equal(one[number], two[number]) for number in one) == same


def test_workers_change_nothing(root):
    wanted, ours = list(load(root).loader("train", 4)), list(load(root, workers=2).loader("train", 4))
    assert len(ours) == 5
    assert all(torch.equal(a, b) for one, two in zip(wanted, ours, strict=True) for a, b in zip(one, two, strict=True))


def test_two_processes_share_the_batches_of_one_with_twice_the_batch(root):
    data = load(root)
    together = list(data.loader("train", 8, seed=3, epoch=1))
    parts = [list(data.loader("train", 4, seed=3, epoch=1, rank=rank, world=2)) for rank in (0, 1)]
    assert len(together) == len(parts[0]) == len(parts[1]) == 2
    for whole, left, right in zip(together, *parts, strict=True):
        assert torch.equal(whole[0], torch.cat([left[0], right[0]]))
        assert torch.equal(whole[1], torch.cat([left[1], right[1]]))
    held_out = [joined(data.loader("held-out", 2, rank=rank, world=2)) for rank in (0, 1)]
    assert held_out == [[0, 1, 4, 5], [2, 3, 6]]


def test_which_folder_is_held_out_and_which_tests(root):
    write(root / "test", {"cat": 1, "dog": 1, "owl": 2})
    data = load(root)
    assert data.held_out_size == 7 and len(list(data.loader("test", 1))) == 4
    data = load(root, validation=6)
    assert (data.train_size, data.held_out_size) == (17, 6) and len(list(data.loader("test", 1))) == 4
    train, held = (set(joined(data.loader(split, 1))) for split in ("train", "held-out"))
    assert not train & held and train | held == set(range(23))
    assert sorted(label.item() for _, label in data.loader("held-out", 1)) == [0, 0, 1, 1, 2, 2]


def test_a_test_folder_without_classes_is_imagenets(root):
    (root / "test").mkdir()
    (root / "test" / "readme.txt").touch()
    assert len(list(load(root).loader("test", 1))) == 7


def test_folders_that_can_not_be_used(root):
    with pytest.raises(DataError, match=r"lower train.batch"):
        load(root).loader("train", 24)
    with pytest.raises(ValueError, match="unknown split 'val'; choose one of train, held-out, test"):
        load(root).loader("val", 1)
    with pytest.raises(DataError, match="validation = 23 leaves nothing of 23 training images"):
        load(root, validation=23)
    (root / "val" / "emu").mkdir()
    with pytest.raises(DataError, match=r"val can't be used \(Found no valid file for the classes emu"):
        load(root)
    (root / "val" / "cat" / "0.png").rename(root / "val" / "emu" / "0.png")
    with pytest.raises(DataError, match=r"differ in 1 classes \(emu\)"):
        load(root)
    (root / "val").rename(root / "valid")
    with pytest.raises(DataError, match="has neither val nor test with one folder a class"):
        load(root)
    (root / "train").rename(root / "training")
    with pytest.raises(DataError, match=r"there is no folder .*train; images must lie in .*train/CLASS/\*.jpg"):
        load(root)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_image_is_named(root, workers):
    path = root / "val" / "dog" / "1.png"
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(DataError, match=r"^\S*dog/1.png can't be read as an image \(.*replace or remove it$") as found:
        list(load(root, workers=workers).loader("test", 2))
    assert "\n" not in str(found.value)
    path.write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"1.png can't be read as an image \(it is of no known kind\); replace"):
        list(load(root, workers=workers).loader("test", 2))


def test_damage_that_pil_has_no_error_of_its_own_for_is_named(root):
    path = root / "val" / "dog" / "0.ppm"
    path.write_bytes(b"P6 4x 4 255\n" + bytes(48))
    with pytest.raises(DataError, match=r"0.ppm can't be read as an image \(invalid literal .*replace or remove it$"):
        list(load(root).loader("test", 1))
    path.write_bytes(b"P6 99999 99999 255\n" + bytes(48))
    with pytest.raises(DataError, match=r"0.ppm can't be read as an image \(Image size .*replace or remove it$"):
        list(load(root).loader("test", 1))


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.float32])
def test_images_of_more_than_8_bits_do_not_become_white(root, dtype):
    values = np.linspace(0, 65535, 64).reshape(8, 8).astype(dtype)
    Image.fromarray(values).save(root / "val" / "dog" / "0.tiff")
    with pytest.raises(DataError, match=r"0.tiff has grey values of more than 8 bits .* save such images with 8$"):
        list(load(root).loader("test", 1))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK"])
def test_images_of_other_modes_are_read(root, mode):
    Image.new("RGB", (8, 8), (255, 0, 0)).convert(mode).save(root / "val" / "cat" / "0.tiff")
    shapes = {tuple(images.shape) for images, _ in load(root).loader("test", 1)}
    assert shapes == {(1, 3, 16, 16)}
