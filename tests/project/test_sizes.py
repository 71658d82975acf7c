"""The code lines of the core and of the extras only fall: small is a feature."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

import nbtoolkit

PACKAGE = Path(nbtoolkit.__file__).parent

# Lines that hold code: no blank lines, comments or docstrings. Lower a number when a change lowers
# the lines. To raise one, say in docs/log.md what a user gets for it.
CORE = 30_977
EXTRAS = 3_805
LARGEST_FILE = 700  # all of its lines

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(path: Path) -> int:
    source = path.read_text()
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_constant and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def test_the_core_and_the_extras_do_not_grow() -> None:
    sizes = {path: code_lines(path) for path in PACKAGE.rglob("*.py")}
    extras = sum(size for path, size in sizes.items() if PACKAGE / "extras" in path.parents)
    assert sum(sizes.values()) - extras <= CORE
    assert extras <= EXTRAS


def test_no_file_is_longer_than_one_story() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {path: length for path, length in lengths.items() if length > LARGEST_FILE} == {}


def test_comments_and_docstrings_are_no_code(tmp_path: Path) -> None:
    file = tmp_path / "sample.py"
    file.write_text(
        '"""Docstring\nof two lines."""\n\n# comment\nx = 1  # and code\ny = (\n    2\n)\n'
    )
    assert code_lines(file) == 4
