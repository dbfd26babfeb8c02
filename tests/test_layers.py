"""Imports point down, lmpack < converters, profiles < runtime < lmpack.cli, and torch comes late."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGES = ("lmpack", "converters", "profiles", "runtime")
MODULES = sorted(
    path.relative_to(REPOSITORY) for name in PACKAGES for path in (REPOSITORY / name).rglob("*.py")
)

MAY_IMPORT = {
    "lmpack": {"lmpack"},
    "converters": {"lmpack", "converters"},
    "profiles": {"lmpack", "profiles"},
    "runtime": {"lmpack", "converters", "profiles", "runtime"},
    "lmpack.cli": {"lmpack", "converters", "profiles", "runtime", "lmpack.cli"},
}
# the facade `lmpack.load` and `python -m lmpack` reach up, and do nothing else
REACH_UP = {Path("lmpack/__init__.py"), Path("lmpack/__main__.py")}


@dataclass(frozen=True)
class Import:
    module: str
    line: int
    is_relative: bool
    runs_at_import: bool  # not in a function's body and not under `if TYPE_CHECKING`


def imports_of(path: Path) -> list[Import]:
    """All imports of a source file, wherever they stand."""
    found: list[Import] = []

    def visit(node: ast.AST, runs_at_import: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node.lineno, False, runs_at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:  # what is imported may be a module itself
                module = f"{node.module}.{alias.name}"
                found.append(Import(module, node.lineno, node.level > 0, runs_at_import))
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for statement in node.body:
                visit(statement, False)
            for statement in node.orelse:
                visit(statement, runs_at_import)
        else:
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                visit(child, runs_at_import and not is_function)

    visit(ast.parse((REPOSITORY / path).read_text(encoding="utf-8")), True)
    return found


def layer_of(module: str) -> str | None:
    """The layer a dotted module name belongs to; None for other people's modules."""
    if module == "lmpack.cli" or module.startswith("lmpack.cli."):
        return "lmpack.cli"
    top = module.split(".")[0]
    return top if top in PACKAGES else None


def own_layer(path: Path) -> str:
    layer = layer_of(".".join(path.with_suffix("").parts))
    assert layer is not None
    return layer


@pytest.mark.parametrize("path", [path for path in MODULES if path not in REACH_UP], ids=str)
def test_a_module_imports_only_from_its_own_layer_and_those_below(path: Path) -> None:
    allowed = MAY_IMPORT[own_layer(path)]
    wrong = [
        f"{path}:{found.line} imports {found.module}"
        for found in imports_of(path)
        if (layer := layer_of(found.module)) is not None and layer not in allowed
    ]
    assert not wrong


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_imports_are_absolute(path: Path) -> None:
    assert not [f"{path}:{found.line}" for found in imports_of(path) if found.is_relative]


@pytest.mark.parametrize("path", [path for path in MODULES if own_layer(path) != "runtime"], ids=str)
def test_outside_the_runtime_only_commands_import_torch_and_late(path: Path) -> None:
    layer = own_layer(path)
    wrong = [
        f"{path}:{found.line} imports {found.module}"
        for found in imports_of(path)
        if found.module.split(".")[0] == "torch" and (found.runs_at_import or layer != "lmpack.cli")
    ]
    assert not wrong


@pytest.mark.parametrize("name", PACKAGES)
def test_each_package_is_a_typed_package(name: str) -> None:
    assert (REPOSITORY / name / "py.typed").is_file()
    assert (REPOSITORY / name / "__init__.py").is_file()


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_every_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse((REPOSITORY / path).read_text(encoding="utf-8")))
