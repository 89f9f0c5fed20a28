"""Writes ``smp_estimator/settings/strategies.pyi``: arguments of the builders from the one place that describes them.

``python tests/support/documents/stubs.py`` after a change of ``smp_config/parameters.py``, then ``make format``.
"""

from __future__ import annotations

import inspect
import textwrap
import typing
from pathlib import Path
from typing import Any

from smp_config import ModelParallelParameters
from smp_estimator.settings import strategies

STUB = Path(strategies.__file__).with_suffix(".pyi")


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


if __name__ == "__main__":
    STUB.write_text(stub())
