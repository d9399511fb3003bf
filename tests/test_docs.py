"""The pages are true: links exist, commands parse, the tutorial runs."""

import ast
import graphlib
import pydoc
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")),
         *sorted((ROOT / "figures").rglob("README.md")), *sorted((ROOT / "examples").glob("*.md"))]  # fmt: skip


def name(page):
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_exist(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text)]
    assert [link for link in links if link and "://" not in link and not (page.parent / link).exists()] == []


NOT_HERE = ("YOCO/", "Diff-Transformer", "model_executor/", "attention/", "timm/")  # files of other projects


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_that_it_names_exist(page):
    """A name in code style with a folder and an ending is a path from the root, the package or the page."""
    named = re.findall(r"`((?:[\w.-]+/)+[\w-]+\.(?:py|md|cpp|h|sh|js|css))`", page.read_text())
    places = (ROOT, ROOT / "src" / "diff_transformer", page.parent)
    wrong = [path for path in named if not any((place / path).exists() for place in places)]
    assert [path for path in wrong if not path.startswith(NOT_HERE)] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_names_that_it_imports_exist(page):
    """Every dotted name below ``diff_transformer`` in code style, and every import in its blocks of Python."""
    text = page.read_text()
    dotted = set(re.findall(r"`(diff_transformer(?:\.\w+)+)[`(]", text))
    for module, names in re.findall(r"^from (diff_transformer[\w.]*) import (\([^)]*\)|[^\n(]+)$", text, re.MULTILINE):
        dotted |= {f"{module}.{word}" for word in re.findall(r"\w+", re.sub(r"#.*| as \w+", "", names))}
    for path in sorted(dotted):
        if "vllm" not in path and not path.startswith("diff_transformer.data.pipeline"):  # engines of their own
            assert pydoc.locate(path) is not None, f"{name(page)}: {path}"


def commands(page):
    """The lines of a page that begin with the command; those that end with a backslash or within quotes go on."""
    if page.suffix == ".py":  # docstrings break lines within a command
        return re.findall(r"``(diff-transformer [a-z][^`]*)``", re.sub(r"\s*\n\s*", " ", page.read_text()))
    text = re.sub(r"\\\n\s*", " ", page.read_text())
    text = re.sub(r"='[^'`]*'", lambda quoted: " ".join(quoted[0].split()), text)
    lines = re.findall(r"^ *(?:\$ )?(diff-transformer [^\n`]*|.*-m diff_transformer [^\n`]*)$", text, re.MULTILINE)
    lines += re.findall(r"`(diff-transformer [a-z][^`]*)`", text)
    return [line for line in lines if "[OPTIONS]" not in line]


def short_commands(page, names):
    """Calls of a page by the command alone: ``eval needle``."""
    return re.findall(rf"`((?:{'|'.join(names)}) [^`\n]+)`", page.read_text())


SOURCES = sorted((ROOT / "src" / "diff_transformer" / "lab" / "recipes").glob("*.py"))


@pytest.mark.parametrize("page", [*PAGES, *SOURCES], ids=name)
def test_commands_parse(page):
    """Each names a command that exists, with options it has, values of their kind and no argument too many."""
    import click
    import typer

    from diff_transformer.cli import app

    command = typer.main.get_command(app)
    lines = [re.split(r"diff-transformer |-m diff_transformer ", line, maxsplit=1)[1] for line in commands(page)]
    for line in [*lines, *short_commands(page, command.commands)]:
        words = shlex.split(re.sub(r"\[(--[^]]*)\]", r"\1", line), comments=True)
        words = [word for word in words if word not in ("...", "|")]
        chosen = command.commands.get(words[0])
        assert chosen is not None, f"{name(page)}: no command {words[0]!r} in: {line}"
        parser = chosen.make_parser(click.Context(chosen, resilient_parsing=True))
        known = {option for parameter in chosen.params for option in parameter.opts if option.startswith("-")}
        ours = words[: words.index("--")] if "--" in words else words  # what follows is another program's
        used = {word.split("=")[0] for word in ours if word.startswith("--")} - {"--help"}
        assert used <= known, f"{name(page)}: {chosen.name} has no {', '.join(sorted(used - known))}: {line}"
        if all(word.isascii() for word in words):
            _, left, _ = parser.parse_args([word for word in words[1:] if word != "--help"])
            assert left == [], f"{name(page)}: {chosen.name} takes no {' '.join(left)}: {line}"


def test_imports_run_one_way():
    """Each room of the package imports from those behind it alone, in the order of docs/architecture.md."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    order = [
        re.findall(r"`([\w.]+)`", group) for group in re.search(r"^`cli` → .*?\n\n", text, re.M | re.S)[0].split("→")
    ]
    rank = {room: place for place, group in enumerate(order) for room in group}
    package, wrong = ROOT / "src" / "diff_transformer", []

    def room(dotted):
        """The module where the order names it, as ``lab.record``; else its folder."""
        first, *rest = dotted.split(".")
        return next((name for name in (".".join([first, *rest[:1]]), first) if name in rank), first)

    for path in package.rglob("*.py"):
        here = room(".".join(path.relative_to(package).with_suffix("").parts))
        if here in ("__init__", "__main__"):
            continue
        assert here in rank, f"docs/architecture.md does not say where {here} stands"
        for found in re.findall(r"^ *(?:from|import) diff_transformer\.([\w.]+)", path.read_text(), re.M):
            there = room(found)
            together = there == here or {here, there} == {"ops", "testing"}
            if there in rank and not together and rank[there] <= rank[here]:
                wrong.append(f"{path.relative_to(package)} imports {there}")
    assert wrong == []


def test_no_files_import_each_other_in_a_circle():
    """Imports in functions count too: a circle between files is one, whenever it closes."""
    package = ROOT / "src"
    modules = {".".join(path.relative_to(package).with_suffix("").parts): path for path in package.rglob("*.py")}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}

    def module(dotted):
        """The file that an import of ``dotted``, a module or a name in one, reads."""
        return dotted if dotted in modules else module(dotted.rpartition(".")[0])

    imports = {}
    for name, path in modules.items():
        found = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        dotted = [
            f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
            for node in found
            for alias in node.names
        ]
        ours = {module(one) for one in dotted if one.startswith("diff_transformer.")}
        imports[name] = ours - {name, "diff_transformer"}  # the package itself resolves its names lazily
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"these files import each other in a circle: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("room", ["data", "evals", "model", "serving", "train"])
def test_what_uses_the_operator_asks_no_backend(room):
    backend = re.compile(r"diff_transformer\.ops(?:\.| import )(?:\w+, )*(?:cpu|hopper|jax|table|triton)\b")
    package = ROOT / "src" / "diff_transformer"
    assert [path.name for path in (package / room).rglob("*.py") if backend.search(path.read_text())] == []


@pytest.mark.slow
def test_the_tutorial_runs(tmp_path):
    """Every block of it in order, in one folder: shell and Python alike."""
    text = (ROOT / "docs" / "tutorial.md").read_text()
    blocks = re.findall(r"```(sh|python)\n(.*?)```", text, re.DOTALL)
    assert [kind for kind, _ in blocks].count("sh") >= 3
    for kind, code in blocks:
        if kind == "sh":
            code = re.sub(r"^diff-transformer", f"{shlex.quote(sys.executable)} -m diff_transformer", code, flags=re.M)
            done = subprocess.run(["bash", "-ec", code], cwd=tmp_path, capture_output=True, text=True, timeout=600)
        else:
            done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, f"{code}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    for made in ("runs/tutorial/report.html", "runs/runs.html", "runs/allocation.svg"):
        assert (tmp_path / made).stat().st_size > 1000
