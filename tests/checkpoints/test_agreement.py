"""How ranks agree on a checkpoint behind a script's back: nothing that another process writes to the store is run or believed."""

from __future__ import annotations

import json
import pickle
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from smp_runtime.checkpoint.rank_agreement import StoreExchange
from smp_runtime.errors import CheckpointError


class _RunsCode:
    def __init__(self, file) -> None:
        self._file = str(file)

    def __reduce__(self):
        import os

        return (os.mkdir, (self._file,))


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


def _exchange(store, rank, secret=b"secret"):
    return StoreExchange(dist.PrefixStore("smp-checkpoint", store.clone()), rank, 2, "title", secret)


def test_values_come_through_in_both_directions(store):
    got = {}

    def second():
        exchange = _exchange(store, 1)
        exchange.gather([None, "é", {"a": [1, 2.5]}])
        got["second"] = exchange.broadcast(None)
        exchange.finish()

    thread = threading.Thread(target=second)
    thread.start()
    first = _exchange(store, 0)
    assert first.gather(0) == [0, [None, "é", {"a": [1, 2.5]}]]
    assert first.broadcast(["manifest", None]) == ["manifest", None]
    first.finish()
    thread.join()
    assert got["second"] == ["manifest", None]


@pytest.mark.parametrize("kind", ["pickle", "json", "signed by another", "of another place", "empty"])
def test_what_a_stranger_writes_is_refused_and_not_run(store, tmp_path, kind):
    stranger = dist.PrefixStore("smp-checkpoint", store.clone())
    if kind == "pickle":
        stranger.set("title/1/1", pickle.dumps(_RunsCode(tmp_path / "ran")))
    elif kind == "json":
        stranger.set("title/1/1", json.dumps([None, "{}"]))
    elif kind == "signed by another":
        _exchange(store, 1, secret=b"guess").gather([None, "{}"])
    elif kind == "of another place":
        _exchange(store, 1).gather(None)
        taken = stranger.get("title/1/1")
        stranger.delete_key("title/1/1")
        stranger.set("title/2/1", taken)
    else:
        stranger.set("title/1/1", b"")
    first = _exchange(store, 0)
    if kind == "of another place":
        first._calls = 1
    with pytest.raises(CheckpointError, match="rank 1's part .* is not from a rank of this job"):
        first.gather(None)
    assert list(tmp_path.iterdir()) == []
