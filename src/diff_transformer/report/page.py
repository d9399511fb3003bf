"""The page of a comparison as one HTML file that contains its styles, scripts, drawings and data."""

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from string import Template

from diff_transformer.checks import require_extra
from diff_transformer.durable import replacing, require_writable
from diff_transformer.errors import UserError
from diff_transformer.report.claims import bears_on, claim_links, claims_section, other_claims
from diff_transformer.report.comparison import load_comparison
from diff_transformer.report.figures import IN_ORDER, build
from diff_transformer.report.load import ResultsError, check_results
from diff_transformer.report.markup import Html, escape, join, tag
from diff_transformer.report.method import caveats_section, first_screen, method_section, sentence
from diff_transformer.report.models import Results, noted, of_comparison

SCRIPTS = ("page.js", "explorer.js")
LIMIT = 3_000_000  # bytes of a page


def write_report(results: Results | dict | Path | str, path: Path | str, *, overwrite: bool = False) -> Path:
    """Write the page of a comparison and return its path.

    ``results`` is the folder of a comparison, the path of its results.json or what that holds, or ``Results``.
    Sections without data are left out. Raises FileExistsError if ``path`` exists and ``overwrite`` is False, and
    ResultsError if ``results`` is not a comparison or its page would exceed 3 MB.
    """

    def render() -> str:
        if isinstance(results, str | Path):
            return render_page(load_comparison(results))
        return render_page(check_results(results) if isinstance(results, dict) else results)

    return save_page(render, path, overwrite=overwrite)


def save_page(render: Callable[[], str], path: Path | str, *, overwrite: bool = False) -> Path:
    """Write the page that ``render`` returns to ``path`` atomically.

    Before rendering, it raises RuntimeError without the extra ``report``, FileExistsError if ``path`` exists and
    ``overwrite`` is False, and UserError if the folder is not writable. It raises ResultsError for a page above 3 MB.
    """
    path = Path(path)
    require_installed()
    require_writable(path.parent)
    if path.exists() and not overwrite:
        raise UserError(f"{path} exists; give another path, or --overwrite (overwrite=True) to replace it")
    page = render().encode("utf-8")
    if len(page) > LIMIT:
        raise ResultsError(
            f"the page would have {len(page):,} bytes, above {LIMIT:,}; give fewer results or seeds, or shorter rows"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part:
        part.write_bytes(page)
    return path


def require_installed() -> None:
    """Raise RuntimeError without the extra ``report``: every page draws charts, and most compute intervals."""
    require_extra("report", "a report", "scipy", "vl_convert")


def render_page(results: Results | dict) -> str:
    """The whole page as a string."""
    shown = of_comparison(results) if isinstance(results, dict) else results
    built = [(build(module, shown), getattr(module, "EVAL", "")) for module in IN_ORDER]
    figures = [noted(figure, shown, name) if name else figure for figure, name in built if figure is not None]

    def figure_of(claim: dict) -> str | None:
        return next((f.id for f in figures if bears_on(claim, f.source)), None)

    about = shown.about
    sections = [(f.id, f.title) for f in figures] + [("method", "How this was measured"), ("caveats", "Caveats")]
    return fill_page(
        title=about.get("title") or "DIFF and Transformer, compared",
        description=sentence(shown),
        first_screen=first_screen(shown),
        claims=join([claims_section(about, figure_of) or "", other_claims(about)]),
        contents=contents(sections),
        figures=join(f.html(i, claim_links(about, f.source)) for i, f in enumerate(figures, 1)),
        method=method_section(about),
        caveats=caveats_section(shown),
    )


def fill_page(
    *,
    title: object,
    description: object,
    first_screen: Html,
    contents: Html,
    figures: Html,
    claims: Html | None = None,
    method: Html | None = None,
    caveats: Html | None = None,
) -> str:
    """The template with its parts, styles and scripts; title and description are text."""
    here = files("diff_transformer.report")
    return Template((here / "template.html").read_text(encoding="utf-8")).substitute(
        title=escape(title),
        description=escape(description),
        style=(here / "page.css").read_text(encoding="utf-8"),
        first_screen=first_screen,
        claims=claims or "",
        contents=contents,
        figures=figures,
        method=method or "",
        caveats=caveats or "",
        script="\n".join((here / name).read_text(encoding="utf-8") for name in SCRIPTS),
    )


def contents(sections: list[tuple[str, str]]) -> Html:
    """Links to the sections, (id, title)."""
    items = [tag("li", tag("a", title, href=f"#{name}")) for name, title in sections]
    return tag("nav", tag("ol", *items), class_="contents", aria_label="Sections")
