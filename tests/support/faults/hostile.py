"""Hostile input, drawn at random and the same in every run: values, mutations of what is right, and a count of verdicts."""

from __future__ import annotations

import contextlib
import random
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import PurePosixPath
from types import FrameType
from typing import Any

#: No case takes longer, unless it hangs: seconds.
PATIENCE = 10.0


class Hang(BaseException):
    """A case took too long; no handler of errors must take it for one."""


@contextlib.contextmanager
def alarm(seconds: float = PATIENCE) -> Iterator[None]:
    """Raise Hang in the block when it lasts longer; an alarm that was set before, as that of a whole test, goes on after it."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise Hang(f"longer than {seconds} s")

    began = time.monotonic()
    handler = signal.signal(signal.SIGALRM, ring)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), 0.01), interval)


@dataclass
class Tally:
    """Verdicts on cases: accepted, refused with an error of the project's, raw (any other error), hang.

    Attributes:
        refusals: the classes of the project's errors.
        wrong: descriptions of raw errors and hangs, the first of each kind.
    """

    refusals: tuple[type[BaseException], ...]
    counts: Counter[str] = field(default_factory=Counter)
    wrong: dict[str, str] = field(default_factory=dict)

    def judge(self, case: object, run: Callable[[], None]) -> str:
        """Run one case and count its verdict."""
        try:
            with alarm():
                run()
            verdict = "accepted"
        except Hang as error:
            verdict = "hang"
            self._note(case, error)
        except self.refusals as error:
            verdict = "refused"
            assert str(error).strip(), case
        except Exception as error:
            verdict = "raw"
            self._note(case, error)
        self.counts[verdict] += 1
        return verdict

    def _note(self, case: object, error: BaseException) -> None:
        frames = traceback.extract_tb(error.__traceback__)
        last = frames[-1]
        kind = f"{type(error).__name__} at {last.filename}:{last.lineno}"
        ours = [f"{PurePosixPath(f.filename).name}:{f.lineno}" for f in frames if "smp_" in f.filename]
        self.wrong.setdefault(
            kind, f"{kind} ({str(error)[:120]}) by {' < '.join(reversed(ours[-4:]))} for {repr_of(case)}"
        )

    def __str__(self) -> str:
        named = ", ".join(f"{self.counts[name]} {name}" for name in ("accepted", "refused", "raw", "hang"))
        return "\n".join([named, *self.wrong.values()])


def repr_of(value: object) -> str:
    """Enough of a case to find it."""
    try:
        return repr(value)[:600]
    except Exception as error:
        return f"a case that cannot be written out: {type(error).__name__}"


def deep(levels: int) -> Any:
    """A list in a list in a list …"""
    made: Any = []
    for _ in range(levels):
        made = [made]
    return made


def _endless() -> dict[str, Any]:
    made: dict[str, Any] = {}
    made["self"] = made
    return made


#: Texts of which each has broken something somewhere.
TEXTS = (
    "",
    " ",
    "\0",
    "a\0b",
    "\ud800",
    "\udc80x",
    "\n",
    "a\nb",
    "=",
    "a=b",
    "-",
    "--",
    "--np",
    "-x",
    ".",
    "..",
    "../..",
    "../../etc/passwd",
    "/etc/passwd",
    "/dev/zero",
    "~root",
    "$(touch hostile)",
    "`touch hostile`",
    "; touch hostile;",
    "| touch hostile",
    "%s%n",
    "{0.__class__}",
    "true",
    "null",
    "nan",
    "NaN",
    "inf",
    "-Infinity",
    "1e999",
    "1e5",
    "0x10",
    "１２",
    "²",
    "9" * 5000,
    "1" * 40,
    "[" * 3000,
    "[" * 200 + "]" * 200,
    '{"a": 1, "a": 2}',
    '"\\ud800"',
    '"\\u0000"',
    "{}",
    "[]",
    "ä" * 300,
    "x" * 300,
    "x" * 5000,
    "x" * 200_000,
    "ml.p4d.24xlarge",
    "ml.",
    "local",
    "s3://bucket/key",
    "file:///nowhere",
    "hf_" + "a1B2" * 5,
    "\u202e\u0007\u001b[31m",
)

NUMBERS = (
    0,
    -1,
    1,
    2,
    3,
    2.5,
    -0.0,
    1e5,
    100_000,
    1_000_000,
    1e308,
    float("nan"),
    float("inf"),
    float("-inf"),
    2**31,
    2**63,
    2**64,
    10**30,
    10**400,
    10**5000,
    -(10**400),
    True,
    False,
    Decimal(3),
    1j,
)


def _others() -> list[Callable[[], Any]]:
    return [
        lambda: None,
        list,
        dict,
        set,
        lambda: [1],
        lambda: ["a", None],
        lambda: {"a": 1},
        lambda: {1: 2},
        lambda: {None: None},
        lambda: {"enabled": True},
        lambda: {"a": {"b": {"c": [1, 2, {"d": None}]}}},
        lambda: deep(50),
        lambda: deep(100),
        lambda: deep(5000),
        _endless,
        lambda: (1, 2),
        lambda: b"x",
        lambda: bytearray(b"x"),
        object,
        lambda: object,
        lambda: len,
        lambda: range(3),
        lambda: iter([1]),
        lambda: PurePosixPath("a/b"),
        lambda: ValueError("x"),
        lambda: {"x" * 300: 1},
        lambda: list(range(10_000)),
    ]


_OTHERS = _others()
#: Those of JSON.
_JSON_OTHERS = [
    lambda: None,
    list,
    dict,
    lambda: [1],
    lambda: ["a", None],
    lambda: {"a": 1},
    lambda: {"enabled": True},
    lambda: {"a": {"b": {"c": [1, 2, {"d": None}]}}},
    lambda: deep(30),
    lambda: deep(100),
    lambda: list(range(10_000)),
]


def value(source: random.Random, *, json_only: bool = False) -> Any:
    """A value that is wrong in most places."""
    kind = source.randrange(3)
    if kind == 0:
        return source.choice(TEXTS)
    if kind == 1:
        number = source.choice(NUMBERS)
        return number if not json_only or (isinstance(number, int | float) and abs(number) < 10**4000) else 7
    return source.choice(_JSON_OTHERS if json_only else _OTHERS)()


def mutated(source: random.Random, given: Any, *, json_only: bool = False) -> Any:
    """A copy of ``given``, dictionaries and lists, with one place changed."""
    made = _copied(given)
    places = list(_places(made))
    if not places:
        return value(source, json_only=json_only)
    holder, key = source.choice(places)
    way = source.randrange(10)
    if way < 6:
        holder[key] = value(source, json_only=json_only)
    elif way == 6:
        del holder[key]
    elif way == 7 and isinstance(holder, dict):
        holder[source.choice(TEXTS) if json_only else value_as_key(source)] = holder.pop(key)
    elif way == 8 and isinstance(holder, dict):
        holder[source.choice(TEXTS)] = value(source, json_only=json_only)
    elif isinstance(holder, list):
        holder.extend([holder[key]] * source.choice((1, 1, 50)))
    else:
        holder[key] = [holder[key]] if source.random() < 0.5 else {"inner": holder[key]}
    return made


def value_as_key(source: random.Random) -> Any:
    """A name of a setting that is none."""
    return source.choice([*TEXTS, 0, 1.5, None, True, (), ("a", 1), b"x", 10**5000])


#: Levels that are mutated; below them lie the hostile values of an earlier mutation.
_LEVELS = 8


def _copied(value: Any, level: int = 0) -> Any:
    if level < _LEVELS and type(value) is dict:
        return {key: _copied(inner, level + 1) for key, inner in value.items()}
    if level < _LEVELS and type(value) is list:
        return [_copied(inner, level + 1) for inner in value]
    return value


def _places(value: Any, level: int = 0) -> Iterator[tuple[Any, Any]]:
    """Every place below ``value``: what holds it, and by which key."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, held in inner if level < _LEVELS - 1 else ():
        yield value, key
        yield from _places(held, level + 1)
