"""Fixtures that every test folder shares."""

from __future__ import annotations

import functools
import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test needs a name server; PyTorch asks one for the name of 127.0.0.1 whenever a rank connects.
os.environ.setdefault("RES_OPTIONS", "attempts:0")
os.environ.setdefault("SAGEMAKER_SUPPRESS_V2_WARNING", "1")
# A shell that ignores SIGINT, as for a job in the background, hands that on to the notebooks to which tests send Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    from runner import budget, recording

    recording.add_option(parser)
    budget.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    from runner import budget, recording
    from support import compiling, matrix
    from support.documents.client_cases import Cases

    recording.register(config)
    budget.register(config)

    if worker := getattr(config, "workerinput", None):
        compiling.compile_share(config, int(worker["workerid"].removeprefix("gw")), worker["workercount"])
    matrix.is_whole = "not full" not in config.option.markexpr
    config.pluginmanager.register(Cases())
    config.pluginmanager.register(matrix.LongerTests(Path(__file__).with_name("longer-tests.txt")))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """``--dist loadfile`` as :class:`support.dealing.FewImports` does it."""
    from support.dealing import FewImports

    return FewImports(config, log) if config.option.dist == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected stays to the end: memory is not looked through for it, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test marked ``both_transports`` runs with its ranks on torch.distributed, and once more on shared memory."""
    if metafunc.definition.get_closest_marker("both_transports"):
        metafunc.parametrize("_process_mode", [False, True], ids=["distributed", "shared"], indirect=True)


@pytest.hookimpl(trylast=True)  # what -m leaves
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where files are dealt out to several workers, those that wait for processes run beside those that compute."""
    if not hasattr(config, "workerinput"):
        return
    from support.dealing import TRANSFORMERS, shared_scope

    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    waiting = [path for path, tests in files.items() if any(test.get_closest_marker("job") for test in tests)]
    # Files of many tests first. Nor does one that waits come late, when files are short and the other workers would be idle.
    computing = sorted(files.keys() - set(waiting), key=lambda path: (-len(files[path]), path))
    places = {path: 0.6 * number / len(waiting) for number, path in enumerate(waiting)}
    places |= {path: number / len(computing) for number, path in enumerate(computing)}
    # These all stay with one worker, for longer than any other files do, and import once for all ranks if they come first.
    places |= {path: -1.0 for path in files if shared_scope(path) == TRANSFORMERS}
    items[:] = [test for path in sorted(files, key=places.__getitem__) for test in files[path]]


#: What ranks import for functions of test files, and what those that run models of Transformers import beside that: it would be
#: most of their time.
_TESTS = ("pytest", "_pytest.assertion.rewrite")
_TRANSFORMERS = ("support.ranks.loaded_transformers",)


class _SharedPool:
    """Starts a pool at its first use and again after a failure."""

    def __init__(self) -> None:
        self._pool: Any = None

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        from support.dealing import ROOT, TRANSFORMERS, shared_scope
        from support.ranks.rank_pool import MOST_RANKS, RankPool

        if self._pool is None:
            # Of the test that runs: the function may come from a file that several share.
            file = os.environ["PYTEST_CURRENT_TEST"].partition("::")[0]
            is_with = shared_scope(ROOT / file) == TRANSFORMERS
            self._pool = RankPool(MOST_RANKS, (*_TESTS, *(_TRANSFORMERS if is_with else ())))
        try:
            return self._pool.run(function, *args, **kwargs)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None


@pytest.fixture(scope="session")
def _shared_pool() -> Iterator[_SharedPool]:
    pool = _SharedPool()
    yield pool
    pool.close()


@pytest.fixture
def _process_mode(request: pytest.FixtureRequest) -> bool:
    return getattr(request, "param", False)


@pytest.fixture
def ranks(_shared_pool: _SharedPool, _process_mode: bool) -> Callable[..., list[Any]]:
    """``ranks(function, world_size, *args, config=…)``: run a function as a small job; see ``support.ranks.rank_pool``.

    Tensors go over ``torch.distributed``, as in jobs on GPUs or several hosts; see the mark ``both_transports``.
    """
    return functools.partial(_shared_pool.run, process_mode=_process_mode)


@pytest.fixture
def solo() -> Iterator[Callable[..., Any]]:
    """``solo(config)``: a session of one process, in this process."""
    from smp_runtime.job import session

    yield session.init
    session.shutdown()
