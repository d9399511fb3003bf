"""The documentation site builds without a warning, has every public name, and opens in a browser without an error."""

import functools
import http.server
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from browser import CHROMIUM, needs_chromium

import diff_transformer
import diff_transformer.ops

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.slow
pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site as ``make docs`` builds it: a broken link or a missing reference is an error."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_the_reference_has_every_public_name(site):
    text = (site / "docs" / "api.html").read_text()
    names = set(diff_transformer.__all__) - {"__version__"}
    assert set(diff_transformer.ops.__all__) <= names
    assert set(re.findall(r'<h3 id="diff_transformer\.(\w+)"', text)) == names


def test_every_page_is_in_the_navigation(site):
    config = (ROOT / "mkdocs.yml").read_text()
    pages = [*ROOT.glob("docs/*.md"), *ROOT.glob("figures/**/README.md")]
    named = {path.relative_to(ROOT).as_posix() for path in pages} - {"docs/package.md"}
    assert [name for name in sorted(named) if not re.search(rf": {re.escape(name)}$", config, re.MULTILINE)] == []


def test_formulas_are_mathml(site):
    text = (site / "docs" / "operator.html").read_text()
    assert text.count("<math") > 10
    assert "arithmatex" not in text


def test_no_page_loads_anything_from_another_host(site):
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|iframe)[^>]* src="([^"]+)"|<link[^>]* href="([^"]+)"', page.read_text())
        assert [url for urls in loaded for url in urls if "://" in url] == [], page


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def address(site):
    """The site on a local server: search and its worker do not work from files."""
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_open_in_a_browser(address, scheme):
    """No error in the console, no request to another host, the theme that the system asks for, a search that finds."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(color_scheme=scheme)
        complaints = []
        page.on("console", lambda message: message.type == "error" and complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: request.url.startswith(address) or complaints.append(request.url))
        page.goto(f"{address}/index.html")
        expected = {"light": "default", "dark": "slate"}[scheme]
        page.wait_for_function(f"document.body.dataset.mdColorScheme === '{expected}'")
        assert page.locator("h1").first.inner_text().startswith("diff-transformer")
        page.goto(f"{address}/docs/api.html")
        assert page.get_by_role("heading", name="diff_attention", exact=False).count() > 0
        page.locator(".md-search__input").press_sequentially("matched_baseline")
        page.locator(".md-search-result__item").first.wait_for(timeout=20_000)
        browser.close()
    assert complaints == []
