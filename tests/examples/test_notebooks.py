"""The notebooks of examples/: committed without outputs, named by the page, and run whole under ``-m slow``."""

import ast
import importlib
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="nbclient is not installed")

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def read(path):
    return nbformat.read(path, as_version=4)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_committed_without_outputs(path):
    notebook = read(path)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(cells) >= 5
    for cell in cells:
        assert (cell.outputs, cell.execution_count) == ([], None)
        for statement in ast.parse(cell.source).body:  # a name that moved is noticed before the slow test
            if isinstance(statement, ast.ImportFrom) and statement.module.startswith("diff_transformer"):
                module = importlib.import_module(statement.module)
                assert [name.name for name in statement.names if not hasattr(module, name.name)] == []


def test_the_page_names_every_notebook():
    page = (EXAMPLES.parent / "docs" / "examples.md").read_text()
    assert len(NOTEBOOKS) == 4
    assert [path.name for path in NOTEBOOKS if f"../examples/{path.name}" not in page] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path, tmp_path):
    """Every cell, from the top, in a kernel of its own; without a network."""
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = read(path)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert len(outputs) >= 4
    if path.stem == "small_pair":
        said = next(output.text for output in outputs if output.output_type == "stream" and "repeats" in output.text)
        assert said.count("repeats 100%") == 2, said
