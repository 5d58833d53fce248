"""What README.md and docs/ say is true: the diff is the files' own, names exist, links work, modules are listed."""

import ast
import difflib
import re

import pytest
from page_helpers import DOCS, ROOT, blocks, examples, text_of

PACKAGE = ROOT / "src" / "narrowgate"
PAGES = (*DOCS, "CHANGELOG.md", "CONTRIBUTING.md", "results/README.md")


def test_diff_is_that_of_the_examples():
    names = [f"examples/train_{kind}.py" for kind in ("plain", "gated")]
    plain, gated = ((ROOT / name).read_text().splitlines() for name in names)
    expected = "\n".join(difflib.unified_diff(plain, gated, *names, n=1, lineterm=""))
    assert blocks("diff") == [expected + "\n"]


@pytest.mark.parametrize("page", ["README.md", "docs/start.md"])
def test_a_torchvision_model_takes_few_lines(page):
    (code,) = [code for code, _ in examples(page) if "import torchvision" in code]
    assert 1 + len(code.splitlines()) < 15  # with the line of pip
    assert "ng.compact(" in code and "ng.verify(" in code


def test_the_readme_is_short_and_leads_to_every_page():
    text = text_of("README.md")
    assert len(text.splitlines()) < 260
    assert not [page for page in DOCS[1:] if page != "docs/index.md" and f"]({page})" not in text]


@pytest.mark.parametrize("page", DOCS)
def test_every_public_name_exists(page):
    import narrowgate as ng

    assert not [name for name in re.findall(r"\bng\.(\w+)", text_of(page)) if not hasattr(ng, name)]


def test_the_readme_names_the_way_from_model_to_file():
    names = set(re.findall(r"\bng\.(\w+)", text_of("README.md")))
    assert {"attach_gates_", "Penalty", "plan", "compact", "verify", "save", "load"} <= names


def test_the_table_of_calls_names_them_all():
    import narrowgate as ng

    names = set(re.findall(r"`ng\.(\w+)", text_of("docs/api.md")))
    calls = {name for name in ng.__all__ if name.islower() and not name.startswith("__")}
    assert calls | {"Penalty", "Budget", "Shrinker"} <= names


@pytest.mark.parametrize("page", PAGES)
def test_local_links_lead_somewhere(page):
    targets = [t for t in re.findall(r"\]\(([^)\s]+)\)", text_of(page)) if "://" not in t]
    missing = [target for target in targets if not (ROOT / page).parent.joinpath(target.partition("#")[0]).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_files_and_make_targets_that_are_named_exist(page):
    text = text_of(page)
    paths = set(re.findall(r"`((?:tests|benchmarks|examples|docs|src|flow)/[\w./]+\.(?:py|md))", text))
    paths |= set(re.findall(r"python ((?:benchmarks|examples)/\w+\.py)", text))
    folders = (ROOT, PACKAGE)
    assert not [path for path in paths if not any((folder / path).exists() for folder in folders)]
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"`make (\w+)`", text))
    assert not [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)]


def tree():
    """The files of the package in the order of docs/architecture.md, as paths from src/narrowgate."""
    (found,) = [block for block in blocks("", "docs/architecture.md") if "src/narrowgate/" in block]
    names, folder = [], ""
    for indent, name in re.findall(r"^(  |    )(\S+)", found, re.MULTILINE):
        folder = folder if len(indent) == 4 else name if name.endswith("/") else ""
        names.append(folder + name if len(indent) == 4 else name)
    return names


def test_architecture_names_every_module():
    described = set(tree())
    modules = {
        path.relative_to(PACKAGE).as_posix()
        for folder in ("", "flow/", "train/")
        for path in PACKAGE.glob(f"{folder}*.py")
    }
    modules |= {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}
    missing = sorted(modules - described - {"_version.py", "flow/__init__.py", "train/__init__.py"})
    assert not missing, f"describe {missing} in docs/architecture.md"


def test_architecture_names_no_module_that_is_gone():
    assert len(tree()) > 10
    assert not [name for name in tree() if not (PACKAGE / name).exists()]


def test_imports_point_up_the_list():
    order = [name for name in tree() if name.endswith(".py") and name != "__init__.py"]
    for position, name in enumerate(order):
        module = ast.parse((PACKAGE / name).read_text())
        imports = [node for node in module.body if isinstance(node, ast.ImportFrom)]
        for source in {f"{node.module}.{alias.name}" for node in imports for alias in node.names}:
            parts = source.split(".")[1:]
            files = {"/".join(parts[:end]) + ".py" for end in (1, 2, 3)} if source.startswith("narrowgate.") else set()
            later = files & set(order[position:])
            assert not later, f"{name} imports {later}, which docs/architecture.md lists below it"
