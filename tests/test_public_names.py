"""``import narrowgate``: the public names, each imported when it is first used."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import narrowgate as ng


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_every_public_name_is_what_its_module_has():
    homes = {name: module for module, names in ng._HOMES.items() for name in names}
    assert {*homes, "__version__", "norms", "schedules"} == set(ng.__all__)
    for name, module in homes.items():
        assert getattr(ng, name) is getattr(import_module(module), name)
        assert vars(ng)[name] is getattr(ng, name)  # kept: the next use costs nothing
    assert ng.norms is import_module("narrowgate.norms") and ng.schedules is import_module("narrowgate.schedules")


def test_type_checkers_see_the_same_names_at_the_same_places():
    tree = ast.parse(Path(ng.__file__).read_text())
    (branch,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {alias.name: node.module for node in branch.body for alias in node.names}
    assert {name: seen.pop(name) for name in ("norms", "schedules")} == dict.fromkeys(
        ("norms", "schedules"), "narrowgate"
    )
    assert seen == {name: module for module, names in ng._HOMES.items() for name in names}


def test_a_star_import_and_dir_have_all_of_them():
    out = python(
        "import narrowgate, sys\nbefore = 'torch' in sys.modules\n"
        "listed = set(narrowgate.__all__) <= set(dir(narrowgate))\n"
        "from narrowgate import *\nprint(before, listed, Penalty.__name__, plan.__name__, schedules.__name__)"
    )
    assert out == "False True Penalty plan narrowgate.schedules"


def test_another_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'narrowgate' has no attribute 'nonsense'"):
        _ = ng.nonsense
    with pytest.raises(ImportError, match="cannot import name 'nonsense'"):
        exec("from narrowgate import nonsense")


def test_the_command_line_reads_and_explains_without_torch():
    pytest.importorskip("typer")
    out = python(
        "import sys\nfrom typer.testing import CliRunner\nfrom narrowgate.cli import build_app\n"
        "codes = [CliRunner().invoke(build_app(), words.split()).exit_code for words in "
        "('', '--help', '--version', 'train --help', 'inspect --help', 'measure --help', 'export --help', "
        "'demo --help', 'record --help', 'reproduce --help', 'report --help', 'trian', 'train --nonsense', "
        "'demo --epochs 0')]\n"
        "print(codes, [name for name in ('torch', 'numpy', 'lightning', 'torchvision') if name in sys.modules])"
    )
    assert out == f"{[2, *[0] * 10, 2, 2, 2]} []"
