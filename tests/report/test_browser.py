"""The page in a browser: no errors, no sideways scrolling, tooltips, themes and the explorer."""

from pathlib import Path

import pytest
from made_rows import comparison

from diff_transformer.lab.rows import Rows
from diff_transformer.report import write_report

CHROMIUM = Path("/usr/bin/chromium")
pytestmark = [
    pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Debian's chromium"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'diff-transformer[dev]'")
    with api.sync_playwright() as play:
        started = play.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_report(Rows(comparison()), tmp_path_factory.mktemp("page") / "a.html")


@pytest.fixture
def opened(browser, path):
    """``opened(width, scheme)``: the page and the errors that it reports."""
    pages = []

    def open_(width=1280, scheme="light"):
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(path.as_uri())
        pages.append((page, errors))
        return page

    yield open_
    for page, errors in pages:
        assert errors == []
        page.close()


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_scrolls_sideways_or_is_cut(opened, width, scheme):
    page = opened(width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    shown = page.evaluate("[...document.querySelectorAll('svg')].filter((s) => s.getBoundingClientRect().width).length")
    assert shown == page.evaluate("document.querySelectorAll('svg').length") / 2
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(21, 23, 27)"
    assert dark == (scheme == "dark")


def test_axis_titles_do_not_overlap_labels(opened):
    """Texts of a chart share no more than a few pixels."""
    overlaps = opened().evaluate("""() => {
      const found = [];
      for (const chart of document.querySelectorAll(".wide svg")) {
        const texts = [...chart.querySelectorAll("text")].map((t) => [t.textContent, t.getBoundingClientRect()]);
        const boxes = texts.filter(([words, box]) => words && box.width);
        boxes.forEach(([a, x], i) => boxes.slice(i + 1).forEach(([b, y]) => {
          const width = Math.min(x.right, y.right) - Math.max(x.left, y.left);
          const height = Math.min(x.bottom, y.bottom) - Math.max(x.top, y.top);
          if (width > 3 && height > 5) found.push(`${a} / ${b}`);
        }));
      }
      return found;
    }""")
    assert overlaps == []


def test_marks_say_what_they_stand_for(opened):
    page = opened()
    mark = page.locator(".wide svg [aria-label^='Lower language-modelling loss']").first
    mark.hover(force=True)
    assert page.locator("#tip").inner_text().startswith("Lower language-modelling loss: ")


def test_the_explorer_shows_the_chosen_head_and_token(opened):
    page = opened()
    view = page.locator("#explorer-view")
    assert view.locator("canvas").count() == 3
    assert "DIFF" in view.locator(".ex-status").inner_text()
    view.locator(".ex-heads button").nth(3).click()
    assert "layer 2, head 2 (λ = 0.30)" in view.locator(".ex-status").inner_text()
    view.locator(".ex-tokens").last.focus()
    page.keyboard.press("Home")
    assert "token 1 of 6" in view.locator(".ex-status").inner_text()
    view.get_by_role("radio", name="Transformer", exact=True).click()
    assert view.locator("canvas").count() == 1
    assert page.locator("#spoken").inner_text() != ""
