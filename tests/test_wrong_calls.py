"""Every command ends with 2 where it was called wrongly and with 1 where it failed, and says why."""

import codecs
import re
import shlex
import shutil

import pytest
import torch
from engine_helpers import LENET, train, write_images

from narrowgate import cli
from narrowgate.train.recipe import Recipe
from narrowgate.train.run_folder import RESULT

pytest.importorskip("typer")

from typer.testing import CliRunner

WRONG = (
    ("demo --epochs 0", "--epochs"),
    ("demo --strength inf", "must be a finite number"),
    ("demo --penalty l3", "'l3'"),
    ("train nowhere.toml", "nowhere.toml: no such recipe; did you mean"),
    ("train folder", "folder: can't be read as a recipe: it is a folder; give a file in it"),
    ("train broken.toml", "broken.toml: not valid TOML: Invalid value (at line 2, column 8): name = lenet5"),
    ("train latin.toml", "latin.toml: can't be read as a recipe: line 2 is not UTF-8; save it as UTF-8"),
    (
        "train mine.toml --set penalty.kind=l3",
        'mine.toml with --set penalty.kind=l3: penalty.kind = "l3": must be "l1"',
    ),
    ("train mine.toml --set nonsense=1", "--set nonsense=1: write table.key=value"),
    (
        "train mine.toml --set train.epochs",
        "--set train.epochs: write table.key=value, for example --set train.epochs=3",
    ),
    ("train mine.toml --set train.epoch=3", "unknown key train.epoch; [train] takes epochs"),
    ("train mine.toml --set gates.skip=[fc1]", "[fc1] is not a value of TOML: Invalid value; in brackets, texts need"),
    ('train mine.toml --set "penalty.kind=\'l1"', "--set penalty.kind='l1: 'l1 is not a value of TOML: Expected"),
    ("train mine.toml --set model.name=lenet6 --data 28.npz", "there is no network 'lenet6'"),
    ("train mine.toml --data nowhere.npz", "nowhere.npz does not exist"),
    ("train mine.toml --data 28.npz --out file.txt", "file.txt is a file: choose a folder with --out"),
    ("train mine.toml --data 28.npz --out file.txt/run", "Not a directory"),
    ("train mine.toml --data 28.npz --out run", "run holds a run: go on with --resume"),
    ("train mine.toml --accelerator sundial", "'sundial'"),
    ("sweep nowhere.toml --over seed=0,1", "nowhere.toml: no such recipe"),
    ("sweep mine.toml --over seed", "--over seed: write table.key=a,b,c"),
    (
        "sweep mine.toml --over nonsense=1",
        "--over nonsense=1: write table.key=value, for example --over train.epochs=3",
    ),
    ("sweep mine.toml --over penalty.kind=l1,l3", 'with --over penalty.kind=l3: penalty.kind = "l3"'),
    ("sweep mine.toml --over gates.skip=[fc1]", "--over gates.skip=[fc1]: [fc1] is not a value of TOML"),
    ("sweep mine.toml --over seed=0 --out run", "run holds something else than a sweep"),
    ("sweep mine.toml --over seed=0 --address localhost:1", "no Ray at --address localhost:1: "),
    ("inspect nowhere", "there is no folder nowhere, and there is no network 'nowhere'"),
    ("inspect lenet6", "did you mean lenet5"),
    ("inspect runs/none", "there is no folder runs/none"),
    ("inspect lenet5 --image-shape 3,32,32", "lenet5 takes images of 1x28x28"),
    ("inspect folder", "folder is neither a run"),
    ("inspect file.txt", "file.txt is a file"),
    ("inspect run/small --model mobilenetv2", "holds a narrowgate.models.lenet.LeNet5, and --model mobilenetv2 makes"),
    ("inspect run/small --model lenet5 --classes 3", "--model lenet5 makes another network"),
    ("measure no.such.module:make --image-shape 1,8,8", "can't be imported"),
    ("measure lenet5", "lenet5 is a whole network: add --zero 0.5"),
    ("measure run --zero 0.5", "run holds a small network already"),
    ("measure run --modes grph", "unknown mode 'grph'"),
    ("measure run --json file.txt/x.json", "file.txt: "),
    ("export torchvision/resnet19 --out x.onnx", "torchvision has no image classifier 'resnet19'"),
    ("export run --out x.bin", "does not end in .onnx or .pt2"),
    ("export run --out x.onnx --format torch", "x.onnx is named as another format's file; write x.pt2 for torch"),
    ("export run --out folder --format torch", "folder is a folder; give the name of a file"),
    ("report nowhere", "there is no nowhere"),
    ("report folder", "folder is not a run"),
    ("report file.txt", "file.txt is neither a run's folder nor a record of one"),
    ("report run --out folder", "folder is a folder"),
    ("record nowhere --out x.json", "nowhere is not the folder of a run"),
    ("record run --out folder", "folder: "),
    ("record run --out x.json --recipe nowhere.toml", "nowhere.toml: no such recipe"),
    ("record run --out x.json --curve --device sundial", "can't compute on --device sundial"),
    ("reproduce nonsense", "'nonsense'"),
    ("reproduce mnist --results nowhere", "there is no folder nowhere"),
    ("reproduce mnist --write nowhere.md", "there is no page nowhere.md"),
    ("reproduce mnist --train --only nonsense", "mnist has no row 'nonsense'"),
    ("reproduce mnist --train --recipes nowhere", "there is no recipe nowhere/"),
)
FAILED = (
    ("demo --epochs 1 --strength 0", "No gate closed"),
    ("train mine.toml --data 28.npz --out nan --set optimizer.lr=1e30", "the training loss of epoch 1 is nan"),
    ("train damaged/recipe.toml --data 28.npz --resume", "result.json is damaged"),
    ("sweep mine.toml --over seed=0 --out swept", "sweep.json can't be read as a sweep"),
    ("inspect damaged", "result.json is damaged"),
    ("inspect failing_maker:make --image-shape 1,8,8", "failing_maker:make failed: ValueError: oh"),
    ("measure lenet5 --zero 0.5 --devices cuda", "not timed: cuda"),
    ("export damaged --out x.pt2", "result.json is damaged"),
    ("report damaged", "result.json is not JSON"),
    ("record damaged --out x.json", "result.json is damaged"),
    ("record run --out x.json --curve --device cuda", "can't compute on --device cuda"),
    ("reproduce mnist --results results", "bad.json can't be read as a result"),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a run, a damaged one, recipes and other files."""
    place = tmp_path_factory.mktemp("wrong")
    train(LENET, place / "run", write_images(place / "28.npz", 28), "train.epochs=1", "penalty.strength=0.5")
    (shutil.copytree(place / "run", place / "damaged") / RESULT).write_text("{")
    for folder in ("folder", "swept", "results"):
        (place / folder).mkdir()
    (place / "swept" / "sweep.json").write_text("{")
    (place / "results" / "bad.json").write_text('{"what": "a run of narrowgate train"}')
    (place / "file.txt").write_text("x")
    (place / "failing_maker.py").write_text("def make():\n    raise ValueError('oh')\n")
    (place / "mine.toml").write_text(LENET)
    (place / "broken.toml").write_text("[model]\nname = lenet5\n")
    (place / "latin.toml").write_bytes("# a\n# Größe\n".encode("latin-1"))
    return place


def check(place, monkeypatch, call, status, message):
    if call.startswith("sweep"):
        pytest.importorskip("ray")
    monkeypatch.chdir(place)
    before = sorted(place.rglob("*.json"))
    result = CliRunner().invoke(cli.build_app(), shlex.split(call))
    assert isinstance(result.exception, SystemExit), result.exception
    said = " ".join(re.sub(r"[^\x20-\x7e]", " ", result.output).split())
    assert (result.exit_code, message in said) == (status, True), said
    ours = [line for line in result.stderr.splitlines() if line.startswith("narrowgate: ")]
    assert len(ours) == len(result.stderr.splitlines()) == 1 or "Usage: " in said or status == 1
    if not call.startswith("sweep"):
        assert sorted(place.rglob("*.json")) == before


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_a_wrong_call_ends_with_2(place, monkeypatch, call, message):
    check(place, monkeypatch, call, 2, message)


@pytest.mark.parametrize(("call", "message"), FAILED)
def test_a_failure_ends_with_1(place, monkeypatch, call, message):
    if "cuda" in call and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    if call.startswith("demo"):
        pytest.importorskip("sklearn")
    check(place, monkeypatch, call, 1, message)


def test_every_command_is_here():
    from typer.main import get_command

    for calls in (WRONG, FAILED):
        assert {call.partition(" ")[0] for call, _ in calls} == set(get_command(cli.build_app()).commands)


def test_recipes_of_other_editors_are_the_same_recipe(tmp_path):
    for name, text in (
        ("windows", LENET.replace("\n", "\r\n")),
        ("mark", LENET),
        ("both", LENET.replace("\n", "\r\n")),
    ):
        mark = codecs.BOM_UTF8 if name in ("mark", "both") else b""
        (tmp_path / name).write_bytes(mark + text.encode())
        assert Recipe.load(tmp_path / name) == Recipe.from_toml(LENET)


def test_a_quoted_text_in_a_setting_is_the_text():
    for value in ("l2", '"l2"', "'l2'", ' "l2" '):
        assert Recipe.from_toml(LENET, ["penalty.proximal=false", f"penalty.kind={value}"]).penalty.kind == "l2"
