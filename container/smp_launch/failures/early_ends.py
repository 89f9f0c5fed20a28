"""Explanations for scripts that ended because they asked for input, or because a file hides one of Python's own modules."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable
from pathlib import Path

#: Modules that ask for input.
_ASKING = frozenset("getpass code click.termui rich.prompt".split())
_DEBUGGERS = frozenset("bdb pdb IPython.core.debugger ipdb.__main__ pudb.debugger".split())

_NO_INPUT = (
    "the ranks of a job have no standard input, so it has ended at once; give the script the value as a word of its command line "
    "(a hyperparameter), a variable or a file"
)
_NO_DEBUGGER = (
    "breakpoint() or set_trace() wants commands from standard input, and the ranks of a job have none; remove the call, or set "
    "PYTHONBREAKPOINT=0, or run the script alone with Python to debug it"
)


def is_of_debugger(error: BaseException) -> bool:
    """Return whether a debugger has ended the script, for want of commands."""
    if type(error).__name__ == "BdbQuit":
        return True
    return isinstance(error, SystemExit) and _last_module(error) in _DEBUGGERS


def why_no_input(error: BaseException) -> str | None:
    """Return what to do about a script that died of the end of its input, or None if it died of something else."""
    if is_of_debugger(error):
        return _NO_DEBUGGER
    found: BaseException | None = error
    # Libraries raise errors of their own from that of input().
    while found is not None:
        if isinstance(found, EOFError) and _is_from_prompt(found):
            return _NO_INPUT
        found = found.__cause__ or found.__context__
    return None


def _is_from_prompt(error: EOFError) -> bool:
    return str(error) == "EOF when reading a line" or _last_module(error) in _ASKING


def why_hidden(error: BaseException, folders: Iterable[str]) -> str | None:
    """Return which file beside the script hides Python's own module, or the reverse, or None if none does."""
    found: BaseException | None = error
    while found is not None:
        for name, path in _like_own_modules(folders).items():
            if isinstance(found, (ImportError, AttributeError)) and _is_about(found, name, path):
                return (
                    f"{path} has the name of Python's own module {name!r}, so that libraries or the script get the wrong one of "
                    "the two: rename it"
                )
        found = found.__cause__ or found.__context__
    return None


def _is_about(error: ImportError | AttributeError, name: str, path: Path) -> bool:
    files = {frame.filename for frame in traceback.extract_tb(error.__traceback__)}
    # The user's module was imported in the place of Python's, and failed itself.
    if {str(path), str(path / "__init__.py")} & files:
        return True
    if isinstance(error, ImportError):
        missing = error.name or ""
        return missing.partition(".")[0] == name
    is_its_attribute = getattr(error.obj, "__name__", None) == name
    return is_its_attribute or f"module '{name}'" in str(error)


def _like_own_modules(folders: Iterable[str]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for folder in map(Path, folders):
        # Python's path may name archives, and folders that do not exist.
        if not folder.is_dir():
            continue
        for path in sorted(folder.iterdir()):
            is_module = path.suffix == ".py" or (path / "__init__.py").is_file()
            if is_module and path.stem in sys.stdlib_module_names:
                # Python imports from the first folder that has the name.
                found.setdefault(path.stem, path)
    return found


def _last_module(error: BaseException) -> str:
    """Return the module in which an error was raised."""
    trace, name = error.__traceback__, ""
    while trace is not None:
        name = str(trace.tb_frame.f_globals.get("__name__", ""))
        trace = trace.tb_next
    return name
