"""A piece of Python as text and as a tree, with changes that leave all other text as it was written."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass, field

#: Lines that a notebook's kernel takes before Python does.
_MAGIC = re.compile(r"^(\s*)[%!]")

_INDENT = "    "

#: Characters of a line that is not wrapped.
_LINE = 96


@dataclass(frozen=True)
class Note:
    """Something that a person has to look at.

    Attributes:
        line: of the original text, from 1.
    """

    line: int
    text: str


@dataclass
class ScriptSource:
    """One script, or one cell of a notebook.

    Attributes:
        text: as it is written.
        notes: notes for a person to review.
        renamed: new names, by the start and end positions of the old ones.
    """

    text: str
    notes: list[Note] = field(default_factory=list)
    renamed: dict[tuple[int, int], str] = field(default_factory=dict)
    _edits: list[tuple[int, int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lines = self.text.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))
        # What the kernel takes becomes Python that does nothing, on the same line.
        plain = [_MAGIC.sub(r"\1pass #", line) for line in self._lines]
        is_cell_magic = self.text.lstrip().startswith("%%")
        self.tree = ast.parse("" if is_cell_magic else "".join(plain))

    def at(self, line: int, column: int) -> int:
        """Return the position in the text of a line and column of the syntax tree; columns count bytes."""
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return the start and end of a node in the text."""
        place = node.lineno, node.col_offset, node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]
        return self.at(place[0], place[1]), self.at(place[2], place[3])

    def segment(self, node: ast.AST) -> str:
        """Return the source of a node, with renamed names replaced."""
        start, end = self.span(node)
        made, place = [], start
        for (begin, after), name in sorted(self.renamed.items()):
            if place <= begin and after <= end:
                made += [self.text[place:begin], name]
                place = after
        return "".join([*made, self.text[place:end]])

    def moved(self, node: ast.AST, indent: int) -> str:
        """Return the source of a node for a line that is indented by ``indent`` spaces.

        The further lines are indented accordingly.
        """
        text = self.segment(node)
        if "\n" not in text:
            return text
        first = self._lines[node.lineno - 1]  # type: ignore[attr-defined]
        before = len(first) - len(first.lstrip())
        head, *rest = text.split("\n")
        shifted = [" " * max(0, len(line) - len(line.lstrip()) + indent - before) + line.lstrip() for line in rest]
        made = "\n".join([head, *(line if line.strip() else "" for line in shifted)])
        # A text over several lines must not be changed by this.
        try:
            same = ast.dump(ast.parse(f"({made})")) == ast.dump(ast.parse(f"({text})"))
        except SyntaxError:
            same = False
        return made if same else text

    def indent_of(self, node: ast.AST) -> int:
        """Return the number of spaces before the line that a node begins on."""
        line = self._lines[node.lineno - 1]  # type: ignore[attr-defined]
        return len(line) - len(line.lstrip())

    def comments_between(self, node: ast.AST, kept: Sequence[ast.AST]) -> list[str]:
        """Return the comments inside a node that are in none of ``kept``, without the comment sign."""
        start, end = self.span(node)
        inside = [self.span(other) for other in kept]
        found = []
        try:
            for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
                if token.type == tokenize.COMMENT:
                    place = self._starts[token.start[0] - 1] + token.start[1]
                    if start <= place < end and not any(a <= place < b for a, b in inside):
                        found.append(token.string.lstrip("# ").rstrip())
        except (tokenize.TokenError, IndentationError):  # magics of a notebook
            return found
        return found

    def replace(self, start: int, end: int, text: str) -> None:
        """Replace the text between two positions by ``text``."""
        self._edits.append((start, end, text))

    def replace_node(self, node: ast.AST, text: str) -> None:
        """Replace a node by ``text``."""
        self.replace(*self.span(node), text)

    def remove_lines(self, node: ast.stmt) -> None:
        """Remove a statement that shares its lines with no other statement."""
        start, end = self._starts[node.lineno - 1], self._starts[node.end_lineno or node.lineno]
        self.replace(start, end, "")

    def line_start(self, node: ast.AST) -> int:
        """Return the start of the line that a node begins on."""
        return self._starts[node.lineno - 1]  # type: ignore[attr-defined]

    def note(self, node: ast.AST, text: str) -> None:
        """Note that a person has to review a node."""
        self.notes.append(Note(node.lineno, text))  # type: ignore[attr-defined]

    def changed(self) -> str:
        """Return the text with all changes applied; if two overlap, the wider one is applied."""
        made, place = [], 0
        wide = sorted(self._edits, key=lambda edit: (edit[0], edit[0] != edit[1], -edit[1]))
        for start, end, text in wide:
            if start < place:
                continue
            made += [self.text[place:start], text]
            place = end
        return "".join([*made, self.text[place:]])


def call(name: str, arguments: list[tuple[str, str]], indent: int, comments: list[str] | None = None) -> str:
    """Format a call as a formatter does: on one line if it fits, else with one argument per line.

    Args:
        arguments: name (empty for a positional one) and text of each.
        indent: number of spaces before the line that the call is on.
        comments: put before the arguments, one per line.
    """
    words = [f"{key}={value}" if key else value for key, value in arguments]
    one_line = f"{name}({', '.join(words)})"
    if not comments and "\n" not in one_line and len(one_line) + indent <= _LINE:
        return one_line
    inner = " " * (indent + len(_INDENT))
    lines = [f"{inner}# {comment}" for comment in comments or ()] + [f"{inner}{word}," for word in words]
    return "\n".join([f"{name}(", *lines, f"{' ' * indent})"])


def is_literal(node: ast.AST | None) -> bool:
    """Return whether a node is a plain value that is known without running any code."""
    try:
        ast.literal_eval(node)  # type: ignore[arg-type]
    except (ValueError, TypeError, SyntaxError):
        return False
    return True


def literal_value(node: ast.AST | None) -> object:
    """Return the value of a literal node, or None if the node is not a literal."""
    return ast.literal_eval(node) if is_literal(node) else None  # type: ignore[arg-type]
