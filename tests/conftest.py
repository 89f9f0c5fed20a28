"""Fixtures that every test folder shares."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test needs a name server; PyTorch asks one for the name of 127.0.0.1 whenever a rank connects.
os.environ.setdefault("RES_OPTIONS", "attempts:0")
os.environ.setdefault("SAGEMAKER_SUPPRESS_V2_WARNING", "1")

import pytest

MOST_RANKS = 4


def pytest_configure(config: pytest.Config) -> None:
    from support.client_cases import Cases

    config.pluginmanager.register(Cases())


class _SharedPool:
    """Starts a pool at its first use and again after a failure."""

    def __init__(self) -> None:
        self._pool: Any = None

    def run(self, *args: Any, **kwargs: Any) -> list[Any]:
        from support.rank_pool import RankPool

        if self._pool is None:
            self._pool = RankPool(MOST_RANKS)
        try:
            return self._pool.run(*args, **kwargs)
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
def ranks(_shared_pool: _SharedPool) -> Callable[..., list[Any]]:
    """``ranks(function, world_size, *args, config=…)``: run a function as a small job; see ``support.rank_pool.RankPool.run``."""
    return _shared_pool.run


@pytest.fixture
def solo() -> Iterator[Callable[..., Any]]:
    """``solo(config)``: a session of one process, in this process."""
    from smp_runtime.job import session

    yield session.init
    session.shutdown()
