"""What the site needs beyond mkdocs: the repository's files that pages link to, and drawings that follow the theme."""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
OUTSIDE = "repository/"  # where files from outside docs/ lie in the site
LANGUAGES = {".py": "python", ".toml": "toml"}
LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[)#])")
KEPT, SPREAD, SEEDS = r"[\d.]+(?:-[\d.]+){3}(?:: [\d,]+, [\d.]+ %)?", r"[\d.]+ ± [\d.]+", r"\d+ \(seeds? [\d, ]+\)"
WHOLE = re.compile(rf"<td(?=[^>]*>(?:{KEPT}|{SPREAD}|{SEEDS})</td>)")  # 8-19-117-24, 0.78 ± 0.02, 2 (seeds 0, 1)
DRAWING = re.compile(r'<img alt="([^"]*)" src="([^"]*\.svg)" ?/?>')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add every file of the repository that a page links to, and what those link to in turn."""
    todo = [_in_repository(file.src_uri) for file in files.documentation_pages()]
    seen = set(todo)
    while todo:
        page = todo.pop()
        for target in LINK.findall((ROOT / page).read_text(encoding="utf-8")) if page.endswith(".md") else ():
            path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
            if path in seen or "://" in target or not (ROOT / path).is_file() or path.startswith("docs/"):
                continue
            seen.add(path)
            todo.append(path)
            files.append(_file(path, config))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links of the repository to where their target lies in the site."""
    here = posixpath.dirname(_in_repository(page.file.src_uri))

    def moved(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(here, match[0]))
        if "://" in match[0] or not (ROOT / path).is_file():
            return match[0]
        return posixpath.relpath(_in_site(path), posixpath.dirname(page.file.src_uri) or ".")

    return LINK.sub(moved, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put drawings into the page itself, where they follow its switch between light and dark; keep numbers whole."""

    def inlined(match: re.Match[str]) -> str:
        path = Path(config.docs_dir, posixpath.dirname(page.file.src_uri), match[2])
        drawing = path.read_text(encoding="utf-8")
        label = f'class="diagram" aria-label="{match[1]}"'
        return drawing.replace('class="diagram"', label, 1) if 'class="diagram"' in drawing else match[0]

    return DRAWING.sub(inlined, WHOLE.sub('<td class="whole"', html))


def _in_repository(uri: str) -> str:
    """The path in the repository of a page of the site."""
    return re.sub(r"(\.\w+)\.md$", r"\1", uri.removeprefix(OUTSIDE)) if uri.startswith(OUTSIDE) else f"docs/{uri}"


def _in_site(path: str) -> str:
    """The path in the site of a file of the repository; scripts are shown as pages."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return OUTSIDE + path + (".md" if Path(path).suffix in LANGUAGES else "")


def _file(path: str, config: MkDocsConfig) -> File:
    content = (ROOT / path).read_text(encoding="utf-8")
    if language := LANGUAGES.get(Path(path).suffix):
        content = f"# {path}\n\n````{language}\n{content}````\n"
    return File.generated(config, _in_site(path), content=content, inclusion=InclusionLevel.NOT_IN_NAV)
