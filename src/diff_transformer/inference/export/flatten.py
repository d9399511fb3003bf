"""Turn the model's source files into one flat folder that imports nothing from this package.

transformers loads the code of a checkpoint from one folder, and copies only files that are imported as
``from .module import name``. So each module that the model needs becomes one file with relative imports. The modules
are found by following imports: a new file in ``model/`` needs no change here.
"""

import ast
from pathlib import Path

import diff_transformer
from diff_transformer import __version__

PACKAGE = "diff_transformer"
ENTRANCE = f"{PACKAGE}.model.modeling"
# Kernels, and the choice among them, are not exported; these modules replace them.
_KERNELS = (f"{PACKAGE}.ops.cpu", f"{PACKAGE}.ops.hopper", f"{PACKAGE}.ops.triton")
_STAND_INS = {
    f"{PACKAGE}.ops.cpu.decode": f"{PACKAGE}.inference.export.portable.package",
    f"{PACKAGE}.ops.cpu": f"{PACKAGE}.inference.export.portable.blockwise",
    f"{PACKAGE}.ops.table": f"{PACKAGE}.inference.export.portable.package",
    f"{PACKAGE}.ops.triton": f"{PACKAGE}.inference.export.portable.triton",
}
_NAMES = {
    ENTRANCE: "modeling_diff_transformer",
    f"{PACKAGE}.model.config": "configuration_diff_transformer",
    PACKAGE: "exported_version",
}


def flatten() -> dict[str, str]:
    """The files of an exported model: file name to source text.

    Raises:
        ValueError: if two modules would get the same name, or an import has a form that cannot be exported.
    """
    files: dict[str, str] = {}
    origins: dict[str, str] = {}
    todo = [ENTRANCE]
    while todo:
        module = todo.pop()
        if module.startswith(_KERNELS):
            raise ValueError(f"{module} is part of the kernels, which are not exported; write a stand-in for it")
        name = _flat_name(module)
        if origins.setdefault(name, module) != module:
            raise ValueError(f"{origins[name]} and {module} would both be exported as {name}.py; rename one of them")
        if f"{name}.py" in files:
            continue
        if module == PACKAGE:
            files[f"{name}.py"] = f'"""The version that exported this model."""\n\n__version__ = "{__version__}"\n'
            continue
        files[f"{name}.py"], needed = _relative(module, _path(module).read_text(encoding="utf-8"))
        todo += needed
    return dict(sorted(files.items()))


def _relative(module: str, source: str) -> tuple[str, list[str]]:
    """``source`` with relative imports and without registrations; and the modules that it imports."""
    lines = source.splitlines(keepends=True)
    tree = ast.parse(source)
    needed: list[str] = []
    changes: list[tuple[ast.stmt, str]] = [(node, "") for node in tree.body if _registers(node)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and any(alias.name.split(".")[0] == PACKAGE for alias in node.names):
            raise ValueError(f"{module} line {node.lineno}: write `from {PACKAGE}... import ...` instead")
        if isinstance(node, ast.ImportFrom) and node.level:
            raise ValueError(f"{module} line {node.lineno} imports relatively; name the module in full")
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
            text, modules = _rewritten(node)
            changes.append((node, text))
            needed += modules
    for node, text in sorted(changes, key=lambda change: change[0].lineno, reverse=True):
        assert node.end_lineno is not None
        lines[node.lineno - 1 : node.end_lineno] = [text] if text else []
    header = f"# Exported by diff-transformer {__version__} from {module}; MIT licence.\n"
    return header + "".join(lines), needed


def _rewritten(node: ast.ImportFrom) -> tuple[str, list[str]]:
    assert node.module is not None
    lines, names, modules = [], [], []
    for alias in node.names:
        inner = f"{node.module}.{alias.name}"
        if inner in _STAND_INS or _path(inner).exists():
            flat = _flat_name(_STAND_INS.get(inner, inner))
            modules.append(_STAND_INS.get(inner, inner))
            # transformers copies a file only for an import of this first form.
            lines.append(f"from .{flat} import __doc__ as _{flat}_doc")
            lines.append(f"from . import {flat} as {alias.asname or alias.name}")
        else:
            names.append(alias.name if alias.asname is None else f"{alias.name} as {alias.asname}")
    if names:
        module = _STAND_INS.get(node.module, node.module)
        modules.append(module)
        lines.append(f"from .{_flat_name(module)} import {', '.join(names)}")
    return "".join(f"{' ' * node.col_offset}{line}\n" for line in lines), modules


def _registers(node: ast.stmt) -> bool:
    """Whether a statement registers an Auto class; ``auto_map`` does this for exported code."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
        and node.value.func.attr == "register"
        and isinstance(node.value.func.value, ast.Name)
        and node.value.func.value.id.startswith("Auto")
    )


def _flat_name(module: str) -> str:
    return _NAMES.get(module, module.rpartition(".")[2])


def _path(module: str) -> Path:
    parts = module.split(".")[1:]
    folder = Path(diff_transformer.__file__).parent.joinpath(*parts)
    return folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
