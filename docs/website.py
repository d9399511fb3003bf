"""Hook of mkdocs for ``mkdocs.yml``: which files the site has, and its formulas as MathML.

The site has the paths of the repository, so that the links of README.md, docs/ and figures/ hold in both places.
"""

import re
import sys
from html import unescape
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))
import reference_pages  # noqa: E402

PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LOG.md", "docs/**/*.md", "figures/**/*.md")
LINKED = re.compile(r"\]\(([^)\s#]+)")  # the target of a link or an image
NOT_ON_SITE = {"docs/package.md"}


def on_config(config):
    """Show fenced blocks ``math`` as formulas."""
    fence = {"name": "math", "class": "math", "format": math_block}
    config.mdx_configs["pymdownx.superfences"] = {"custom_fences": [fence]}
    return config


def on_files(files: Files, config) -> Files:
    """Replace the files of docs/ by the pages above and every file that one of them links to."""
    pages = [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
    wanted = {path.relative_to(ROOT).as_posix(): path for path in pages}
    for page in pages:
        for target in LINKED.findall(page.read_text(encoding="utf-8")):
            path = (page.parent / target).resolve()
            if "://" not in target and path.is_file() and path.is_relative_to(ROOT):
                wanted[path.relative_to(ROOT).as_posix()] = path
    theme = [file for file in files if not (file.abs_src_path or "").startswith(str(ROOT / "docs"))]
    made = [File.generated(config, name, abs_src_path=str(path)) for name, path in wanted.items()]
    made += [File.generated(config, name, content=page()) for name, page in reference_pages.PAGES.items()]
    return Files(theme + [file for file in made if file.src_uri not in NOT_ON_SITE])


def math_block(source: str, language: str, css_class: str, options: dict, md, **kwargs) -> str:
    """A fenced block ``math`` (LaTeX) as displayed MathML."""
    return convert(source.strip(), display="block")


def on_page_content(html: str, **kwargs) -> str:
    """Formulas between dollar signs as MathML."""
    return re.sub(
        r'<span class="arithmatex">\\\((.*?)\\\)</span>', lambda found: convert(unescape(found[1])), html, flags=re.S
    )
