"""A piece of Python as text and as a tree, with changes that leave all other text as it was written."""

from __future__ import annotations

import ast
import bisect
import io
import re
import textwrap
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from smp_estimator.migration.fstrings import place_expressions
from smp_estimator.migration.magics import parse_cell

#: Begins each comment that migrate writes.
MARK = "# smp-estimator migrate:"

_INDENT = "    "

_NEW_LINE = re.compile(r"\s*\n\s*")

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
        tree: its syntax tree.
        magics: lines that the kernel of a notebook runs, by number.
    """

    text: str
    notes: list[Note] = field(default_factory=list)
    renamed: dict[tuple[int, int], str] = field(default_factory=dict)
    _edits: list[tuple[int, int, str]] = field(default_factory=list)
    _marks: list[tuple[int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lines = self.text.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))
        self.tree, self.magics = parse_cell(self.text, self._lines)
        self._unplaced = place_expressions(self.tree, self.span, self.text, self._line_and_column)
        self._tops = self._lines_of_statements()
        self._parents = {id(child): parent for parent in ast.walk(self.tree) for child in ast.iter_child_nodes(parent)}

    def at(self, line: int, column: int) -> int:
        """Return the position in the text of a line and column of the syntax tree; columns count bytes."""
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def _line_and_column(self, position: int) -> tuple[int, int]:
        """Return the line of a position in the text, and its column in bytes."""
        line = bisect.bisect_right(self._starts, position, hi=len(self._lines))
        return line, len(self.text[self._starts[line - 1] : position].encode())

    def is_placed(self, node: ast.AST) -> bool:
        """Return whether the position of a node is known; in some f-strings it is not."""
        return id(node) not in self._unplaced

    def parent(self, node: ast.AST) -> ast.AST | None:
        """Return the node that a node is a part of."""
        return self._parents.get(id(node))

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
        found: list[str] = []
        try:
            for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
                if token.type != tokenize.COMMENT:
                    continue
                row, column = token.start
                place = self._starts[row - 1] + column
                is_kept = any(first <= place < last for first, last in inside)
                if start <= place < end and not is_kept:
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

    def remove_statement(self, node: ast.stmt) -> None:
        """Remove a statement; one that is alone in its block becomes ``pass``."""
        start, end = self.span(node)
        line, last = self._starts[node.lineno - 1], self._starts[node.end_lineno or node.lineno]
        before, behind = self.text[line:start], self.text[end:last]
        parent = self.parent(node)
        if _is_only_one_of_block(node, parent):
            self.replace(start, end, "pass")
        elif not before.strip() and not behind.partition("#")[0].strip():
            self.replace(line, last, "")
        elif behind.lstrip().startswith(";"):
            rest = behind.partition(";")[2].lstrip(" ")
            self.replace(start, last - len(rest), "")
        else:
            self.replace(start, end, "pass")

    def line_start(self, node: ast.AST) -> int:
        """Return the start of the line that a node begins on."""
        return self._starts[node.lineno - 1]  # type: ignore[attr-defined]

    def top_of(self, node: ast.stmt) -> int:
        """Return the start of the comments above a statement; the first lines of a program stay above."""
        line = node.lineno
        while line > 1 and self._lines[line - 2].lstrip().startswith("#"):
            above = self._lines[line - 2]
            # Python and the system read these in the first two lines only.
            is_first_line = above.startswith("#!") or "coding" in above
            if line <= 3 and is_first_line:
                break
            line -= 1
        return self._starts[line - 1]

    def note(self, node: ast.AST, text: str) -> None:
        """Note that a person has to review a node: in the list, and in a comment above its statement."""
        text = _NEW_LINE.sub(" ", text)
        self.notes.append(Note(node.lineno, text))  # type: ignore[attr-defined]
        line = self._first_line(node)
        if (line, text) not in self._marks and not self._is_marked(line, text):
            self._marks.append((line, text))

    def note_line(self, line: int, text: str) -> None:
        """Note that a person has to review a line that is no Python, in the list and in a comment above it."""
        self.notes.append(Note(line, text))
        if not self._is_marked(line, text):
            self._marks.append((line, text))

    def _first_line(self, node: ast.AST) -> int:
        """Return the line that a comment on a node belongs above: its statement's, or that of the statement around it."""
        found: ast.AST | None = node
        while found is not None:
            if isinstance(found, ast.stmt) and found.lineno in self._tops:
                return self._tops[found.lineno]
            found = self.parent(found)
        return 1

    def _lines_of_statements(self) -> dict[int, int]:
        """Return the lines that begin with a statement, each with the line of its first decorator or itself."""
        tops = {}
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.stmt):
                continue
            decorators = [each.lineno for each in getattr(node, "decorator_list", [])]
            top = min([node.lineno, *decorators])
            before = self._lines[node.lineno - 1].encode()[: node.col_offset]
            above = self._lines[top - 2] if top > 1 else ""
            is_continued = above.rstrip("\r\n").endswith("\\")
            if not before.strip() and not is_continued:
                tops[node.lineno] = top
        return tops

    def _is_marked(self, line: int, text: str) -> bool:
        """Return whether the comments above a line have this text already."""
        above: list[str] = []
        while line > 1 and self._lines[line - 2].lstrip().startswith("#"):
            line -= 1
            above.insert(0, self._lines[line - 1].strip().removeprefix(MARK).strip("# "))
        return " ".join(text.split()) in " ".join(above)

    def _written_marks(self) -> list[tuple[int, int, str]]:
        made = []
        for line, text in self._marks:
            start = self._starts[line - 1]
            row = self._lines[line - 1]
            indent = row[: len(row) - len(row.lstrip())]
            rows = textwrap.wrap(
                f"{MARK} {' '.join(text.split())}",
                _LINE - len(indent),
                subsequent_indent="#   ",
                break_long_words=False,
                break_on_hyphens=False,
            )
            made.append((start, start, "".join(f"{indent}{each}\n" for each in rows)))
        return made

    def changed(self) -> str:
        """Return the text with all changes applied; if two overlap, the wider one is applied."""
        made, place = [], 0
        edits = [*self._edits, *self._written_marks()]
        wide = sorted(edits, key=lambda edit: (edit[0], edit[0] != edit[1], -edit[1]))
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
    fits = "\n" not in one_line and len(one_line) + indent <= _LINE
    if fits and not comments:
        return one_line
    inner = " " * (indent + len(_INDENT))
    lines = [f"# {comment}" for comment in comments or ()]
    lines += [f"{word}," for word in words]
    indented = [inner + line for line in lines]
    return "\n".join([f"{name}(", *indented, f"{' ' * indent})"])


def _is_only_one_of_block(node: ast.stmt, parent: ast.AST | None) -> bool:
    # A module may be empty, a block may not.
    if parent is None or isinstance(parent, ast.Module):
        return False
    fields = [value for _, value in ast.iter_fields(parent)]
    return [node] in fields


def assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield target and value of what a statement or an expression assigns."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield target, node.value
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        yield node.target, node.value


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
