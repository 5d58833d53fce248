import time

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn import functional as F

from narrowgate.train.augment import Normalise, crop_flip, draw, draw_warps, seeded, warp


def plain(images, draws, padding):
    """Zero-pad, slice and flip, image by image."""
    height, width = images.shape[2:]
    padded = F.pad(images, [padding] * 4)
    done = []
    for image, (dy, dx, flip) in zip(padded, draws.tolist(), strict=True):
        image = image[:, dy : dy + height, dx : dx + width]
        done.append(image.flip(2) if flip else image)
    return torch.stack(done)


def random_images(*shape):
    return torch.randint(1, 256, shape, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("shape", "padding"), [((64, 3, 32, 32), 4), ((40, 1, 5, 9), 2), ((40, 2, 9, 5), 3), ((9, 3, 4, 4), 0)]
)
def test_crop_flip_is_pad_slice_and_flip(shape, padding):
    images, draws = random_images(*shape), draw(shape[0], 7, 3, padding)
    ours = crop_flip(images, draws, padding)
    assert ours.dtype == torch.uint8 and ours.shape == images.shape
    assert torch.equal(ours, plain(images, draws, padding))
    assert not torch.equal(ours, images)


def test_every_move_of_a_small_image():
    padding = 2
    draws = torch.tensor([(dy, dx, flip) for dy in range(5) for dx in range(5) for flip in (0, 1)])
    images = random_images(len(draws), 3, 3, 4)
    assert torch.equal(crop_flip(images, draws, padding), plain(images, draws, padding))


def test_digits_are_moved_and_never_mirrored():
    moves = draw(500, 1, 2, 2, flips=False)
    assert not moves[:, 2].any()
    assert torch.equal(moves[:, :2], draw(500, 1, 2, 2)[:, :2])  # the same moves as with flips
    assert sorted(set(moves[:, 0].tolist())) == [0, 1, 2, 3, 4]


def test_no_move_is_the_image_itself():
    images = random_images(5, 3, 6, 6)
    assert torch.equal(crop_flip(images, torch.tensor([[4, 4, 0]] * 5), 4), images)
    assert torch.equal(crop_flip(images, torch.tensor([[4, 4, 1]] * 5), 4), images.flip(3))
    gone = crop_flip(images, torch.tensor([[0, 4, 0]] * 5), 4)
    assert not gone[:, :, :4].any() and torch.equal(gone[:, :, 4:], images[:, :, :2])


def test_a_warp_of_nothing_is_the_image_itself():
    images = random_images(3, 2, 7, 10)
    assert torch.allclose(warp(images, torch.tensor([[0.0, 0, 0, 1]] * 3)), images.float(), atol=1e-3)


@pytest.mark.parametrize("shape", [(1, 1, 8, 8), (1, 3, 6, 9)])
def test_a_warp_by_whole_pixels_moves_as_a_crop_does(shape):
    images = random_images(*shape).expand(25, -1, -1, -1)
    moves = torch.tensor([(dy, dx, 0) for dy in range(5) for dx in range(5)])
    draws = torch.stack([2 - moves[:, 0], 2 - moves[:, 1], moves[:, 2], moves[:, 2] + 1], 1).float()
    assert torch.allclose(warp(images, draws), crop_flip(images, moves, 2).float(), atol=1e-2)


def test_a_warp_turns_then_moves():
    images = random_images(1, 2, 6, 6)
    turned = torch.rot90(images, 1, (2, 3)).float()  # counter-clockwise, as seen
    assert torch.allclose(warp(images, torch.tensor([[0, 0, -torch.pi / 2, 1]])), turned, atol=1e-2)
    moved = warp(images, torch.tensor([[1, 0, -torch.pi / 2, 1]]))
    assert torch.allclose(moved, F.pad(turned, [0, 0, 1, 0])[:, :, :6], atol=1e-2)


def test_a_warp_of_a_wide_image_keeps_its_shapes():
    """A square that is turned by a right angle is a square, in an image that is none."""
    images = torch.zeros(1, 1, 8, 16)
    images[0, 0, 2:6, 6:10] = 200
    assert torch.allclose(warp(images, torch.tensor([[0, 0, torch.pi / 2, 1]])), images, atol=1e-2)
    grown = warp(images, torch.tensor([[0, 0, 0, 2.0]]))
    assert 3.5 < grown.sum() / images.sum() < 4.5


def test_warps_fill_their_range_and_follow_seed_and_epoch():
    draws = draw_warps(5000, 1, 2)
    assert torch.equal(draws, draw_warps(5000, 1, 2)) and not torch.equal(draws, draw_warps(5000, 1, 3))
    low, high = draws.amin(0), draws.amax(0)
    most = torch.tensor([2, 2, 10 / 180 * torch.pi, 0.1])
    middle = torch.tensor([0, 0, 0, 1.0])
    assert torch.allclose(high, middle + most, rtol=0.01) and torch.allclose(low, middle - most, rtol=0.01)


def test_warps_for_the_wrong_images_are_refused():
    with pytest.raises(ValueError, match=r"draws \[B, 4\], got \[2, 1, 4, 4\] and \[3, 4\]"):
        warp(random_images(2, 1, 4, 4), draw_warps(3, 0, 0))


def test_other_memory_formats_give_the_same():
    images, draws = random_images(6, 3, 8, 8), draw(6, 0, 0, 4)
    expected = crop_flip(images, draws, 4)
    assert torch.equal(crop_flip(images.to(memory_format=torch.channels_last), draws, 4), expected)
    assert torch.equal(crop_flip(random_images(6, 3, 8, 16)[..., ::2].copy_(images), draws, 4), expected)


def test_wrong_shapes_are_named():
    with pytest.raises(ValueError, match=r"draws \[B, 3\], got \[2, 3, 4, 4\] and \[3, 3\]"):
        crop_flip(random_images(2, 3, 4, 4), draw(3, 0, 0, 4), 4)
    with pytest.raises(ValueError, match="padding must be 0 or more, got -1"):
        draw(3, 0, 0, -1)


def test_draws_are_a_function_of_their_arguments():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = draw(1000, 3, 5, 4)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert torch.equal(draw(1000, 3, 5, 4), first)
    for other in (draw(1000, 3, 6, 4), draw(1000, 4, 5, 4), draw(1000, 5, 3, 4)):
        # Chance agreement of (dy, dx, flip) is 1 in 162.
        assert (other == first).all(1).float().mean() < 0.03


def test_draws_are_even_and_independent():
    draws = draw(60_000, 0, 0, 4)
    for axis in (0, 1):
        shares = torch.bincount(draws[:, axis].long(), minlength=9) / len(draws)
        assert len(shares) == 9 and (shares - 1 / 9).abs().max() < 0.006
    assert abs(draws[:, 2].float().mean().item() - 0.5) < 0.01
    neighbours = [draw(20_000, seed, epoch, 4).double() for seed in range(3) for epoch in range(3)]
    columns = torch.stack([column for each in neighbours for column in each.unbind(1)])
    assert (torch.corrcoef(columns) - torch.eye(27)).abs().max() < 0.04


def test_draws_cost_little():
    times = []
    for epoch in range(5):
        started = time.perf_counter()
        draw(50_000, 0, epoch, 4)
        times.append(time.perf_counter() - started)
    assert min(times) < 0.02


def test_seeded_tells_names_and_numbers_apart():
    def first(*arguments):
        return torch.rand(4, generator=seeded(*arguments)).tolist()

    assert first("a", 1, 2) == first("a", 1, 2)
    streams = [("a", 1, 2), ("a", 2, 1), ("a", 12), ("b", 1, 2), ("a", 1 + 2**32, 2), ("a", -1, 2)]
    assert len({tuple(first(*stream)) for stream in streams}) == len(streams)


@pytest.mark.parametrize("channels", [1, 3])
def test_normalise(channels):
    mean, std = (0.5071, 0.4865, 0.4409)[:channels], (0.2673, 0.2564, 0.2762)[:channels]
    images = random_images(4, channels, 5, 6)
    wanted = (images.double() / 255 - torch.tensor(mean).view(-1, 1, 1)) / torch.tensor(std).view(-1, 1, 1)
    ours = Normalise(mean, std)(images)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, wanted.float(), rtol=0, atol=1e-6)


def test_normalise_keeps_channels_last():
    images = random_images(4, 3, 8, 8).to(memory_format=torch.channels_last)
    assert Normalise((0.5,) * 3, (0.2,) * 3)(images).is_contiguous(memory_format=torch.channels_last)


def test_normalise_refuses_a_std_of_zero():
    with pytest.raises(ValueError, match="std above 0"):
        Normalise((0.5,), (0.0,))
    with pytest.raises(ValueError, match="as many"):
        Normalise((0.5, 0.5), (0.1,))


def test_the_host_never_waits_for_the_device():
    if torch.__version__ < "2.7" and not torch.cuda.is_available():
        pytest.skip("PyTorch 2.6 makes fake tensors on a GPU only where there is one")
    with FakeTensorMode():
        images, draws = torch.empty(8, 3, 32, 32, dtype=torch.uint8), torch.zeros(8, 3, dtype=torch.int16)
        moved = crop_flip(images.to("cuda"), draws.to("cuda"), 4)
        out = Normalise((0.5,) * 3, (0.2,) * 3, "cuda")(moved)
        assert out.device.type == "cuda" and out.dtype == torch.float32
        assert warp(images.to("cuda"), torch.zeros(8, 4).to("cuda")).device.type == "cuda"
        with pytest.raises(DataDependentOutputException):
            draws[0, 0].item()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_inside_a_cuda_graph():
    images, draws = random_images(128, 3, 32, 32).cuda(), draw(128, 0, 0, 4).cuda()
    normalise = Normalise((0.5,) * 3, (0.2,) * 3, "cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        normalise(crop_flip(images, draws, 4))
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        moved = crop_flip(images, draws, 4)
        out = normalise(moved)
    fresh, next_draws = random_images(128, 3, 32, 32), draw(128, 0, 1, 4)
    images.copy_(fresh)
    draws.copy_(next_draws)
    graph.replay()
    wanted = plain(fresh, next_draws, 4)
    assert torch.equal(moved.cpu(), wanted)
    torch.testing.assert_close(out.cpu(), Normalise((0.5,) * 3, (0.2,) * 3)(wanted), rtol=0, atol=1e-6)
