"""Recorded numbers of a small step, made up: what ranks would write of two modules."""

from __future__ import annotations

from typing import Any

from smp_records.numerics import Head, RecordedValue

HEAD = Head(1, 0, 1, {"pp": 1, "tp": 1, "rdp": 1, "sharded": 1}, {"pp": 0, "tp": 0, "rdp": 0}, 1, 1, 1, 0.0)
#: Of one tensor, of norm 2: eight directions as they might be.
SHAPE = (1.0, -2.0, 3.0, 0.5, -1.5, 2.5, -0.5, 1.0)


def value(phase: str, name: str, factor: float = 1.0, **more: Any) -> RecordedValue:
    has_batch = phase in ("input", "output", "output gradient", "loss")
    found = RecordedValue(
        *(phase, name, 0, 0 if has_batch else None, 0 if has_batch else None, "", "float32", 4, 16),
        *(4.0 * factor**2, factor, 0, tuple(number * factor for number in SHAPE), (0, 0, 0), 1.0),
    )
    return found._replace(**more)


#: A step in causal order; results come one after the other.
STEP = [
    value("weight", "a.weight"),
    value("weight", "b.weight"),
    value("input", ""),
    value("output", "a", time=1.0),
    value("output", "b", time=2.0),
    value("loss", "", elements=1),
    value("output gradient", "b", time=3.0),
    value("output gradient", "a", time=4.0),
    value("gradient", "a.weight"),
    value("gradient", "b.weight"),
    value("update", "a.weight"),
    value("update", "b.weight"),
]


def changed(*wrong: tuple[str, str], factor: float = 1.5) -> list[RecordedValue]:
    return [
        value(v.phase, v.name, factor, elements=v.elements, time=v.time) if (v.phase, v.name) in wrong else v
        for v in STEP
    ]
