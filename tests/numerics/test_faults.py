"""Silent faults are traced to their module and phase, at all degrees; trainings without one are equal at all of them.

``pytest -s tests/numerics/test_faults.py`` prints how many of how many.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.faults.numerics_faults import FAULTS, cases
from support.faults.numerics_more_faults import BELOW_ROUNDING, MISSED_IN_HALF
from support.matrix import sampled
from support.training.numerics_training import DEGREES

from smp_estimator.numerics.comparison import compare
from smp_estimator.numerics.recorded_run import RecordedRun
from smp_estimator.numerics.report import write_verdict

HALF = {"fp32": {}, "bf16": {"bf16": True}, "fp16": {"fp16": True}}


def _train(folder: str, fault: str, adam: bool) -> list[float]:
    from support.faults.numerics_faults import FAULTS
    from support.training.numerics_training import train

    return train(folder, FAULTS[fault] if fault else None, adam=adam)


Record = Callable[..., RecordedRun]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("numerics")


@pytest.fixture
def record(ranks: Callable[..., list[Any]], folder: Path) -> Record:
    """``record(degrees, fault="", half="fp32", adam=True)``: a training, recorded once."""

    def made(degrees: str, fault: str = "", half: str = "fp32", adam: bool = True) -> RecordedRun:
        place = folder / f"{degrees}-{fault}-{half}-{adam}".replace(" ", "_")
        if not place.exists():
            world, config = DEGREES[degrees]
            # Where ranks part, a job would end by its own checks; recorded they are to be found as well.
            checks = {"check_invariants": False} if fault else {}
            ranks(_train, world, str(place), fault, adam, config={**config, **HALF[half], **checks})
        return RecordedRun.read(str(place))

    return made


@pytest.mark.parametrize(
    ("fault", "degrees"),
    sampled(
        cases(),
        [
            ("the same batch on all replicas", "dp"),
            ("weights changed on one rank", "dp"),
            ("microbatches summed", "mb"),
            ("rounded frequencies", "zero"),
            ("a tenth more learning rate", "sdp"),
            ("gradient of the first block's result scaled", "pp"),
        ],
    ),
)
def test_a_fault_is_traced(record: Record, fault: str, degrees: str) -> None:
    found = compare(record("one"), record(degrees, fault))
    wanted = FAULTS[fault]
    drift = found.first_drift
    first = drift[1].key if drift is not None else found.first.key if found.first is not None else None
    assert first is not None, write_verdict(found)
    assert first.phase in wanted.phases, write_verdict(found)
    assert first.name.startswith(tuple(wanted.module.split("|"))), write_verdict(found)


#: Smaller than the rounding of half precision, or nothing at all in it.
_BELOW_ROUNDING = (
    *("result scaled", "result of the last block scaled", "head's result in half precision", "norm's result rounded"),
    *("another epsilon", "another activation", "rounded frequencies", "gradient of the embedding scaled"),
    *("other first weights", "weights rounded", "a tenth more learning rate", "loss of the last tokens only"),
    *BELOW_ROUNDING,
    *MISSED_IN_HALF,
)


@pytest.mark.parametrize("half", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("fault", "degrees"),
    sampled([case for case in cases() if case[0] not in _BELOW_ROUNDING], []),
)
def test_a_fault_is_traced_in_half_precision(record: Record, fault: str, degrees: str, half: str) -> None:
    found = compare(record("one", half=half), record(degrees, fault, half=half))
    drift = found.first_drift
    first = drift[1].key if drift is not None else found.first.key if found.first is not None else None
    assert first is not None, write_verdict(found)
    assert first.phase in FAULTS[fault].phases, write_verdict(found)
    assert first.name.startswith(tuple(FAULTS[fault].module.split("|"))), write_verdict(found)


@pytest.mark.parametrize(
    ("one", "other", "half", "adam"),
    sampled(
        [(*pair, half, adam) for pair in itertools.combinations(DEGREES, 2) for half in HALF for adam in (True, False)],
        [
            ("one", "dp", "fp32", True),
            ("one", "pp", "bf16", True),
            ("one", "sdp", "bf16", True),
            ("zero", "pp", "fp32", True),
        ],
    ),
)
def test_no_fault_is_found_where_there_is_none(record: Record, one: str, other: str, half: str, adam: bool) -> None:
    found = compare(record(one, half=half, adam=adam), record(other, half=half, adam=adam))
    assert found.is_equal, write_verdict(found)
    phases = {each.key.phase for each in found.compared}
    assert {
        "weight",
        "buffer",
        "input",
        "output",
        "loss",
        "output gradient",
        "loss scale",
        "gradient",
        "update",
    } <= phases
    names = {each.key.name for each in found.compared if each.key.phase == "gradient"}
    assert {"tokens.weight", "blocks.0.attention.qkv.weight", "blocks.1.mlp.2.bias", "norm.weight"} <= names
    assert {each.step for each in found.compared} == {0, 1, 2}


def test_a_run_is_equal_to_itself_in_every_number(record: Record) -> None:
    found = compare(record("dp"), record("dp"))
    assert found.is_equal
    assert {each.error for each in found.compared} == {0.0}
    assert not found.alone
