"""Requests to a running job to change its degrees: files in the folder where its ranks keep records."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smp_config.errors import ConfigError

#: Asks ranks to listen for requests; the launcher hands it on.
VARIABLE = "SMP_RESHAPE_REQUESTS"

_REQUEST, _ANSWER = "reshape.json", "reshape-answer.json"

#: Characters of a request, at most.
_LONGEST = 100_000


def takes_requests(environ: Mapping[str, str]) -> bool:
    """Return whether a job takes requests.

    Raises:
        ConfigError: the value is neither 0 nor 1.
    """
    value = environ.get(VARIABLE, "0") or "0"
    if value not in ("0", "1"):
        raise ConfigError(
            f"{VARIABLE} is {value!r}; set it to 1 for a job whose degrees may be changed while it runs, or to 0",
            code="SMP106",
        )
    return value == "1"


def ask(folder: Path, parameters: Mapping[str, Any]) -> None:
    """Leave a request, and remove a former answer.

    Raises:
        ConfigError: another request waits.
    """
    (folder / _ANSWER).unlink(missing_ok=True)
    draft = folder / f".{_REQUEST}.{os.getpid()}"
    draft.write_text(json.dumps(dict(parameters)))
    try:
        os.link(draft, folder / _REQUEST)  # never in the place of another
    except FileExistsError:
        raise ConfigError(
            "the job was asked to change its degrees already, and has not done it yet: wait for its next step",
            code="SMP106",
        ) from None
    finally:
        draft.unlink()


def read_request(folder: Path) -> str | None:
    """Return the text of a request that waits, or None if none does."""
    try:
        with open(folder / _REQUEST, encoding="utf-8", errors="replace") as file:
            return file.read(_LONGEST)
    except OSError:
        return None


def answer(folder: Path, said: Mapping[str, Any]) -> None:
    """Write the answer to a request, and remove the request."""
    draft = folder / f".{_ANSWER}"
    draft.write_text(json.dumps(dict(said)))
    draft.replace(folder / _ANSWER)
    (folder / _REQUEST).unlink(missing_ok=True)


def read_answer(folder: Path) -> dict[str, Any] | None:
    """Return the job's answer to a request, or None while there is none."""
    try:
        found = json.loads((folder / _ANSWER).read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
