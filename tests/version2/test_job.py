"""What settings of version 2 do in a job."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from smp_runtime.job import session


@pytest.fixture
def tsm() -> Any:
    import torch.sagemaker

    import torch_sagemaker_finder  # noqa: F401

    yield torch.sagemaker
    torch.sagemaker.shutdown()


def _draw(tsm: Any, seed: int | None) -> torch.Tensor:
    tsm.init({} if seed is None else {"random_seed": seed})
    torch.manual_seed(0 if seed is None else seed + 1)  # which has no influence
    with tsm.state.get_rng_state_tracker().fork():
        found = torch.rand(4)
    tsm.shutdown()
    return found


def test_the_seed_is_that_of_what_ranks_draw_on_their_own(tsm: Any) -> None:
    one, same, other, default = (_draw(tsm, seed) for seed in (7, 7, 8, None))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(default, _draw(tsm, 12345))


def test_a_cache_that_is_emptied_is_reported(monkeypatch: Any, caplog: Any) -> None:
    from smp_version2 import cache_flushes

    counts = iter([3, 3, 5, 5])
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"num_alloc_retries": next(counts)})
    monkeypatch.setattr(cache_flushes.logger, "propagate", True)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    end = cache_flushes.install(torch.device("cuda", 0))
    with caplog.at_level(logging.WARNING, "smp"):
        for _ in range(3):
            optimizer.step()
        end()
        optimizer.step()  # takes no further count
    assert [record.getMessage().partition(" in a step")[0] for record in caplog.records] == [
        "the memory allocator of cuda:0 emptied its cache 2 times"
    ]


def test_updates_of_one_optimizer_are_the_steps_of_the_job(tsm: Any, monkeypatch: Any) -> None:
    from smp_records import rank_record

    notes = rank_record.Notes()
    monkeypatch.setattr(rank_record, "current_record", lambda: notes)
    monkeypatch.setattr("smp_version2.updates.current_record", lambda: notes)
    tsm.init()
    progress = session.current_session().progress
    parameter = torch.nn.Parameter(torch.zeros(1))
    generator, other = (torch.optim.SGD([parameter], lr=0.1) for _ in range(2))
    for _ in range(3):
        parameter.grad = torch.ones(1)
        generator.step()
        other.step()  # as of a second network
    assert (notes.step, progress.step) == (3, 3)
    tsm.shutdown()
    generator.step()
    assert (notes.step, progress.step) == (3, 3)


def test_a_rehearsal_is_refused_by_name(tsm: Any, monkeypatch: Any) -> None:
    from smp_runtime.errors import SMPUserError

    monkeypatch.setenv("SMP_REHEARSAL", "8")
    with pytest.raises(SMPUserError, match="a rehearsal is for scripts of version 1"):
        tsm.init()


def test_it_begins_and_ends_like_version_1(tsm: Any) -> None:
    import smdistributed.modelparallel.torch as smp
    from smp_runtime.errors import NotInitializedError, SMPUserError

    with pytest.raises(NotInitializedError, match=r"tsm\.init\(\) has not been called"):
        _ = tsm.state.rank
    assert tsm.state.tensor_parallel_degree == 1  # settings can be read before
    tsm.init({"hybrid_shard_degree": 1})
    tsm.init()  # a second call changes nothing
    assert (tsm.is_initialized(), tsm.state.rank, tsm.state.world_size) == (True, 0, 1)
    assert tsm.state.hybrid_shard_degree == 1
    tsm.shutdown()
    assert not tsm.is_initialized()
    smp.init({})
    with pytest.raises(SMPUserError, match="one version of the library"):
        tsm.init()
    smp.shutdown()


def test_what_a_script_sets_before_is_what_it_gets(tsm: Any) -> None:
    tsm.state.hybrid_shard_degree = 1
    with pytest.raises(AttributeError, match="cannot be set"):
        tsm.state.degree = 2
    tsm.init({"hybrid_shard_degree": 0})
    assert tsm.state.hybrid_shard_degree == 1
    tsm.shutdown()
    tsm.state.reset()
    assert tsm.state.hybrid_shard_degree == 0


def test_what_transform_cannot_take_is_named(tsm: Any) -> None:
    from smp_runtime.errors import SMPUserError

    tsm.init()
    with pytest.raises(SMPUserError, match="pass a MoEConfig"):
        tsm.transform(torch.nn.Linear(2, 2), config=object())
    with pytest.raises(SMPUserError, match="pass the model"):
        tsm.transform("model")
    with pytest.raises(SMPUserError, match="cp_comm_type is 'ring'"):
        tsm.transform(torch.nn.Linear(2, 2), cp_comm_type="ring")


@pytest.mark.parametrize("way", ["REENTRANT", "NO_REENTRANT", "function"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_recomputed_blocks_get_no_cache(tsm: Any, way: str, kind: str, monkeypatch: Any, caplog: Any) -> None:
    """PyTorch runs them again in backward, where a cache would have their tokens already."""
    from support.models.version2 import make_gpt2, make_llama

    from smp_runtime.activations import caches

    torch.manual_seed(0)
    model = (make_llama if kind == "llama" else make_gpt2)().double().train()
    ids = torch.randint(0, 64, (2, 12))
    wanted = _gradients(model, ids, use_cache=False)
    tsm.init()
    monkeypatch.setattr(caches.logger, "propagate", True)
    caches._report.cache_clear()
    _recompute(tsm.transform(model), way)
    found = _gradients(model, ids, use_cache=True)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)
    assert [record.getMessage()[:16] for record in caplog.records if "Cache" in record.getMessage()] == [
        "the checkpointed"
    ]


def _gradients(model: Any, ids: torch.Tensor, use_cache: bool) -> dict[str, torch.Tensor]:
    for _ in range(2):
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=use_cache).loss.backward()
    names = [name.replace("_checkpoint_wrapped_module.", "") for name, _ in model.named_parameters()]
    return dict(zip(names, [parameter.grad.clone() for parameter in model.parameters()], strict=True))


def _recompute(model: Any, way: str) -> None:
    """Let backward run the blocks of a model again, by PyTorch's wrapper or by its function."""
    import functools

    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers

    from smp_version2.layer_classes import TransformerLayer

    blocks = [module for module in model.modules() if isinstance(module, TransformerLayer)]
    if way == "function":
        for block in blocks:
            block.forward = functools.partial(_call_by_function, block.forward)
        return
    wrappers.apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=functools.partial(
            wrappers.checkpoint_wrapper, checkpoint_impl=wrappers.CheckpointImpl[way]
        ),
        check_fn=lambda module: isinstance(module, TransformerLayer),
    )


def _call_by_function(forward: Any, *args: Any, **kwargs: Any) -> Any:
    return torch.utils.checkpoint.checkpoint(forward, *args, use_reentrant=False, **kwargs)
