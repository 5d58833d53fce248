"""Saving and loading: the same bits come back, damage is named, and an interrupted save loses nothing."""

import errno
import hashlib
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import ConvNet, assert_same, images
from torch import nn

import narrowgate as ng
from narrowgate import atomic, streamed
from narrowgate.storage import StorageError, load, save


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x):
        return torch.relu(x + self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))))


class ResNet(nn.Module):
    """Two residual blocks, and a table of constants that no file holds."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU())
        self.blocks = nn.Sequential(Block(12), Block(12))
        self.fc = nn.Linear(12, 5)
        self.register_buffer("offset", torch.arange(5.0) / 3, persistent=False)

    def forward(self, x):
        return self.fc(self.blocks(self.stem(x)).mean((2, 3))) + self.offset


class Tied(nn.Module):
    """An encoder that is used twice under two names."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 8)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight
        self.out = nn.Linear(8, 2)

    def forward(self, x):
        x = torch.relu(self.inner(x.mean((2, 3))))
        return self.out(torch.relu(self.second(torch.relu(self.first(x)))))


def trained(builder, dtype=torch.float32):
    """A model with some statistics and every third filter zero."""
    model = builder()
    model(images(8))
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)) and module.weight.shape[0] > 5:
                module.weight[::3] = 0
                if module.bias is not None:
                    module.bias[::3] = 0
    return model.to(dtype).eval()


def saved(folder, builder=ResNet, dtype=torch.float32, **options):
    model = trained(builder, dtype)
    plan = ng.plan(model, images(dtype=dtype), **options)
    small = ng.compact(model, plan)
    save(small, plan, folder)
    return small


def assert_equal_models(ours, theirs, dtype=torch.float32):
    state, other = ours.state_dict(), theirs.state_dict()
    assert list(state) == list(other)
    for key, value in state.items():
        assert value.dtype == other[key].dtype, key
        assert_same(value, other[key])
    x = images(dtype=dtype)
    with torch.no_grad():
        assert_same(ours.eval()(x), theirs.eval()(x))


@pytest.mark.parametrize("builder", [ResNet, ConvNet, Tied])
@pytest.mark.parametrize("layout", ["aligned", "scatter"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_same_bits_come_back(tmp_path, builder, layout, dtype):
    small = saved(tmp_path / "small", builder, dtype, layout=layout)
    loaded = load(tmp_path / "small", builder)
    assert type(loaded) is builder
    assert_equal_models(small, loaded, dtype)
    assert sum(p.numel() for p in loaded.parameters()) < sum(p.numel() for p in builder().parameters())
    assert all(p.requires_grad for p in loaded.parameters())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small"]
    assert sorted(path.name for path in (tmp_path / "small").iterdir()) == [
        "meta.json",
        "model.safetensors",
        "plan.json",
    ]


def test_tied_weights_are_one_tensor_again(tmp_path):
    small = saved(tmp_path / "small", Tied)
    loaded = load(tmp_path / "small", Tied)
    assert small.first.weight is small.second.weight
    assert loaded.first.weight is loaded.second.weight
    assert len(loaded.first.weight) < 8


def test_weights_trained_after_compacting_are_what_is_saved(tmp_path):
    model = trained(ResNet)
    plan = ng.plan(model, images())
    small = ng.compact(model, plan).train()
    optimizer = torch.optim.SGD(small.parameters(), 0.1)
    small(images()).square().sum().backward()
    optimizer.step()
    save(small, plan, tmp_path / "small")
    loaded = load(tmp_path / "small", ResNet)
    assert_equal_models(small, loaded)
    assert loaded.blocks[0].bn1.num_batches_tracked == 2
    with pytest.raises(AssertionError):
        assert_equal_models(ng.compact(model, plan), loaded)


def test_gates_on_whole_outputs_come_back_frozen(tmp_path):
    model = ResNet()
    gates = ng.attach_gates_(model, blocks=lambda name, module: isinstance(module, Block), init=0.7)
    gates["stem.0"].close_(torch.arange(12) % 4 == 0)
    plan = ng.plan(model, images())
    small = ng.compact(model.eval(), plan)
    save(small, plan, tmp_path / "small")
    loaded = load(tmp_path / "small", ResNet)
    assert_equal_models(small, loaded)
    loaded.blocks[0].gate.g.zero_()
    with pytest.raises(AssertionError):
        assert_equal_models(small, loaded)


def test_loading_in_a_fresh_process(tmp_path):
    small = saved(tmp_path / "small")
    torch.manual_seed(3)
    x = images()
    with torch.no_grad():
        torch.save((x, small(x)), tmp_path / "expected.pt")
    program = (
        "import sys, torch\n"
        "from pathlib import Path\n"
        "from narrowgate.storage import load\n"
        "from test_storage import ResNet\n"
        "folder = Path(sys.argv[1])\n"
        "x, expected = torch.load(folder / 'expected.pt')\n"
        "torch.set_num_threads(1)\n"
        "with torch.no_grad():\n"
        "    assert torch.equal(load(folder / 'small', ResNet).eval()(x), expected)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    run = subprocess.run([sys.executable, "-c", program, tmp_path], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_saving_again_replaces_the_folder(tmp_path):
    saved(tmp_path / "small", ConvNet)
    small = saved(tmp_path / "small", ResNet)
    assert_equal_models(small, load(tmp_path / "small", ResNet))
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


def test_folders_are_made_links_are_followed_and_an_empty_folder_is_fine(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    small = saved(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert_equal_models(small, load(tmp_path / "there", ResNet))
    small = saved(tmp_path / "a" / "b")
    assert_equal_models(small, load(str(tmp_path / "a" / "b"), ResNet))


class Full(OSError):
    """No space left on the device."""


@pytest.mark.parametrize("when", ["first file", "second file", "last file", "rename old", "rename new"])
def test_a_failure_leaves_the_old_folder(tmp_path, monkeypatch, when):
    folder = tmp_path / "small"
    small = saved(folder)
    function = "replace" if when.startswith("rename") else "fsync"
    fails_at = {"first file": 1, "second file": 2, "last file": 3, "rename old": 1, "rename new": 2}[when]
    original, calls = getattr(os, function), []

    def failing(*args):
        calls.append(args)
        if len(calls) == fails_at:
            raise Full
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(atomic.os, function, failing)
        with pytest.raises(Full):
            saved(folder, ConvNet)
    assert [path.name for path in tmp_path.iterdir()] == ["small"]
    assert_equal_models(small, load(folder, ResNet))


@pytest.mark.parametrize("last_words", ["write", "rename old", "rename new"])
def test_a_killed_process_leaves_a_complete_model(tmp_path, last_words):
    folder = tmp_path / "small"
    small = saved(folder)
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from narrowgate import atomic\n"
        "moments = {'write': ('fsync', 1), 'rename old': ('replace', 1), 'rename new': ('replace', 2)}\n"
        "function, left = moments[sys.argv[2]]\n"
        "original = getattr(os, function)\n"
        "def killed(*args):\n"
        "    global left\n"
        "    original(*args)\n"
        "    left -= 1\n"
        "    if not left:\n"
        "        os._exit(9)\n"
        "setattr(os, function, killed)\n"
        "atomic.replace_folder(Path(sys.argv[1]), {'new': b'x', 'other': b'y'})\n"
    )
    run = subprocess.run([sys.executable, "-c", program, folder, last_words], capture_output=True, text=True)
    assert run.returncode == 9, run.stderr
    if last_words == "write":
        assert_equal_models(small, load(folder, ResNet))
    elif last_words == "rename old":
        with pytest.warns(UserWarning, match="was interrupted"):
            assert_equal_models(small, load(folder, ResNet))
    else:
        assert sorted(path.name for path in folder.iterdir()) == ["new", "other"]
        for path in folder.iterdir():
            path.unlink()
    small = saved(folder, ConvNet)
    assert_equal_models(small, load(folder, ConvNet))
    assert not (tmp_path / ".small.previous").exists()


def test_other_files_are_never_deleted(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(StorageError, match=r"notes\.txt.*choose a new folder"):
        saved(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_what_cannot_be_saved(tmp_path):
    model = trained(ResNet)
    plan = ng.plan(model, images())
    small = ng.compact(model, plan)
    with pytest.raises(StorageError, match="compact the model first"):
        save(model, plan, tmp_path / "small")
    with pytest.raises(StorageError, match=r"what ng\.plan returned"):
        save(small, None, tmp_path / "small")
    with pytest.raises(StorageError, match=r"that ng\.compact returned"):
        save(small.state_dict(), plan, tmp_path / "small")
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="is a file"):
        save(small, plan, tmp_path / "file")
    ng.attach_gates_(small)
    with pytest.raises(StorageError, match="still has a gate"):
        save(small, plan, tmp_path / "small")

    class Stateful(nn.Identity):
        def get_extra_state(self):
            return {"anything": object()}

    small = ng.compact(model, plan)
    small.more = Stateful()
    with pytest.raises(StorageError, match=r"'more' .* extra state"):
        save(small, plan, tmp_path / "small")
    small.more = nn.Identity()
    small.more.weight = nn.Parameter(torch.eye(3).to_sparse())
    with pytest.raises(StorageError, match="safetensors can't hold"):
        save(small, plan, tmp_path / "small")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_is_no_saved_model(tmp_path):
    with pytest.raises(StorageError, match=r"there is no folder .*nowhere"):
        load(tmp_path / "nowhere", ResNet)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"file is a file; give the folder"):
        load(tmp_path / "file", ResNet)
    with pytest.raises(StorageError, match="is not a complete saved model, it lacks meta"):
        load(tmp_path, ResNet)


@pytest.mark.parametrize("name", ["model.safetensors", "plan.json", "meta.json"])
def test_a_missing_file(tmp_path, name):
    saved(tmp_path / "small")
    (tmp_path / "small" / name).unlink()
    with pytest.raises(StorageError, match=f"lacks {name}; save the model again"):
        load(tmp_path / "small", ResNet)


@pytest.mark.parametrize("name", ["model.safetensors", "plan.json", "meta.json"])
@pytest.mark.parametrize("damage", ["truncated", "empty", "a byte"])
def test_a_damaged_file(tmp_path, name, damage):
    saved(tmp_path / "small")
    path = tmp_path / "small" / name
    content = bytearray(path.read_bytes())
    if damage == "a byte":
        content[len(content) // 2 if name != "meta.json" else 0] ^= 64
    path.write_bytes({"truncated": content[: len(content) // 2], "empty": b"", "a byte": content}[damage])
    with pytest.raises(StorageError, match=rf"{name} is damaged.*save the model again"):
        load(tmp_path / "small", ResNet)


@pytest.mark.parametrize("name", ["model.safetensors", "plan.json"])
def test_a_file_that_is_something_else_with_the_right_checksum(tmp_path, name):
    saved(tmp_path / "small")
    (tmp_path / "small" / name).write_bytes(b"{}")
    edit_meta(tmp_path / "small", lambda meta: meta["sha256"].update({name: hashlib.sha256(b"{}").hexdigest()}))
    with pytest.raises(StorageError, match=f"{name} can't be read"):
        load(tmp_path / "small", ResNet)


def edit_meta(folder, change):
    meta = json.loads((folder / "meta.json").read_text())
    change(meta)
    (folder / "meta.json").write_text(json.dumps(meta))


def test_another_format(tmp_path):
    saved(tmp_path / "small")
    edit_meta(tmp_path / "small", lambda meta: meta.update(format=2, narrowgate="9.0"))
    with pytest.raises(StorageError, match=r"has format 2.*use the version that wrote it: 9\.0"):
        load(tmp_path / "small", ResNet)
    edit_meta(tmp_path / "small", lambda meta: meta.update(format=1, tied=[]))
    with pytest.raises(StorageError, match="tied is of the wrong type"):
        load(tmp_path / "small", ResNet)
    (tmp_path / "small" / "meta.json").write_text("[]")
    with pytest.raises(StorageError, match="is damaged"):
        load(tmp_path / "small", ResNet)


def test_builders_of_the_wrong_kind(tmp_path):
    saved(tmp_path / "small")

    def gated():
        model = ResNet()
        ng.attach_gates_(model)
        return model

    def without_numbers():
        with torch.device("meta"):
            return ResNet()

    def lazy():
        model = ResNet()
        model.added = nn.LazyLinear(3)
        return model

    for builder, message in (
        (lazy, "builder.. left 'added.weight' without a shape; run the model once"),
        (lambda: torch.compile(ResNet(), backend="eager"), "torch.compile wraps; compile what ng.load returns"),
        (ResNet(), "must be a function"),
        ("ResNet", "must be a function"),
        (lambda: None, "returned a NoneType"),
        (gated, "gated model"),
        (without_numbers, "meta device"),
    ):
        with pytest.raises(StorageError, match=message):
            load(tmp_path / "small", builder)
        if builder is not without_numbers:
            with pytest.raises(StorageError, match=message):
                streamed.load(tmp_path / "small", builder)


def test_a_compiled_model_is_not_saved_under_its_wrappers_names(tmp_path):
    compiled = torch.compile(ConvNet(), backend="eager")
    plan = ng.plan(compiled, images())
    with pytest.raises(StorageError, match=r"wrapped by torch\.compile.*plan and compact the model that was compiled"):
        save(ng.compact(compiled, plan), plan, tmp_path / "small")


def test_the_folder_in_which_the_process_works_is_not_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StorageError, match="is the folder in which this process works"):
        saved(Path())
    assert Path.cwd() == tmp_path.resolve()


def test_builders_of_another_model(tmp_path):
    saved(tmp_path / "small")
    with pytest.raises(
        ng.PlanError, match=r"plan\.json does not fit the helpers\.ConvNet.*saved was a .*ResNet"
    ) as told:
        load(tmp_path / "small", ConvNet)
    assert "wider" not in str(told.value)  # of a model that lacks some of its parameters there is no telling
    with pytest.raises(ng.PlanError, match="applied already"):
        load(tmp_path / "small", lambda: load(tmp_path / "small", ResNet))

    def with_more():
        model = ResNet()
        model.extra = nn.Linear(1, 1)
        return model

    with pytest.raises(StorageError, match=r"only one of them has 'extra\.bias'"):
        load(tmp_path / "small", with_more)

    def with_other_outputs():
        model = ResNet()
        model.fc.bias = nn.Parameter(torch.zeros(6))
        return model

    with pytest.raises(StorageError, match=r"'fc\.bias' has shape \(5,\) in the file and \(6,\) in the model"):
        load(tmp_path / "small", with_other_outputs)


@pytest.mark.parametrize("again", [True, False], ids=["cut again at the end", "not cut again"])
def test_builders_without_the_cuts_of_training(tmp_path, again):
    model = ResNet()
    gates = ng.attach_gates_(model)
    shrinker = ng.Shrinker(model, images())
    for gate in gates.modules():
        gate.close_(torch.arange(gate.size) < 2)
    assert shrinker.shrink(0) is not None
    for gate in gates.modules():
        gate.close_(torch.arange(gate.size) < again)
    plan = ng.plan(model, images())
    assert bool(plan.cuts) == again
    save(ng.compact(model, plan), plan, tmp_path / "small")
    with pytest.raises(ValueError, match=r"wider than the one that was planned: .* ng\.compact\(MyModel\(\), shrinker"):
        load(tmp_path / "small", ResNet)
    load(tmp_path / "small", lambda: ng.compact(ResNet(), shrinker.plan))


def test_builders_that_tie_other_weights(tmp_path):
    saved(tmp_path / "small", Tied)

    def untied():
        model = Tied()
        model.second.weight = nn.Parameter(model.second.weight.detach().clone())
        return model

    with pytest.raises((StorageError, ng.PlanError)):
        load(tmp_path / "small", untied)
    plan = ng.plan(untied(), images())
    save(ng.compact(untied(), plan), plan, tmp_path / "untied")
    with pytest.raises(StorageError, match="builder has to tie the same weights"):
        load(tmp_path / "untied", Tied)


def test_a_file_is_not_written_over_a_folder(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError) as refused:
        atomic.replace_file(tmp_path / "folder", b"")
    assert refused.value.filename == str(tmp_path / "folder")  # and not the new file's name
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_full_disk_is_told_with_the_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(atomic.os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as refused:
        atomic.replace_file(tmp_path / "page.html", b"x")
    assert refused.value.filename == str(tmp_path / "page.html") and not list(tmp_path.iterdir())


def test_a_disk_that_is_read_only_is_told_with_the_file(tmp_path, monkeypatch):
    def refused(path, *_, **__):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(atomic, "write_new", refused)
    monkeypatch.setattr(atomic.Path, "unlink", refused)
    with pytest.raises(OSError, match="Read-only") as error:
        atomic.replace_file(tmp_path / "page.html", b"x")
    assert error.value.filename == str(tmp_path / "page.html")  # and not the new file's name


@pytest.mark.skipif(os.name == "nt", reason="there folders are not synced")
def test_file_systems_that_sync_files_only(tmp_path, monkeypatch):
    usual = os.fsync

    def files_only(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        usual(descriptor)

    monkeypatch.setattr(atomic.os, "fsync", files_only)
    atomic.replace_file(tmp_path / "page.html", b"x")
    atomic.replace_folder(tmp_path / "folder", {"a": b"y"})
    assert (tmp_path / "page.html").read_bytes() + (tmp_path / "folder/a").read_bytes() == b"xy"
