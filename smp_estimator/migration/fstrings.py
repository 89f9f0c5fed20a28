"""Positions of the expressions in f-strings, which Python reports only since version 3.12."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator

#: Version of Python from which the syntax tree has the true positions.
_EXACT_SINCE = (3, 12)


def place_expressions(
    tree: ast.AST, span: Callable[[ast.AST], tuple[int, int]], text: str, place: Callable[[int], tuple[int, int]]
) -> set[int]:
    """Correct the positions of expressions in f-strings, in place.

    Args:
        span: returns the start and end of a node in ``text``.
        place: returns the line and the column, in bytes, of a position in ``text``.

    Returns:
        The ids of nodes that were not found and whose positions must not be used.
    """
    if sys.version_info >= _EXACT_SINCE:
        return set()
    unplaced: set[int] = set()
    for whole in _outermost(tree):
        start, end = span(whole)
        cursor = start
        for part in whole.values:
            if not isinstance(part, ast.FormattedValue):
                continue
            found = _find(part.value, text, cursor, end)
            inner = list(ast.walk(part))
            unplaced |= {id(node) for node in inner if hasattr(node, "lineno")}
            if found is None:
                continue
            begin, tree_of_text = found
            expression = list(ast.walk(part.value))
            _copy_positions(expression, tree_of_text, text, begin, place)
            unplaced -= {id(node) for node in expression}
            cursor = begin
    return unplaced


def _outermost(node: ast.AST) -> Iterator[ast.JoinedStr]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.JoinedStr):
            yield child
        else:
            yield from _outermost(child)


def _find(value: ast.expr, text: str, start: int, end: int) -> tuple[int, ast.expr] | None:
    """Return the position of an expression in braces, and the tree of its text."""
    wanted = ast.dump(value)
    for opened in _positions(text, "{", start, end):
        begin = opened + 1
        for closed in _positions(text, "}!:=", begin, end):
            read = _parsed(text[begin:closed])
            if read is not None and ast.dump(read) == wanted:
                return begin, read
    return None


def _positions(text: str, characters: str, start: int, end: int) -> Iterator[int]:
    for position in range(start, end):
        if text[position] in characters:
            yield position


def _parsed(text: str) -> ast.expr | None:
    try:
        return ast.parse(f"({text})", mode="eval").body
    except (SyntaxError, ValueError):
        return None


def _copy_positions(
    nodes: list[ast.AST], read: ast.expr, text: str, begin: int, place: Callable[[int], tuple[int, int]]
) -> None:
    """Give nodes the positions that their twins in ``read`` have behind ``begin``."""
    shown = f"({text[begin:]}"
    starts = [0]
    for line in shown.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def position(line: int, column: int) -> tuple[int, int]:
        row = shown[starts[line - 1] : starts[line]]
        offset = starts[line - 1] + len(row.encode()[:column].decode())
        return place(begin + offset - 1)

    for node, twin in zip(nodes, ast.walk(read), strict=True):
        if isinstance(twin, ast.expr) and isinstance(node, ast.expr):
            node.lineno, node.col_offset = position(twin.lineno, twin.col_offset)
            if twin.end_lineno is not None and twin.end_col_offset is not None:
                node.end_lineno, node.end_col_offset = position(twin.end_lineno, twin.end_col_offset)
