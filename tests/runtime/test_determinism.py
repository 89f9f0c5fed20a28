"""What a deterministic job sets and puts back, and which line of a script it names when something prevents equal runs."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy
import pytest
import torch
from support.logs import logged

from smp_runtime.errors import SMPUserError
from smp_runtime.tensors.determinism import VARIABLES, Determinism, explain_operations

if TYPE_CHECKING:
    from smp_runtime.job.session import Session

CONFIG = {"deterministic": True, "microbatches": 2}


@pytest.fixture
def deterministic() -> Iterator[dict[str, str]]:
    """The environment of a job that is deterministic meanwhile."""
    environ: dict[str, str] = {}
    kept = torch.get_rng_state()
    determinism = Determinism(environ, tells=False)
    yield environ
    determinism.end()
    torch.set_rng_state(kept)


def _state() -> tuple[object, ...]:
    cudnn = torch.backends.cudnn
    functions = random.seed, torch.seed, torch.random.seed, numpy.random.seed, numpy.random.default_rng, os.urandom
    switches = torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark
    return switches, functions, [os.environ.get(name) for name in VARIABLES], torch.is_anomaly_enabled()


def test_everything_is_set_and_put_back(solo: Callable[[dict[str, Any]], Session]) -> None:
    before = _state()
    session = solo(CONFIG)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.deterministic
    assert {name: os.environ[name] for name in VARIABLES} == VARIABLES
    for begin in session.before_step:
        begin()
    assert torch.is_anomaly_enabled()  # in the first step only
    for end in session.after_step:
        end(None)
    for begin in session.before_step:
        begin()
    assert not torch.is_anomaly_enabled()
    from smp_runtime.job.session import shutdown

    shutdown()
    assert _state() == before


def test_what_the_user_has_set_stays() -> None:
    environ = {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        Determinism(environ, tells=False).end()
        assert environ == {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def _drawn() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(numpy.random.rand())


def test_generators_that_nobody_has_seeded_are_seeded() -> None:
    found = []
    for _ in range(2):
        torch.seed()
        random.seed()
        numpy.random.seed()
        determinism = Determinism({}, tells=False)
        found.append(_drawn())
        determinism.end()
    assert found[0] == found[1]


def test_a_seed_of_the_script_stays() -> None:
    torch.manual_seed(7)
    expected = torch.rand(2).tolist()
    torch.manual_seed(7)
    first = float(torch.rand(()))
    determinism = Determinism({}, tells=False)
    assert [first, float(torch.rand(()))] == expected
    of_seven = random.random(), float(numpy.random.rand())
    determinism.end()
    random.seed(7)
    numpy.random.seed(7)
    assert of_seven == (random.random(), float(numpy.random.rand()))


def test_lines_that_draw_from_the_machine_are_told_once(deterministic: dict[str, str]) -> None:
    draws: list[Callable[[], object]] = [
        lambda: random.seed(),
        lambda: torch.seed(),
        lambda: numpy.random.seed(None),
        lambda: numpy.random.default_rng(),
        lambda: os.urandom(2),
    ]
    with logged(logging.WARNING) as records:
        random.seed(1)
        numpy.random.default_rng(1)
        numpy.random.seed(1)
        for draw in (*draws, *draws):
            draw()
    told = list(records)
    lines = [draw.__code__.co_firstlineno for draw in draws]
    names = ["random.seed()", "torch.seed()", "numpy.random.seed()", "numpy.random.default_rng()", "os.urandom()"]
    assert len(told) == len(draws)
    for sentence, name, line in zip(told, names, lines, strict=True):
        assert sentence.startswith(f"deterministic: {name} in {__file__}, line {line} takes numbers from the machine")


class _Unordered(torch.autograd.Function):
    """Its backward pass writes to one place twice."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return _put(gradient.clone())


def _put(x: torch.Tensor) -> torch.Tensor:
    return x.put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))


def test_an_operation_without_an_order_is_told_with_its_line(solo: Callable[[dict[str, Any]], Session]) -> None:
    import smdistributed.modelparallel.torch as smp

    solo(CONFIG)
    model = smp.DistributedModel(torch.nn.Linear(4, 4))

    @smp.step
    def forward(x: torch.Tensor) -> torch.Tensor:
        return _put(model(x))

    @smp.step
    def backward(x: torch.Tensor) -> torch.Tensor:
        loss = _Unordered.apply(model(x)).sum()
        model.backward(loss)
        return loss

    line = _put.__code__.co_firstlineno + 1
    message = rf"the operation put_ in .*test_determinism.py, line {line},"
    with pytest.raises(SMPUserError, match=message) as raised:
        forward(torch.rand(4, 4))
    assert "does not have a deterministic implementation" in str(raised.value.__cause__)
    # The line that the engine has reached is that of the backward pass; the first step's forward lines are told beside it.
    warned = pytest.warns(UserWarning, match=r"(?s)Traceback of forward call.*_Unordered.apply\(model\(x\)\)")
    with warned, pytest.raises(SMPUserError, match=message):
        backward(torch.rand(4, 4))


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="^another$"), explain_operations():
        raise RuntimeError("another")
