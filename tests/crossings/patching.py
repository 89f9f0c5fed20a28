"""Puts a mistake into functions that processes have imported already, in place of processes that import all anew."""

from __future__ import annotations

import gc
import importlib
import types
from collections.abc import Callable, Iterator
from pathlib import Path

#: Undoes a change.
Undo = Callable[[], None]


class CannotPatchError(Exception):
    """A module whose functions cannot be replaced."""


def can_patch(before: str, after: str) -> bool:
    """Return whether two texts of a module differ in nothing but the code of functions, which can be replaced in place."""
    return _pairs(before, after) is not None


def patch(file: str, after: str) -> Undo:
    """Replace the code of all functions that come from a file, wherever they are referred to.

    Args:
        file: of a module that :func:`can_patch`, as the import system has it.
        after: the module's other text.

    Raises:
        CannotPatchError: the module is another one here, or nothing would change.
    """
    path = Path(file)
    root = next(folder for folder in path.parents if not (folder / "__init__.py").exists())
    name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    module = importlib.import_module(name)
    pairs = _pairs(path.read_text(encoding="utf-8"), after)
    if pairs is None or module.__file__ != file:
        raise CannotPatchError(f"{name} is {module.__file__} here, not {file}, or more than its functions would change")
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()  # frozen objects are not listed
    changed: list[tuple[types.FunctionType, types.CodeType]] = []
    for function in gc.get_objects():
        if type(function) is not types.FunctionType or function.__code__.co_filename != file:
            continue
        new = pairs.get(function.__code__)
        if new is not None:
            changed.append((function, function.__code__))
            function.__code__ = new.replace(co_filename=file)
    if was_frozen:
        gc.freeze()
    if not any(
        function.__code__.co_code != code.co_code
        or function.__code__.co_consts != code.co_consts
        or function.__code__.co_names != code.co_names
        for function, code in changed
    ):
        raise CannotPatchError(f"no function of {file} has changed")

    def undo() -> None:
        for function, code in changed:
            function.__code__ = code

    return undo


def patch_rank(file: str, after: str) -> None:
    """Do so in a rank, until its process ends."""
    patch(file, after)


def _pairs(before: str, after: str) -> dict[types.CodeType, types.CodeType] | None:
    """Return the new code of each function by its former one; None if something else differs too."""
    former, later = (compile(text, "", "exec", dont_inherit=True) for text in (before, after))
    found: dict[types.CodeType, types.CodeType] = {}
    waiting = [(former, later, True)]
    while waiting:
        old, new, is_run = waiting.pop()
        inner_old, inner_new = list(_inside(old)), list(_inside(new))
        if not is_run:  # a function, whose inner ones come with it
            if old.co_freevars != new.co_freevars:
                return None
            found[old] = new
            waiting += [(one, other, False) for one, other in zip(inner_old, inner_new, strict=False)]
            continue
        names = [each.co_qualname for each in inner_old]
        if _own_parts(old) != _own_parts(new) or names != [each.co_qualname for each in inner_new]:
            return None
        # The bodies of classes ran when the module was imported, as its own did.
        waiting += [(one, other, not one.co_flags & 2) for one, other in zip(inner_old, inner_new, strict=True)]
    return found


def _inside(code: types.CodeType) -> Iterator[types.CodeType]:
    return (each for each in code.co_consts if isinstance(each, types.CodeType))


def _own_parts(code: types.CodeType) -> tuple[object, ...]:
    consts = tuple(None if isinstance(each, types.CodeType) else each for each in code.co_consts)
    # The bodies of classes keep the numbers of their lines nowhere but in the table.
    return code.co_code, tuple(map(repr, consts)), code.co_names
