"""Checkpoints: the same bits come back, damage is named, and no failure loses what was saved before."""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from helpers import assert_same

from narrowgate import atomic
from narrowgate.train.checkpoint import CheckpointError, Checkpoints

FILES = ["SHA256SUMS", "meta.json", "tensors.safetensors"]


def tensors(epoch):
    return {"model/weight": torch.arange(12.0) + epoch, "random/torch": torch.get_rng_state()}


def meta(epoch):
    return {"recipe": f"[train]\nepochs = {epoch}\n", "plan": None, "accuracy": 0.1 * epoch}


def filled(folder, last=3, keep=2):
    checkpoints = Checkpoints(folder / "checkpoints", keep)
    for epoch in range(1, last + 1):
        checkpoints.save(epoch, tensors(epoch), meta(epoch))
    return checkpoints


def names(checkpoints):
    return sorted(path.name for path in checkpoints.folder.iterdir())


def assert_is(saved, epoch):
    assert saved is not None and saved.epoch == epoch
    assert saved.meta == meta(epoch)
    assert_same(saved.tensors["model/weight"], tensors(epoch)["model/weight"])


def test_the_newest_are_kept_and_the_last_is_read(tmp_path):
    checkpoints = filled(tmp_path, last=5, keep=2)
    assert names(checkpoints) == ["epoch-000004", "epoch-000005"]
    assert_is(checkpoints.latest(), 5)
    assert checkpoints.best() is None
    path = checkpoints.save_best(5, tensors(4), meta(4))
    assert path == checkpoints.folder / "best"
    assert checkpoints.best().epoch == 5 and checkpoints.best().meta == meta(4)
    checkpoints.save_best(6, tensors(6), meta(6))
    assert_is(checkpoints.best(), 6)
    assert_is(checkpoints.latest(), 5)
    assert names(checkpoints) == ["best", "epoch-000004", "epoch-000005"]
    assert sorted(path.name for path in (checkpoints.folder / "epoch-000005").iterdir()) == FILES


def test_nothing_saved_yet(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1)
    assert checkpoints.latest() is None and checkpoints.best() is None
    assert not checkpoints.folder.exists()
    with pytest.raises(ValueError, match="keep must be 1 or more"):
        Checkpoints(tmp_path, 0)


def test_a_checkpoint_says_what_it_is(tmp_path):
    path = filled(tmp_path).folder / "epoch-000003"
    described = json.loads((path / "meta.json").read_text())
    assert described["format"] == 1 and described["epoch"] == 3
    assert described["torch"] == torch.__version__ and described["meta"] == meta(3)
    if shutil.which("sha256sum"):
        assert subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=path).returncode == 0


def raw(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()


def test_all_kinds_of_tensors_come_back(tmp_path):
    base = torch.randn(4, 6)
    kinds = {
        "float32": torch.tensor([0.0, -0.0, float("inf"), float("nan"), 1e-45]),
        "bfloat16": torch.randn(3, 5).bfloat16(),
        "float16": torch.randn(3).half(),
        "float64": torch.randn(2, dtype=torch.float64),
        "int64": torch.tensor([2**62, -1]),
        "bool": torch.tensor([[True], [False]]),
        "uint8": torch.arange(5, dtype=torch.uint8),
        "zero-dim": torch.tensor(3.5),
        "zero-dim int": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "empty too": torch.empty(0, 3),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "transposed": base.t(),
        "same storage": base,
        "view": base[1:3, 2:],
        "overlapping": base[0],
        "expanded": torch.tensor([1.0, 2.0])[:, None].expand(2, 3),
        "parameter": torch.nn.Parameter(torch.randn(2)),
        "name with/odd é signs": torch.ones(1),
    }
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1)
    checkpoints.save(0, kinds, {})
    found = checkpoints.latest().tensors
    assert found.keys() == kinds.keys()
    for name, tensor in kinds.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert raw(found[name]) == raw(tensor), name
    found["same storage"].zero_()
    assert found["view"].any() and not found["view"].requires_grad


def damage_(path, how):
    if how == "missing":
        path.unlink()
        return
    content = bytearray(path.read_bytes())
    if how == "a byte":
        content[len(content) // 2] ^= 1
    path.write_bytes({"truncated": content[: len(content) // 2], "empty": b"", "a byte": content}[how])


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["truncated", "empty", "a byte", "missing"])
def test_a_damaged_last_checkpoint_falls_back(tmp_path, name, how):
    checkpoints = filled(tmp_path)
    damage_(checkpoints.folder / "epoch-000003" / name, how)
    with pytest.warns(UserWarning, match=r"damaged: .*epoch-000003.*going back to .*epoch-000002"):
        assert_is(checkpoints.latest(), 2)
    checkpoints.save(3, tensors(3), meta(3))
    assert_is(checkpoints.latest(), 3)
    assert names(checkpoints) == ["epoch-000002", "epoch-000003"]


def test_what_is_not_json_or_no_folder(tmp_path):
    checkpoints = filled(tmp_path, keep=3)
    resave_(checkpoints.folder / "epoch-000003", lambda described: described.pop("meta"))
    shutil.rmtree(checkpoints.folder / "epoch-000002")
    (checkpoints.folder / "epoch-000002").write_text("a file")
    with pytest.warns(UserWarning, match=r"epoch-000003 \(KeyError: 'meta'\); .*epoch-000002.*epoch-000001"):
        assert_is(checkpoints.latest(), 1)


def resave_(path, change):
    """Change a checkpoint's description and make its checksums right again."""
    described = json.loads((path / "meta.json").read_text())
    change(described)
    (path / "meta.json").write_text(json.dumps(described))
    digests = {name: hashlib.sha256((path / name).read_bytes()).hexdigest() for name in FILES if name != "SHA256SUMS"}
    (path / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for name, digest in digests.items()))


def test_another_format_is_no_damage(tmp_path):
    checkpoints = filled(tmp_path)
    resave_(checkpoints.folder / "epoch-000003", lambda described: described.update(format=2, narrowgate="9.0"))
    with pytest.raises(CheckpointError, match=r"has format 2.*use the version that wrote it: 9\.0"):
        checkpoints.latest()


def test_all_damaged(tmp_path):
    checkpoints = filled(tmp_path)
    checkpoints.save_best(3, tensors(3), meta(3))
    for path in checkpoints.folder.iterdir():
        damage_(path / "tensors.safetensors", "a byte")
    with pytest.raises(CheckpointError, match=r"epoch-000003 .*epoch-000002 .*start from the beginning"):
        checkpoints.latest()
    with pytest.raises(CheckpointError, match=r"best checkpoint is damaged: .*tensors\.safetensors.*delete it"):
        checkpoints.best()


def test_damaged_ones_do_not_push_out_whole_ones(tmp_path):
    checkpoints = filled(tmp_path, last=4, keep=3)
    for epoch in (3, 4):
        damage_(checkpoints.folder / f"epoch-{epoch:06d}" / "meta.json", "truncated")
    with pytest.warns(UserWarning, match="going back"):
        checkpoints = Checkpoints(checkpoints.folder, 2)
        assert_is(checkpoints.latest(), 2)
    checkpoints.save(3, tensors(3), meta(3))
    assert names(checkpoints) == ["epoch-000002", "epoch-000003"]
    assert_is(checkpoints.latest(), 3)


def test_a_run_that_starts_again_does_not_mix_with_the_old_one(tmp_path):
    filled(tmp_path)
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2)
    with pytest.raises(CheckpointError, match=r"holds a checkpoint of epoch 3, after epoch 1.*resume that run"):
        checkpoints.save(1, tensors(1), meta(1))
    assert_is(checkpoints.latest(), 3)


@pytest.mark.parametrize("call", ["save", "save_best"])
@pytest.mark.parametrize("function, at", [("fsync", 1), ("fsync", 3), ("replace", 1), ("replace", 2)])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_a_failed_write_loses_nothing(tmp_path, monkeypatch, call, function, at, number):
    checkpoints = filled(tmp_path)
    checkpoints.save_best(2, tensors(2), meta(2))
    original, calls = getattr(os, function), []

    def failing(*args, **kwargs):
        calls.append(args)
        if len(calls) == at:
            raise OSError(number, os.strerror(number))
        return original(*args, **kwargs)

    epoch = 3 if call == "save" else 4  # an epoch saved again, so that there is something to replace
    with monkeypatch.context() as patch:
        patch.setattr(atomic.os, function, failing)
        remedy = "free 1 MB" if number == errno.ENOSPC else "make the folder writable"
        with pytest.raises(CheckpointError, match=rf"can't write .*earlier ones are whole: {remedy}.*resume"):
            getattr(checkpoints, call)(epoch, tensors(9), meta(9))
    assert names(checkpoints) == ["best", "epoch-000002", "epoch-000003"]
    assert_is(checkpoints.latest(), 3)
    assert_is(checkpoints.best(), 2)
    getattr(checkpoints, call)(4, tensors(4), meta(4))
    assert_is(checkpoints.latest() if call == "save" else checkpoints.best(), 4)


KILLED = """
import os, sys
from pathlib import Path
import torch
from narrowgate.train.checkpoint import Checkpoints
function, left = sys.argv[2], int(sys.argv[3])
original = getattr(os, function)
def killed(*args, **kwargs):
    global left
    original(*args, **kwargs)
    left -= 1
    if not left:
        os._exit(9)
setattr(os, function, killed)
checkpoints = Checkpoints(Path(sys.argv[1]), 2)

checkpoints.save(3, {"model/weight": torch.arange(12.0) + 3}, {"recipe": "[train]\\nepochs = 3\\n", "plan": None,
     "accuracy": 0.1 * 3})
"""


@pytest.mark.parametrize("function, at", [("fsync", 2), ("replace", 1), ("replace", 3), ("unlink", 1)])
def test_a_killed_write_loses_nothing_and_is_cleaned_up(tmp_path, function, at):
    checkpoints = filled(tmp_path, last=3)
    # 3 is written again: replace 1 moves the old one aside, 2 puts the new one in place, 3 hides an old one to remove.
    shutil.copytree(checkpoints.folder / "epoch-000002", checkpoints.folder / "epoch-000001")
    run = subprocess.run(
        [sys.executable, "-c", KILLED, checkpoints.folder, function, str(at)], capture_output=True, text=True
    )
    assert run.returncode == 9, run.stderr
    assert any(name.startswith(".") for name in names(checkpoints))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_is(checkpoints.latest(), 3)
    checkpoints.save(4, tensors(4), meta(4))
    assert names(checkpoints) == ["epoch-000003", "epoch-000004"]
    assert_is(Checkpoints(checkpoints.folder, 2).latest(), 4)


def test_other_files_stay(tmp_path):
    checkpoints = filled(tmp_path)
    for name in ("notes.txt", ".hidden", "epoch-x", ".best.old.txt"):
        (checkpoints.folder / name).write_text("mine")
    checkpoints.save(4, tensors(4), meta(4))
    assert names(checkpoints) == [".best.old.txt", ".hidden", "epoch-000003", "epoch-000004", "epoch-x", "notes.txt"]


def test_twenty_megabytes_take_little_time(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1)
    many = {f"model/{i}": torch.randn(5000) for i in range(1000)}
    times = []
    for epoch in range(5):
        start = time.perf_counter()
        checkpoints.save(epoch, many, meta(epoch))
        times.append(time.perf_counter() - start)
    assert min(times) < 0.4  # about 0.1 s; the slack is for busy machines and slow disks


def test_the_folder_may_be_anywhere(tmp_path):
    checkpoints = Checkpoints(Path(tmp_path / "a" / "b"), 1)
    checkpoints.save(0, {}, {})
    assert checkpoints.latest().tensors == {} and checkpoints.latest().meta == {}
