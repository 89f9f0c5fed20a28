"""Lines of a notebook that its kernel runs before Python does, such as ``%pip install``."""

from __future__ import annotations

import ast
import re

#: A magic, a command of the shell, or a question.
_LINE = re.compile(r"^(\s*)(?:[%!?]|[\w.]+\?{1,2}\s*$)")

#: The same with a variable for its answer.
_ASSIGNED = re.compile(r"^(\s*)[A-Za-z_][\w, ]*=\s*[%!](?!=)")

#: Magics of a whole cell that leave its code to Python.
_PYTHON_CELLS = ("%%time", "%%timeit", "%%capture", "%%prun")

#: An installation of version 2 of the SDK.
_INSTALLS_VERSION_2 = re.compile(
    r"pip3? install\b.*?\bsagemaker(?:\[[\w,]*\])?\s*(?:[=~]=\s*[\"']?[12]\b|<\s*[123]\b|.*,\s*<\s*3)"
)


def parse_cell(text: str, lines: list[str]) -> tuple[ast.Module, dict[int, str]]:
    """Return the syntax tree of a script or cell, and by line its magics; further lines of one are empty.

    In the tree, a magic is a statement that does nothing. A cell for another program has an empty tree.

    Raises:
        SyntaxError: the rest is not Python.
    """
    words = text.split(maxsplit=1)
    if words and words[0].startswith("%%") and words[0] not in _PYTHON_CELLS:
        return ast.Module([], []), {}
    try:
        return ast.parse(text), {}
    except SyntaxError:
        pass
    magics: dict[int, str] = {}
    plain = []
    first = 0
    continued: str | None = None  # the indentation of a magic that goes on in the next line
    for number, line in enumerate(lines, 1):
        found = _LINE.match(line)
        assigned = _ASSIGNED.match(line)
        if continued is None and not found and not assigned:
            plain.append(line)
            continue
        indent = continued
        if indent is None:
            indent = found.group(1) if found else line[: line.index("=") + 1]
        statement = "None" if indent.strip() else "pass"
        plain.append(f"{indent}{statement} # {line.strip()}\n")
        if continued is None:
            first = number
        magics[number] = ""
        magics[first] = f"{magics[first]} {line.strip()}".strip()
        goes_on = line.rstrip().endswith("\\")
        continued = line[: len(line) - len(line.lstrip())] if continued is None else continued
        if not goes_on:
            continued = None
    return ast.parse("".join(plain)), magics


def installs_version_2(line: str) -> bool:
    """Return whether a magic installs version 2 of the SDK."""
    return _INSTALLS_VERSION_2.search(line) is not None
