"""What README.md and docs/ say is true: code runs and prints what they show, the diff is the files' own, links work."""

import ast
import difflib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "narrowgate"
DOCS = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
PAGES = (*DOCS, "CHANGELOG.md", "CONTRIBUTING.md", "results/README.md")


def text_of(page):
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(language, page="README.md"):
    """The contents of a page's code blocks in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text_of(page), re.MULTILINE | re.DOTALL)


def examples(page):
    """A page's Python blocks, each with the text block right behind it, which shows what it prints; None without."""
    pattern = r"^```python\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?"
    return [(m[1], m[2]) for m in re.finditer(pattern, text_of(page), re.MULTILINE | re.DOTALL)]


def without_trailing_spaces(text):
    return [line.rstrip() for line in text.splitlines()]


def test_diff_is_that_of_the_examples():
    names = [f"examples/train_{kind}.py" for kind in ("plain", "gated")]
    plain, gated = ((ROOT / name).read_text().splitlines() for name in names)
    expected = "\n".join(difflib.unified_diff(plain, gated, *names, n=1, lineterm=""))
    assert blocks("diff") == [expected + "\n"]


@pytest.mark.parametrize("page", [page for page in DOCS if examples(page)])
def test_python_blocks_run_one_after_the_other(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "page"}
    printed = ""
    for number, (code, shown) in enumerate(examples(page), 1):
        exec(compile(code, f"{page}, python block {number}", "exec"), namespace)
        output = capsys.readouterr().out
        if shown is not None:
            assert without_trailing_spaces(shown) == without_trailing_spaces(output), f"{page}, python block {number}"
        printed += output
    if page == "README.md":
        assert "1370 exponential gates on 4 layers" in printed and "same function" in printed


def test_examples_are_there_and_show_output():
    shown = {page: [text for _, text in examples(page) if text] for page in DOCS}
    assert shown["README.md"] and len(shown["docs/removing.md"]) >= 3
    assert sum(len(texts) for texts in shown.values()) == sum(len(blocks("text", page)) for page in DOCS)


def test_a_torchvision_model_takes_few_lines():
    (code,) = [code for code, _ in examples("README.md") if "import torchvision" in code]
    assert 1 + len(code.splitlines()) < 15  # with the line of pip


@pytest.mark.parametrize("page", DOCS)
def test_every_public_name_exists(page):
    import narrowgate as ng

    names = set(re.findall(r"\bng\.(\w+)", text_of(page)))
    assert names and not [name for name in names if not hasattr(ng, name)]


def test_the_readme_names_the_whole_pipeline():
    import narrowgate as ng

    names = set(re.findall(r"\bng\.(\w+)", text_of("README.md")))
    calls = {name for name in ng.__all__ if name.islower() and not name.startswith("__")}
    assert calls | {"Penalty"} <= names


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
