"""Every public module, class, function and method of the package says what it is for."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import samebits

PACKAGE = Path(samebits.__file__).parent


def undocumented(source: str) -> list[str]:
    """Names in `source` that are public and have no docstring; the module itself is `module`."""
    tree = ast.parse(source)
    bare = [] if ast.get_docstring(tree) else ["module"]
    return [*bare, *_inside(tree, "")]


def _inside(node: ast.Module | ast.ClassDef, prefix: str) -> Iterator[str]:
    for child in _defined(node):
        if child.name.startswith("_") or _is_overload(child) or _is_formula(child):
            continue
        if not ast.get_docstring(child):
            yield prefix + child.name
        if isinstance(child, ast.ClassDef):
            yield from _inside(child, f"{prefix}{child.name}.")


def _is_overload(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """A signature for type checkers; the definition behind it is documented."""
    return any(isinstance(d, ast.Name) and d.id == "overload" for d in node.decorator_list)


def _is_formula(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """A device function of one expression, which says what it is."""
    jitted = any(isinstance(d, ast.Attribute) and d.attr == "jit" for d in node.decorator_list)
    return jitted and len(node.body) == 1 and isinstance(node.body[0], ast.Return)


def _defined(node: ast.AST) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Definitions in a body, those under `if`, `try` and `with` too; not inside functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        elif isinstance(child, ast.stmt | ast.excepthandler):
            yield from _defined(child)


def test_every_public_name_has_a_docstring():
    files = sorted(PACKAGE.rglob("*.py"))
    assert PACKAGE / "ops" / "registry.py" in files
    bare = {
        str(file.relative_to(PACKAGE)): names
        for file in files
        if (names := undocumented(file.read_text()))
    }
    assert bare == {}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("", ["module"]),
        ("'''m'''\ndef f(): pass", ["f"]),
        ("'''m'''\nasync def f(): pass", ["f"]),
        ("'''m'''\n@gluon.jit\ndef f(m):\n  return m * 2", []),
        ("'''m'''\n@gluon.jit\ndef f(m):\n  m = m * 2\n  return m", ["f"]),
        ("'''m'''\nclass A:\n  def g(self): pass", ["A", "A.g"]),
        ("'''m'''\nclass A:\n  '''a'''\n  @property\n  def g(self): pass", ["A.g"]),
        ("'''m'''\ntry:\n  def f(): pass\nexcept E:\n  def g(): pass", ["f", "g"]),
        ("'''m'''\nif a:\n  pass\nelse:\n  class A: pass", ["A"]),
        ("'''m'''\ndef _f(): pass\nclass _A:\n  def g(self): pass", []),
        ("'''m'''\ndef f():\n  '''f'''\n  def g(): pass", []),
    ],
)
def test_what_counts_as_public(source, names):
    assert undocumented(source) == names
