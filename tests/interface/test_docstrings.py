"""Docstrings of public names: a summary, every argument with its type, units, what is returned, what is refused, an example."""

from __future__ import annotations

import importlib
import inspect
import re
from types import ModuleType
from typing import Any

import pytest
from support.documents.docstrings import arguments, parameters, refusals, sections, whole

import smdistributed.modelparallel.torch as smp
from smp_estimator import SMPEstimator
from smp_estimator.sdk.arguments import SDKArguments

#: Modules of ``smp`` whose names are public, too. ``nn.huggingface`` has functions by family, and a page of its own.
SPACES = ("amp", "comm_hooks", "data", "exceptions", "nn", "optimizers", "patches.checkpoint", "utils")


def _names() -> dict[str, Any]:
    found = {f"smp.{name}": getattr(smp, name) for name in smp.__all__}
    for space in SPACES:
        module = importlib.import_module(f"{smp.__name__}.{space}")
        found |= {f"smp.{space}.{name}": getattr(module, name) for name in module.__all__}
    groups = tuple(smp.CommGroup)
    found = {name: value for name, value in found.items() if not isinstance(value, ModuleType | str)}
    return {name: value for name, value in found.items() if value not in groups} | _methods()


def _methods() -> dict[str, Any]:
    """``SMPEstimator``, and what is its own of the methods of an estimator."""
    own = {
        name: value
        for name, value in inspect.getmembers(SMPEstimator, callable)
        if not name.startswith("_") and inspect.unwrap(getattr(value, "__func__", value)).__module__.startswith("smp_")
    }
    return {"SMPEstimator": SMPEstimator} | {f"SMPEstimator.{name}": value for name, value in own.items()}


NAMES = _names()
#: Names of arguments that are a quantity, and words of which a description must have one.
QUANTITY = re.compile(
    r"(seconds|timeout|bytes|_size|^num_|count$|^every$|threshold|interval|density|^batch|features|dim$|memory_bytes)"
)
UNITS = re.compile(
    r"\b(seconds?|bytes?|[GMK]i?B|elements?|samples?|steps?|updates?|ranks?|heads?|channels?|features?|layers?|rows?|positions?"
    r"|parts?|share|ones|hosts?|how many|as (in|there|for)|dims?|BatchSampler)\b"
)


#: Arguments of an estimator that are the SDK's; its documentation describes them.
OF_THE_SDK = SDKArguments.__annotations__.keys()


def _is_context(value: Any) -> bool:
    annotation = str(inspect.signature(value).return_annotation)
    return annotation.startswith(("Iterator[None]", "contextlib.AbstractContextManager"))


def test_there_are_many() -> None:
    assert len(NAMES) > 100
    assert sum(name.count(".") > 1 for name in NAMES) > 30


@pytest.mark.parametrize("name", NAMES)
def test_a_docstring_says_all(name: str) -> None:
    value = NAMES[name]
    text = whole(value if callable(value) else type(value))
    parts = sections(text)
    assert parts[""].strip().split("\n\n")[0].rstrip().endswith((".", ":")), "no summary"
    described = arguments(text)
    wrong = [] if "Example" in parts and ">>> " in parts["Example"] else ["there is no Example: section"]
    own = [each for each in parameters(value) if name != "SMPEstimator" or each.name not in OF_THE_SDK]
    for parameter in own:
        said = described.get(parameter.name, "")
        if not said:
            wrong.append(f"Args: has no {parameter.name}")
        if parameter.annotation is parameter.empty:
            wrong.append(f"{parameter.name} has no type")
        is_quantity = QUANTITY.search(parameter.name) and not str(parameter.annotation).startswith("bool")
        if is_quantity and said and not UNITS.search(said):
            wrong.append(f"{parameter.name} has no unit: {said}")
    wrong += [f"Args: has {name}, which is no argument" for name in described if own and not _takes(own, name)]
    if not inspect.isclass(value) and callable(value):
        given = inspect.signature(value).return_annotation
        if given is inspect.Signature.empty:
            wrong.append("what it returns has no type")
        # What takes nothing is called after what it gives.
        if own and given not in (None, "None") and not _is_context(value) and not parts.keys() & {"Returns", "Yields"}:
            wrong.append(f"there is no Returns: section, and it gives {given}")
    if (refused := refusals(value)) and "Raises" not in parts:
        wrong.append(f"there is no Raises: section, and it raises {', '.join(sorted(refused))}")
    assert not wrong


def _takes(own: list[inspect.Parameter], name: str) -> bool:
    return name in {each.name for each in own} or name.startswith("_") or name == "kwargs"


def test_what_is_missing_is_told() -> None:
    def wait(seconds: float, what) -> int:  # type: ignore[no-untyped-def]
        """Wait.

        Args:
            seconds: a number.
        """
        raise smp.exceptions.SMPUserError(f"no {what} in {seconds}")

    NAMES["wait"] = wait
    try:
        with pytest.raises(AssertionError) as told:
            test_a_docstring_says_all("wait")
    finally:
        del NAMES["wait"]
    for words in ("no Example", "no what", "what has no type", "seconds has no unit", "no Returns", "no Raises"):
        assert words in str(told.value), words
