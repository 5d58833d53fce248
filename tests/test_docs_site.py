"""The documentation's site: it builds without a warning, needs no other host, and works in a browser."""

import functools
import http.server
import os
import re
import subprocess
import sys
import threading
import time

import chromium
import pytest
from page_helpers import DOCS, ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return folder


def test_the_site_has_every_page_and_file_that_is_linked(site):
    for page in DOCS[1:]:
        html = (site / page.removeprefix("docs/").replace(".md", ".html")).read_text(encoding="utf-8")
        for target in re.findall(r'(?:href|src)="([^"#:]+)[#"]', html):
            assert (site / target).exists(), f"{page}: {target}"
    assert (site / "repository" / "examples" / "train_gated.py.html").exists()


def test_the_site_loads_nothing_from_elsewhere(site):
    for path in site.rglob("*.html"):
        html = path.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe|source)[^>]*\bsrc=\"?([^\s\">]+)", html)
        loaded += re.findall(r"<link[^>]*\bhref=\"?([^\s\">]+)", html)
        assert loaded and not [url for url in loaded if "//" in url], path
    for path in site.glob("stylesheets/*.css"):
        assert "url(" not in path.read_text() and "@import" not in path.read_text()


def test_drawings_are_part_of_their_pages(site):
    html = (site / "how-it-works.html").read_text(encoding="utf-8")
    assert html.count('class="diagram" aria-label="') == 4 and ".svg" not in re.sub(r"logo\.svg", "", html)


def test_the_tables_of_the_paper_can_be_read(site):
    html = (site / "reproduction.html").read_text(encoding="utf-8")
    for cell in ("8-19-117-24", "0.78 ± 0.02", "3 (seeds 0, 1, 2)", "7-12-36-29: 3,609, 0.70 %"):
        assert f'<td class="whole">{cell}</td>' in html
    assert "<li>:" not in html  # a note that begins with a dash


def test_the_reference_shows_arguments_and_what_they_mean(site):
    html = (site / "api.html").read_text(encoding="utf-8")
    assert 'id="narrowgate.flow.plan.plan"' in html and "cuts a residual stream only where" in html
    assert 'id="narrowgate.Penalty.proximal_"' in html


# --- in a browser


@pytest.fixture(scope="module")
def address(site):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def wait_for(page, condition):
    """Look until a condition in JavaScript holds; its last value."""
    deadline, value = time.monotonic() + 20, None
    while not value and time.monotonic() < deadline:
        time.sleep(0.05)
        try:
            value = page.evaluate(condition)
        except RuntimeError:  # asked between two pages
            value = None
    return value


def go(page, url):
    page.evaluate(f"void setTimeout(() => location.assign('{url}'))")
    assert wait_for(page, f"location.href === '{url}' && document.readyState === 'complete'"), url


needs_browser = pytest.mark.skipif(chromium.find() is None, reason="needs Chromium; CHROMIUM can name it")


@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_pages_open_without_an_error(address, width, dark):
    with chromium.Page(chromium.find(), width, 900, dark=dark) as page:
        for name in ("index", "how-it-works", "api", "comparison"):
            go(page, f"{address}{name}.html")
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
                f"{name} is wider than the window"
            )
        assert not page.errors
        assert not [url for url in page.requests if not url.startswith((address, "data:", "blob:", "about:"))]


@needs_browser
def test_drawings_follow_the_switch_and_search_finds(address):
    colour = "getComputedStyle(document.querySelector('.diagram text')).fill"
    with chromium.Page(chromium.find(), 1280, 900, dark=True) as page:
        go(page, f"{address}how-it-works.html")
        dark = page.evaluate(colour)
        page.evaluate("document.body.setAttribute('data-md-color-scheme', 'default')")
        assert page.evaluate(colour) != dark
        page.evaluate("document.querySelector('.md-search__input').focus()")
        typed = "const i = document.querySelector('.md-search__input'); i.value = 'proximal'"
        page.evaluate(f"(() => {{ {typed}; i.dispatchEvent(new KeyboardEvent('keyup', {{bubbles: true}})) }})()")
        assert wait_for(page, "document.querySelectorAll('.md-search-result__item').length")
