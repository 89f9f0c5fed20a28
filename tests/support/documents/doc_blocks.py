"""The blocks of code in README and ``docs/``: what they are, what they name, and the commands in them."""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import inspect
import re
import shlex
import symtable
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from smp_estimator.sdk.installed import SDKMissing

ROOT = Path(__file__).parents[3]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

#: Packages of this project, of which everything must be there.
OWN = {
    "smdistributed",
    "smp_config",
    "smp_emulation",
    "smp_estimator",
    "smp_integrations",
    "smp_launch",
    "smp_records",
    "smp_runtime",
    "smp_tools",
}

#: Before a block: that it is none to check, with the reason.
_MARK = re.compile(r"<!-- unchecked: (.+) -->\s*\Z")
_FENCE = re.compile(r"^( *)(`{3,})([\w-]*)[^\n]*\n(.*?)^\1\2[ ]*$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A block of code of a document; ``line`` is that of its first character of code."""

    document: Path
    line: int
    language: str
    code: str
    unchecked: str = ""

    @property
    def name(self) -> str:
        """For the name of a test."""
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def blocks(document: Path) -> list[Block]:
    """All blocks of a document, in order."""
    text = document.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        indent = len(match[1])
        code = "".join(line[indent:] for line in match[4].splitlines(keepends=True))
        mark = _MARK.search(text[: match.start()])
        line = text[: match.start(4)].count("\n") + 1
        found.append(Block(document, line, match[3], code, mark[1] if mark else ""))
    return found


def all_blocks(*languages: str) -> list[Block]:
    """Blocks of all documents in these languages."""
    return [block for document in DOCUMENTS for block in blocks(document) if block.language in languages]


# -- names ---------------------------------------------------------------------------------------------------


def free_names(code: str) -> set[str]:
    """Names that a block uses and does not define."""
    table = symtable.symtable(code, "block", "exec")

    def tables(one: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
        yield one
        for child in one.get_children():
            yield from tables(child)

    defined = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    defined |= {child.get_name() for child in table.get_children()}
    used = {
        symbol.get_name()
        for one in tables(table)
        for symbol in one.get_symbols()
        if symbol.is_referenced() and (symbol.is_global() or one is table)
    }
    return used - defined - set(dir(builtins))


def defined_names(code: str) -> set[str]:
    """Names that a block gives to something."""
    table = symtable.symtable(code, "block", "exec")
    found = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    return found | {child.get_name() for child in table.get_children()}


def imported(code: str) -> dict[str, Any]:
    """What a block's imports give, by name.

    Raises:
        ImportError: a module or a name in it is not there. A package that is not installed here is passed over.
    """
    found: dict[str, Any] = {}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if (module := _module(alias.name)) is not None:
                    top = alias.name.partition(".")[0]
                    found[alias.asname or top] = module if alias.asname else importlib.import_module(top)
        elif isinstance(node, ast.ImportFrom) and node.module and (module := _module(node.module)) is not None:
            for alias in node.names:
                with contextlib.suppress(SDKMissing):  # of the other version of the SDK
                    found[alias.asname or alias.name] = _member(module, alias.name)
    return found


def _module(name: str) -> ModuleType | None:
    """A module; None where it, or a library that it adapts, is not installed here, or in another version."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] in OWN:
            raise
        return None


def _member(module: ModuleType, name: str) -> Any:
    if hasattr(module, name):
        return getattr(module, name)
    if not hasattr(module, "__path__"):
        raise ImportError(f"{module.__name__} has no {name}")
    return importlib.import_module(f"{module.__name__}.{name}")


def wrong_uses(code: str, known: dict[str, Any]) -> list[str]:
    """Attributes of known modules and classes that are not there, and calls that no signature takes."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute):
            owner = _value(node.value, known)
            if isinstance(owner, ModuleType | type) and not _has(owner, node.attr):
                found.append(f"line {node.lineno}: {ast.unparse(node)} is not there")
        elif isinstance(node, ast.Call):
            function = _value(node.func, known)
            wrong = _wrong_call(node, function) if callable(function) else None
            if wrong:
                found.append(f"line {node.lineno}: {ast.unparse(node.func)}(): {wrong}")
    return found


def _has(owner: Any, name: str) -> bool:
    if hasattr(owner, name):
        return True
    return isinstance(owner, ModuleType) and _module(f"{owner.__name__}.{name}") is not None


def _value(node: ast.expr, known: dict[str, Any]) -> Any:
    """What an expression of names and attributes means; None where nobody can say."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, known)
        return getattr(owner, node.attr, None) if isinstance(owner, ModuleType | type) else None
    return None


def _wrong_call(call: ast.Call, function: Any) -> str | None:
    """Why a call cannot be; ``...`` stands for what a reader fills in."""
    given = [each for each in call.args if not (isinstance(each, ast.Constant) and each.value is ...)]
    is_open = len(given) < len(call.args) or any(isinstance(each, ast.Starred) for each in given)
    is_open |= any(word.arg is None for word in call.keywords)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    names = {word.arg: None for word in call.keywords if word.arg}
    try:
        signature.bind_partial(*([] if is_open else given), **names)
        if not is_open:
            signature.bind(*given, **names)
    except TypeError as error:
        return str(error)
    return None


# -- commands ------------------------------------------------------------------------------------------------


def commands(code: str) -> list[list[str]]:
    """The commands of a block for a shell, as words, without variables before them, comments and redirections."""
    joined = re.sub(r"\\\n\s*", " ", code)
    found = []
    for line in joined.splitlines():
        words = shlex.split(line, comments=True)
        one: list[str] = []
        for word in [*words, "&&"]:
            if word in ("&&", "|", ";"):
                if one:
                    found.append(one)
                one = []
            elif not one and (re.match(r"\w+=", word) or word == "export"):
                continue
            else:
                one.append(word)
    return [command[: next((n for n, w in enumerate(command) if w in (">", ">>")), len(command))] for command in found]


def spans(document: Path, program: str) -> list[str]:
    """Commands in running text and tables: what stands between single backticks."""
    text = _FENCE.sub("", document.read_text(encoding="utf-8"))
    return [span.replace("\\|", "|") for span in re.findall(rf"(?<!`)`({program} [^`\n]+)`(?!`)", text)]
