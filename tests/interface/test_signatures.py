"""Every documented name is there, with the documented arguments in the documented order, and their defaults."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

LINES = [
    line
    for line in (Path(__file__).parent / "documented.txt").read_text().splitlines()
    if line.strip() and not line.startswith("#")
]


def _found(dotted):
    """What a dotted name leads to; None for what an instance sets on itself."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        if count == len(parts) and inspect.isfunction(attribute := _of_package(parts)):
            return attribute  # a module that is called like what it holds, which goes before it
        for index, name in enumerate(parts[count:], count + 1):
            if not hasattr(found, name) and inspect.isclass(found) and index == len(parts) and _sets(found, name):
                return None
            found = getattr(found, name)
        return found
    raise AssertionError(f"{dotted} cannot be imported")


def _of_package(parts):
    return getattr(importlib.import_module(".".join(parts[:-1])), parts[-1], None) if len(parts) > 1 else None


def _sets(kind, name):
    return any(
        re.search(rf"\bself\.{name}(: [^=\n]+)? =", inspect.getsource(base))
        for base in kind.__mro__
        if base.__module__.startswith(("smp_integrations", "smp_runtime", "smp_tools"))
    )


def _parameters(found):
    """Of a function or constructor, without self."""
    if not inspect.isclass(found) and "." in found.__qualname__ and not inspect.ismethod(found):
        taken = list(inspect.signature(found).parameters.values())
        return taken[1:] if taken and taken[0].name == "self" else taken
    return list(inspect.signature(found).parameters.values())


@pytest.mark.parametrize("line", LINES)
def test_the_documented_interface(line):
    dotted, bracket, _ = line.partition("(")
    found = _found(dotted)
    if not bracket:
        return
    documented = ast.parse(f"def f({line[len(dotted) + 1 :]}: ...").body[0].args
    own = _parameters(found)
    places = [p for p in own if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)]
    named = {p.name: p for p in own if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = {p.kind for p in own} & {inspect.Parameter.VAR_KEYWORD}
    if documented.vararg:
        assert any(p.kind is p.VAR_POSITIONAL for p in own)
    if documented.kwarg:
        assert takes_any
    defaults = [None] * (len(documented.args) - len(documented.defaults)) + documented.defaults
    for index, (argument, default) in enumerate(zip(documented.args, defaults, strict=True)):
        name = argument.arg
        if takes_any and any(p.kind is p.VAR_POSITIONAL for p in own) and name not in named:
            continue  # handed on as it is
        assert index < len(places), f"{name} cannot be given by position"
        assert places[index].name == name or (index == 0 and places[0].kind is places[0].POSITIONAL_ONLY)
        assert places[index].kind is not places[index].POSITIONAL_ONLY, f"{name} cannot be given by name"
        _same_default(places[index], default)
    for argument, default in zip(documented.kwonlyargs, documented.kw_defaults, strict=True):
        assert argument.arg in named or takes_any
        if argument.arg in named:
            _same_default(named[argument.arg], default)
    known = {argument.arg for argument in (*documented.args, *documented.kwonlyargs)}
    for parameter in own:  # a call as documented is enough
        if parameter.name not in known and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            assert parameter.default is not parameter.empty, f"{parameter.name} is needed, but not documented"


def _same_default(own, documented):
    if documented is None:
        assert own.default is own.empty or own.name in OPTIONAL_HERE, f"{own.name} has a default, which hides a mistake"
        return
    assert own.default is not own.empty, f"{own.name} has no default"
    value = ast.literal_eval(documented)
    if value is not ...:
        assert own.default == value, f"{own.name}: {own.default!r}, documented {value!r}"
        assert type(own.default) is type(value)


#: Documented without a default, because the pages give none to any argument of these.
OPTIONAL_HERE = {"grad_tensors"}


def test_a_line_that_does_not_hold_fails():
    name = "smdistributed.modelparallel.torch.save"
    for wrong in ("(f, obj)", "(obj, f, partial=False)", "(obj, f, partially=True)", "(obj)", "(obj, f, *args)"):
        with pytest.raises(AssertionError):
            test_the_documented_interface(name + wrong)
    with pytest.raises(AttributeError):
        test_the_documented_interface("smdistributed.modelparallel.torch.StepOutput.inputs")
