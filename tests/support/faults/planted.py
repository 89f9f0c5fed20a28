"""Faults planted in functions of the runtime, by another text of theirs."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
import textwrap
from collections.abc import Iterator

from smp_records.script_lines import is_runtime_module


@contextlib.contextmanager
def planted(where: str, old: str, new: str) -> Iterator[None]:
    """Let a function have another text inside the block.

    Args:
        where: ``module:Class.function`` or ``module:function``.
        old: a part that occurs once; an error if it does not.
        new: what stands there instead.
    """
    module_name, _, path = where.partition(":")
    module = importlib.import_module(module_name)
    *owners, name = path.split(".")
    owner = module
    for each in owners:
        owner = getattr(owner, each)
    own = vars(owner)[name]
    function = inspect.unwrap(own)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{where} has not once: {old}"
    source = source.replace(old, new)
    if owners:
        source = source.replace("super()", f"super({owners[-1]}, self)")
    lines = "\n" * (function.__code__.co_firstlineno - 1)
    made: dict[str, object] = {}
    exec(compile(lines + source, function.__code__.co_filename, "exec", dont_inherit=False), vars(module), made)
    holders = [(owner, name)]
    if not owners:  # other modules may have it by name
        others = [each for key, each in sys.modules.items() if is_runtime_module(key) and each is not module]
        holders += [(each, key) for each in others for key, held in list(vars(each).items()) if held is own]
    for holder, key in holders:
        setattr(holder, key, made[name])
    try:
        yield
    finally:
        for holder, key in holders:
            setattr(holder, key, own)
