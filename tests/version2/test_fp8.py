"""``transformer_engine`` where it is not installed, and ``"fp8": true``: split and sharded models equal one process, and resume."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.documents.doc_runs import matching

ROOT = Path(__file__).resolve().parents[2]
CONTAINER = ROOT / "container"
STEPS, SAVED = 4, 2


class Training:
    """A script of version 2 with FP8 as public ones have it.

    Each row has the gradient that it has in one process: the loss is no mean over a rank's rows.
    """

    def __init__(self, config: dict[str, Any], recomputes: bool, contexts: bool) -> None:
        import torch.sagemaker as tsm
        import transformer_engine
        from support.models.version2 import make_llama
        from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers
        from torch.distributed.fsdp import FullyShardedDataParallel
        from transformer_engine.common.recipe import DelayedScaling, Format

        from smp_version2.layer_classes import TransformerLayer

        tsm.init(config)
        torch.manual_seed(0)
        self.model = FullyShardedDataParallel(tsm.transform(make_llama().double()), use_orig_params=True)
        if recomputes:
            function = functools.partial(
                transformer_engine.pytorch.checkpoint,
                distribute_saved_activations=False,
                get_rng_state_tracker=tsm.state.get_rng_state_tracker,
                tp_group=tsm.state.tp_process_group,
                use_reentrant=False,
            )
            wrap = functools.partial(
                wrappers.checkpoint_wrapper,
                checkpoint_impl=wrappers.CheckpointImpl.NO_REENTRANT,
                checkpoint_fn=function,
            )
            wrappers.apply_activation_checkpointing(
                self.model, checkpoint_wrapper_fn=wrap, check_fn=lambda module: isinstance(module, TransformerLayer)
            )
        self.replicas = tsm.state.world_size // tsm.state.tp_size
        self.mine = tsm.state.rank // tsm.state.tp_size
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05 * self.replicas)
        recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=4, amax_compute_algo="max")
        self.context = functools.partial(
            transformer_engine.pytorch.fp8_autocast,
            enabled=contexts,
            fp8_recipe=recipe,
            fp8_group=tsm.state.world_process_group,
        )
        self.contexts = contexts

    def run(self, first: int, last: int) -> None:
        from contextlib import nullcontext

        for step in range(first, last):
            ids = torch.randint(0, 64, (4, 12), generator=torch.Generator().manual_seed(step))
            ids = ids.chunk(self.replicas)[self.mine]
            self.optimizer.zero_grad()
            with self.context() if self.contexts else nullcontext():
                logits = self.model(input_ids=ids, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"
            )
            (loss / 64).backward()
            self.optimizer.step()

    def whole(self) -> dict[str, torch.Tensor]:
        from torch.distributed.fsdp import FullyShardedDataParallel

        with FullyShardedDataParallel.summon_full_params(self.model, writeback=False):
            named = self.model.named_parameters()
            return {name.replace("_checkpoint_wrapped_module.", ""): each.detach().clone() for name, each in named}


def _train(config: dict[str, Any], recomputes: bool = False, contexts: bool = True) -> Any:
    import torch.sagemaker as tsm

    import torch_sagemaker_finder  # noqa: F401
    from smp_runtime.fp8 import autocast

    training = Training(config, recomputes, contexts)
    training.run(0, STEPS)
    scales = autocast.scales_to_save()
    found = training.whole()
    tsm.shutdown()
    assert not autocast.scales_to_save()
    return found, scales


@pytest.fixture(scope="module")
def alone(_shared_pool: Any) -> Any:
    return _shared_pool.run(_train, 1, {}, init=False, process_mode=False)[0]


@pytest.mark.parametrize(
    ("config", "world", "recomputes"),
    [
        pytest.param({"hybrid_shard_degree": 2}, 2, False, marks=pytest.mark.full),
        ({"hybrid_shard_degree": 2}, 2, True),
        pytest.param({"tensor_parallel_degree": 2, "hybrid_shard_degree": 1}, 2, True, marks=pytest.mark.full),
        ({"tensor_parallel_degree": 2, "hybrid_shard_degree": 2}, 4, False),
    ],
    ids=["sharded", "sharded, recomputed", "split, recomputed", "both"],
)
def test_a_script_equals_one_process(
    ranks: Any, alone: Any, config: dict[str, Any], world: int, recomputes: bool
) -> None:
    wanted, scales = alone
    assert len(scales) == 14, "seven layers of each block, and not the one of the logits"
    for found, theirs in ranks(_train, world, config, recomputes, init=False):
        assert theirs.keys() == scales.keys()
        for name, value in found.items():
            part = wanted[name]
            if value.shape != part.shape:  # a tensor parallel rank's
                continue
            torch.testing.assert_close(value, part, rtol=0, atol=1e-9)
        if "tensor_parallel_degree" in config:
            for name in scales:
                assert theirs[name]["scale"] == scales[name]["scale"], name


def test_the_parameter_needs_no_context_in_the_script(ranks: Any, alone: Any) -> None:
    exact, _ = ranks(_train, 1, {}, False, False, init=False)[0]
    wanted, _ = ranks(_train, 1, {"fp8": True}, False, False, init=False)[0]
    found, _ = ranks(_train, 2, {"fp8": True, "hybrid_shard_degree": 2}, False, False, init=False)[0]
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-9)
        # An update each step and no evaluation: the same as with contexts, but for the length of the history.
        torch.testing.assert_close(value, alone[0][name], rtol=0, atol=1e-9)
    assert any(not torch.allclose(exact[name], wanted[name], rtol=0, atol=1e-4) for name in exact)


def _resume(config: dict[str, Any], folder: str, contexts: bool) -> Any:
    import torch.sagemaker as tsm
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
    from torch.sagemaker.distributed.checkpoint.state_dict_loader import load
    from torch.sagemaker.distributed.checkpoint.state_dict_saver import async_save, maybe_finalize_async_calls

    import torch_sagemaker_finder  # noqa: F401
    from smp_runtime.fp8 import autocast

    def state(model: Any) -> dict[str, Any]:
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            return {"model": model.state_dict(), "step": SAVED}

    first = Training(config, False, contexts)
    first.run(0, SAVED)
    async_save(state(first.model), checkpoint_id=folder)
    maybe_finalize_async_calls(blocking=True)
    first.run(SAVED, STEPS)
    wanted, used = first.whole(), autocast.scales_to_save()
    tsm.shutdown()
    again = Training(config, False, contexts)
    found = state(again.model)
    load(found, checkpoint_id=folder)
    assert found.keys() == {"model", "step"}
    with FullyShardedDataParallel.state_dict_type(again.model, StateDictType.SHARDED_STATE_DICT):
        again.model.load_state_dict(found["model"])
    again.run(SAVED, STEPS)
    assert autocast.scales_to_save() == used
    return wanted, again.whole()


@pytest.mark.parametrize("contexts", [True, False], ids=["contexts", "parameter"])
def test_a_resumed_training_equals_one_without_a_break(ranks: Any, tmp_path: Path, contexts: bool) -> None:
    config = {"hybrid_shard_degree": 2, "fp8": not contexts}
    for wanted, found in ranks(_resume, 2, config, str(tmp_path / "saved"), contexts, init=False):
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


# -- the package -------------------------------------------------------------------------------------------------------


LINES_WITHOUT = """
import importlib.util as u
assert u.find_spec('transformer_engine') is None
import torch.sagemaker as tsm, transformer_engine, transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Format
from transformer_engine.pytorch.attention import MultiheadAttention
import importlib.metadata as m
print(te.fp8_autocast.__module__, Format.HYBRID.value.max_bwd, te.Linear(16, 16).weight.shape)
from accelerate.utils import is_transformer_engine_available as there; assert not there()
te.TransformerLayer
"""
LINES_WITH = """
import torch.sagemaker as tsm, transformer_engine
assert transformer_engine.there
from smp_version2.eight_bits.job import is_transformer_engine_installed as is_installed
print(is_installed(), 'smp_transformer_engine' in sys.modules)
"""
CODES = {"without": LINES_WITHOUT, "with": LINES_WITH}
#: Runs code in a process each, forked from one that has imported PyTorch, which takes most of the time.
FORKS = """
import importlib, os, sys
import torch.distributed.fsdp

def run(name, code, folder):
    if os.fork():
        return os.wait()
    for number, kind in ((1, "out"), (2, "err")):
        os.dup2(os.open(os.path.join(folder, f"{name}.{kind}"), os.O_WRONLY | os.O_CREAT), number)
    sys.path.append(os.path.join(folder, name))
    importlib.invalidate_caches()
    exec(code, {"__name__": "__main__", "sys": sys})
    sys.stdout.flush()
    os._exit(0)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the output of both programs lies, which find this project's packages on ``PYTHONPATH`` alone."""
    folder = tmp_path_factory.mktemp("engine")
    package = folder / "with" / "transformer_engine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("there = True")
    dependencies = [entry for entry in sys.path if entry.endswith("site-packages")]
    start = f"import sys; sys.path += {dependencies!r}; import sitecustomize\n"
    calls = [f"run({name!r}, {code!r}, {str(folder)!r})\n" for name, code in CODES.items()]
    command = [sys.executable, "-S", "-c", f"{start}{FORKS}{''.join(calls)}"]
    given = {"PATH": os.environ["PATH"], "PYTHONPATH": str(CONTAINER)}
    subprocess.run(command, env=given, check=True, timeout=120)
    return folder


def test_it_is_found_in_scripts_of_version_2_only(said: Path) -> None:
    errors = (said / "without.err").read_text()
    assert (said / "without.out").read_text().startswith("smp_runtime.fp8.autocast 57344.0"), errors
    assert "has no TransformerLayer: install transformer_engine" in errors


def test_one_that_is_installed_is_used_untouched(said: Path) -> None:
    assert (said / "with.out").read_text().split() == ["True", "False"], (said / "with.err").read_text()


def test_its_modules_are_those_of_pytorch() -> None:
    from smp_runtime.errors import SMPUserError
    from smp_version2.eight_bits import modules

    x = torch.randn(3, 16)
    linear = modules.Linear(16, 32, return_bias=True, init_method=torch.nn.init.ones_, device="cuda")
    output, bias = linear(x)
    torch.testing.assert_close(output + bias, torch.nn.functional.linear(x, linear.weight, linear.bias))
    assert float(linear.weight.detach().min()) == 1.0
    norm = modules.LayerNorm(16, zero_centered_gamma=True)
    torch.testing.assert_close(norm(x), torch.nn.functional.layer_norm(x, (16,), eps=1e-5))
    for kind in ("LayerNorm", "RMSNorm"):
        assert modules.LayerNormLinear(16, 32, normalization=kind)(x).shape == (3, 32)
    refused = ({"tp_size": 2}, {"parallel_mode": "column"}, {"sequence_parallel": True})
    for options in refused:
        with pytest.raises(SMPUserError, match=next(iter(options))) as caught:
            modules.Linear(16, 16, **options)  # type: ignore[arg-type]
        assert caught.value.code == "SMP321"
    with pytest.raises(SMPUserError, match="normalization"):
        modules.LayerNormLinear(16, 16, normalization="none")
    assert not isinstance(linear, modules.LayerNormMLP)  # peft asks
    with pytest.raises(SMPUserError, match="no LayerNormMLP"):
        modules.LayerNormMLP(16, 16)


def test_the_page_runs(ranks: Any) -> None:
    (block,) = matching(("how-it-works/fp8.md", "fp8_autocast("), "python")
    ranks(_run_block, 1, block.code, init=False)


def _run_block(code: str) -> None:
    import torch.sagemaker as tsm

    import torch_sagemaker_finder  # noqa: F401
    from smp_runtime.fp8 import autocast

    exec(code, {"__name__": "__main__"})
    assert set(autocast.scales_to_save()) == {"0", "2"}
    tsm.shutdown()
