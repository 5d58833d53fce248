"""What README.md and docs/ say is true: code runs, the diff is the files' own, links lead somewhere."""

import difflib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "docs/architecture.md")


def blocks(language, page="README.md"):
    """The contents of a page's code blocks in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def test_diff_is_that_of_the_examples():
    names = [f"examples/train_{kind}.py" for kind in ("plain", "gated")]
    plain, gated = ((ROOT / name).read_text().splitlines() for name in names)
    expected = "\n".join(difflib.unified_diff(plain, gated, *names, n=1, lineterm=""))
    assert blocks("diff") == [expected + "\n"]


def test_python_blocks_run_one_after_the_other(capsys):
    found = blocks("python")
    assert len(found) >= 2
    namespace = {}
    for number, code in enumerate(found, 1):
        exec(compile(code, f"README.md, python block {number}", "exec"), namespace)
    assert "1370 exponential gates on 4 layers" in capsys.readouterr().out


def test_every_public_name_in_the_readme_exists():
    import narrowgate as ng

    text = (ROOT / "README.md").read_text()
    names = set(re.findall(r"\bng\.(\w+)", text))
    assert {"attach_gates_", "Penalty"} <= names
    assert not [name for name in names if not hasattr(ng, name)]


@pytest.mark.parametrize("page", PAGES)
def test_local_links_lead_somewhere(page):
    targets = [t for t in re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text()) if "://" not in t]
    missing = [target for target in targets if not (ROOT / page).parent.joinpath(target.partition("#")[0]).exists()]
    assert not missing


def test_architecture_names_every_module():
    text = (ROOT / "docs" / "architecture.md").read_text()
    package = ROOT / "src" / "narrowgate"
    modules = {path.name for path in package.glob("*.py")} - {"_version.py"}
    folders = {f"{path.name}/" for path in package.iterdir() if (path / "__init__.py").is_file()}
    missing = [
        name for name in sorted(modules | folders) if not re.search(rf"^  {re.escape(name)}", text, re.MULTILINE)
    ]
    assert not missing, f"describe {missing} in docs/architecture.md"


def test_architecture_names_no_module_that_is_gone():
    (tree,) = [block for block in blocks("") + blocks("", "docs/architecture.md") if "src/narrowgate/" in block]
    named = re.findall(r"^  (\S+)", tree, re.MULTILINE)
    assert len(named) > 10
    assert not [name for name in named if not (ROOT / "src" / "narrowgate" / name).exists()]
