"""Ranks of a host compile equal graphs one after the other; the next job finds them."""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from smp_runtime.microbatch_state import compile_once


def _is_free(folder):
    (path,) = Path(folder).glob("smp-compile-*.lock")
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@pytest.fixture
def graph():
    return torch.fx.symbolic_trace(nn.Identity())


def test_a_graph_is_locked_while_it_is_compiled(graph, tmp_path, monkeypatch):
    monkeypatch.setattr(compile_once.tempfile, "gettempdir", lambda: str(tmp_path))
    inputs = [torch.ones(2, 3), 4]
    with compile_once._alone_with(graph, inputs):
        assert not _is_free(tmp_path)
    assert _is_free(tmp_path)
    with pytest.raises(RuntimeError, match="cannot"), compile_once._alone_with(graph, inputs):
        raise RuntimeError("cannot")
    assert _is_free(tmp_path)  # and equal graphs have one lock


def test_where_no_lock_can_be_made_each_compiles_for_itself(graph, tmp_path, monkeypatch):
    monkeypatch.setattr(compile_once.tempfile, "gettempdir", lambda: str(tmp_path / "absent"))
    with compile_once._alone_with(graph, []):
        assert not list(tmp_path.iterdir())


def _compiled(tensor_parallel):
    """How often the compiler's folder had the graph, had it not, and could not have it."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    import smdistributed.modelparallel.torch as smp

    torch._dynamo.reset()  # what other tests have compiled in this process
    counters.clear()
    torch.manual_seed(0)
    if tensor_parallel:
        sizes = {"num_attention_heads": 2, "attention_head_size": 4, "hidden_size": 8, "intermediate_size": 16}
        net = nn.Sequential(*(smp.nn.DistributedTransformerLayer(**sizes) for _ in range(2)))
    else:
        net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)))
    model = smp.DistributedModel(net)

    @smp.step
    def step(x):
        loss = model((x, None))[0].square().mean() if tensor_parallel else model(x).square().mean()
        model.backward(loss)
        return loss

    step(torch.ones(2, 4, 8))
    found = counters["aot_autograd"]
    return found["autograd_cache_hit"], found["autograd_cache_miss"], found["autograd_cache_bypass"]


@pytest.mark.full
@pytest.mark.parametrize("tensor_parallel", [False, True])
def test_the_next_job_finds_what_ranks_have_compiled(ranks, tmp_path, tensor_parallel):
    if shutil.which("g++") is None:
        pytest.skip("inductor compiles with g++, which is not here")
    config = {"compile": True, "ddp": True}
    config |= (
        {"tensor_parallel_degree": 2, "prescaled_batch": True, "optimize": "speed"}
        if tensor_parallel
        else {"pipeline_parallel_degree": 2}
    )
    environ = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    first, second = (ranks(_compiled, 2, tensor_parallel, config=config, env=environ, timeout=500) for _ in range(2))
    misses = sorted(missed for _, missed, _ in first)
    assert misses[1] > 0
    # Stages have equal blocks, whose graphs one rank compiles; tensor parallel ranks may have graphs of their own.
    assert tensor_parallel or misses[0] == 0
    assert all(hit and not missed and not barred for hit, missed, barred in second)
