"""Writes ``smp_estimator/settings/strategies.pyi`` and ``docs/reference/parameters.md`` from the descriptions of the parameters.

``python tests/support/documents/stubs.py`` after a change of ``smp_config/parameters.py``, then ``make format``.
"""

from __future__ import annotations

import inspect
import textwrap
import typing
from pathlib import Path
from typing import Any

from smp_config import ModelParallelParameters
from smp_config.version2.parameters import Version2Parameters
from smp_estimator.settings import strategies

if typing.TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

STUB = Path(strategies.__file__).with_suffix(".pyi")
PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "parameters.md"

_HEAD = """\
# Parameters

The keys of `mp_parameters` in `distribution`, of `smp_estimator.ModelParallel` and of `smp.init`. Which to set first:
[choose degrees](../choose.md). `smp-estimator validate FILE` checks them without a job.

## Version 1

For scripts that `import smdistributed.modelparallel.torch as smp`.

"""
_VERSION_2 = """
## Version 2

For scripts that `import torch.sagemaker as tsm`; [what they do](../version-2.md).

"""
#: How a bound of a field is written.
_BOUNDS = {"ge": "≥ {}", "gt": "> {}", "le": "≤ {}", "lt": "< {}"}


def stub() -> str:
    """The text of the stub file, before it is formatted."""
    fields, types = ModelParallelParameters.model_fields, typing.get_type_hints(ModelParallelParameters)
    arguments = [
        f"{name}: {_written(types[name], field.default)} = {field.default!r}" for name, field in fields.items()
    ]
    described = "\n".join(_wrapped(f"{name}: {field.description}") for name, field in fields.items())
    mpi = inspect.signature(strategies.MPI)
    return (
        f'''"""Types of ``strategies.py``; written by ``tests/support/documents/stubs.py``."""

from typing import Any, Literal

class ModelParallel(dict[str, Any]):
    def __init__(self, *, {", ".join(arguments)}) -> None:
        """Turn the model parallel library on.

        Args:
{described}
        """

class MPI(dict[str, Any]):
    def __init__{mpi.replace(parameters=[_SELF, *mpi.parameters.values()], return_annotation="None")}: ...
'''.replace("'int | None'", "int | None")
        .replace("'str'", "str")
        .replace("-> 'None'", "-> None")
    )


_SELF = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _written(kind: Any, default: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return f"Literal[{', '.join(map(repr, typing.get_args(kind)))}]"
    if kind is int and isinstance(default, int) and default >= 10**6:
        return "float"  # people write 5e8
    return " | ".join("None" if part is type(None) else part.__name__ for part in typing.get_args(kind) or [kind])


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 128, initial_indent=" " * 12, subsequent_indent=" " * 16)


def page() -> str:
    """The text of the page with all parameters."""
    return _HEAD + _table(ModelParallelParameters) + _VERSION_2 + _table(Version2Parameters)


def _table(model: type[BaseModel]) -> str:
    types = typing.get_type_hints(model)
    rows = ["| parameter | value | default | |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        shown = f"`{field.default}`".replace("`None`", "–")
        rows.append(f"| `{name}` | {_value(types[name], field)} | {shown} | {field.description} |")
    return "\n".join([*rows, ""])


def _value(kind: Any, field: FieldInfo) -> str:
    """Return the values that a parameter may have, in words."""
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(kind) if not choice.startswith("_"))
    names = {"int": "whole number", "float": "number", "bool": "`True` or `False`", "str": "text", "None": ""}
    words = [names.get(word, word) for word in _written(kind, field.default).split(" | ")]
    bounds = [
        text.format(getattr(item, name))
        for item in field.metadata
        for name, text in _BOUNDS.items()
        if getattr(item, name, None) is not None
    ]
    return ", ".join(filter(None, [" or ".join(filter(None, words)), *bounds]))


if __name__ == "__main__":
    STUB.write_text(stub())
    PAGE.write_text(page(), encoding="utf-8")
