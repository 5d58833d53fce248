"""README.md and docs/ as tests read them: their text, their code blocks, and tables between markers."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
FENCE = re.compile(r"^( *)(`{3,}|~{3,})([^\n]*)\n(.*?)^\1\2`*$", re.MULTILINE | re.DOTALL)


def text_of(page):
    return (ROOT / page).read_text(encoding="utf-8")


def fences(page):
    """All code blocks of a page as (what stands behind the fence, contents)."""
    return [(match[3].strip(), match[4]) for match in FENCE.finditer(text_of(page))]


def blocks(language, page="README.md"):
    """The contents of a page's code blocks in one language."""
    return [content for info, content in fences(page) if info == language]


def examples(page):
    """A page's Python blocks, each with the text block right behind it, which shows what it prints; None without."""
    pattern = r"^```python\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?"
    return [(m[1], m[2]) for m in re.finditer(pattern, text_of(page), re.MULTILINE | re.DOTALL)]


def prose(page):
    """A page without code, links' targets and what stands between markers."""
    text = re.sub(r"<!-- (\w+): begin -->.*?<!-- \1: end -->", "", text_of(page), flags=re.DOTALL)
    text = re.sub(r"`[^`\n]+`", "", FENCE.sub("", text))
    return re.sub(r"\]\([^)]*\)", "]", text)


def between(page, name):
    """What stands between a page's two markers of a name."""
    (found,) = re.findall(rf"<!-- {name}: begin -->\n(.*?)<!-- {name}: end -->", text_of(page), re.DOTALL)
    return found
