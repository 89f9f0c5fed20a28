"""A case of version 2 trained as a job: one rank of it, as a script trains it."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from crossings.training import LIMIT, SEED, Record, default_dtype
from crossings.version2_case import TOPOLOGIES, Version2Case
from crossings.version2_events import Version2Events, optimizer_of
from support.models.models import part
from support.training.version2_checkpoints import local_place
from support.training.version2_whole import gather_state, load_whole
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_state
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

from smp_runtime.tensors.torch_private import name_without_wrappers

if TYPE_CHECKING:
    from crossings.nets import Batch


class Version2Job(Version2Events):
    """A rank of the job, as a script trains it.

    Attributes:
        model: what the script calls.
        root: the outermost unit of FSDP.
        rank: this rank's position in the unit's group, as FSDP numbers it.

    Args:
        folder: for checkpoints; the same on all ranks.
    """

    root: Any

    def __init__(self, case: Version2Case, folder: str) -> None:
        given: Any = case
        super().__init__(given)
        self._folder = Path(folder)
        self._join(SEED)
        self.record.first = self.weights()

    # -- the model ---------------------------------------------------------------------------------------------------

    def _join(self, seed: int) -> None:
        import torch.sagemaker as tsm

        case = self.case
        tsm.init(case.settings(self.topology))
        # Replicas take the weights of the first one only if the script asks for it.
        torch.manual_seed(seed)
        with default_dtype(case.dtype), self._without_values():
            module = self.net.make()
        if case.begins_frozen:
            self.net.blocks(module)[0].requires_grad_(False)
        module = tsm.transform(module, load_state_dict_from_rank0=case.delayed == "rank0")
        self.root = self._wrap(module) if case.shards_by == "wrapper" else self._shard(module)
        self.model = self.root
        if case.checkpointing == "offload":
            from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import offload_wrapper

            self.model = offload_wrapper(self.root)
        self.optimizer = optimizer_of(case, dict(self.root.named_parameters()))

    def _without_values(self) -> contextlib.AbstractContextManager[Any]:
        import torch.sagemaker as tsm
        from accelerate import init_empty_weights

        has_values = self.case.delayed == "none" or (self.case.delayed == "rank0" and tsm.state.rank == 0)
        return contextlib.nullcontext() if has_values else init_empty_weights()

    def _wrap(self, module: nn.Module) -> nn.Module:
        case = self.case
        given: dict[str, Any] = {"use_orig_params": not case.joined, "auto_wrap_policy": self._policy(module)}
        if case.strategy != "script":
            given["sharding_strategy"] = ShardingStrategy[case.strategy]
        if case.precision == "bf16":
            given["mixed_precision"] = MixedPrecision(torch.bfloat16, torch.float32)
        if case.delayed == "meta":
            from torch.sagemaker.delayed_param import DelayedParamIniter

            initer = DelayedParamIniter(module)
            given["param_init_fn"] = initer.get_param_init_fn()
            given["post_param_init_fn"] = initer.get_post_param_init_fn()
        elif case.delayed == "rank0":
            given["param_init_fn"] = lambda each: each.to_empty(device="cpu", recurse=False)
            given["sync_module_states"] = True
        wrapped = FullyShardedDataParallel(module, **given)
        self._recompute(wrapped)
        return wrapped

    def _policy(self, module: nn.Module) -> Callable[..., bool] | None:
        if self.case.units == "root":
            return None
        chosen = set(self._units(module))
        return functools.partial(lambda_auto_wrap_policy, lambda_fn=chosen.__contains__)

    def _units(self, module: nn.Module) -> list[nn.Module]:
        from torch.sagemaker.tensor_parallel.transformer import TransformerLayer

        if self.case.units == "layers":
            return [each for each in module.modules() if isinstance(each, TransformerLayer)]
        return self.net.blocks(module) if self.case.units == "blocks" else []

    def _shard(self, module: nn.Module) -> nn.Module:
        self._recompute(module)
        policy = MixedPrecisionPolicy()
        if self.case.precision == "bf16":
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for unit in self._units(module):
            fully_shard(unit, mp_policy=policy)
        fully_shard(module, mp_policy=policy)
        return module

    def _recompute(self, model: nn.Module) -> None:
        """Let backward run blocks again, as scripts do behind ``FullyShardedDataParallel`` and before ``fully_shard``."""
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
            CheckpointImpl,
            apply_activation_checkpointing,
            checkpoint_wrapper,
        )

        way = self.case.checkpointing
        if way == "none":
            return
        blocks = self.net.blocks(getattr(model, "module", model))
        chosen = {getattr(block, "module", block) for block in blocks[:: 2 if way == "some" else 1]}
        kind = CheckpointImpl.REENTRANT if way == "reentrant" else CheckpointImpl.NO_REENTRANT
        apply_activation_checkpointing(
            model,
            checkpoint_wrapper_fn=functools.partial(checkpoint_wrapper, checkpoint_impl=kind),
            check_fn=chosen.__contains__,
        )

    @property
    def module(self) -> nn.Module:
        """See :class:`Training`."""
        is_wrapped = isinstance(self.root, FullyShardedDataParallel)
        found: nn.Module = self.root.module if is_wrapped else self.root
        return found

    def last_block(self) -> list[nn.Parameter]:
        """See :class:`Training`."""
        return list(self.net.blocks(self.module)[-1].parameters())

    # -- steps -------------------------------------------------------------------------------------------------------

    def _mean(self, batch: Batch, loss_of: Callable[..., torch.Tensor], *, trains: bool) -> float:
        import torch.sagemaker as tsm

        replicas, mine = self.case.replicas(self.topology), tsm.state.rank // tsm.state.tp_size
        with torch.autocast("cpu", torch.bfloat16, enabled=self.case.precision == "autocast"):
            loss = loss_of(*part(batch, mine, replicas))
        if trains:
            (loss / self.case.passes).backward()
        total = loss.detach().double()
        dist.all_reduce(total)
        return float(total) / tsm.state.world_size

    def backward(self, batch: Batch) -> float:
        """See :class:`Training`."""
        return self._mean(batch, self.loss, trains=True)

    def score(self, batch: Batch) -> float:
        """See :class:`Training`."""
        return self._mean(batch, functools.partial(self.net.loss, self.model), trains=False)

    @contextlib.contextmanager
    def accumulating(self, *, is_last: bool) -> Iterator[None]:
        """See :class:`Training`."""
        if not self.case.without_sync or is_last:
            yield
        elif self.case.shards_by == "wrapper":
            with self.root.no_sync():
                yield
        else:
            self.root.set_requires_gradient_sync(False)
            try:
                yield
            finally:
                self.root.set_requires_gradient_sync(True)

    def clip(self) -> None:
        """See :class:`Training`."""
        from torch.sagemaker.grad_norm import clip_grad_norm_

        if self.case.clipping == "library":
            norm = clip_grad_norm_(self.root, LIMIT)
        elif self.case.clipping == "own" and self.case.shards_by == "wrapper":
            norm = self.root.clip_grad_norm_(LIMIT)
        elif self.case.clipping == "own":
            found: Any = nn.utils.clip_grad_norm_(self.root.parameters(), LIMIT)
            norm = found.full_tensor() if hasattr(found, "full_tensor") else found
        else:
            return
        self.record.norms.append(float(norm))

    def fail(self, step: int) -> None:
        """See :class:`Training`."""
        with contextlib.suppress(ZeroDivisionError):
            self.backward(self.batch(50))
            raise ZeroDivisionError
        self.optimizer.zero_grad()

    @torch.no_grad()
    def summon_weights(self, step: int) -> None:
        """See :class:`Version2Events`."""
        with FullyShardedDataParallel.summon_full_params(self.root):
            for p in self.root.parameters():
                p.add_(0.01)

    def write_buffers(self, step: int) -> None:
        """See :class:`Training`."""
        with torch.no_grad():
            for buffer in self.root.buffers():
                if buffer.is_floating_point():
                    buffer.mul_(0.75)

    # -- state -------------------------------------------------------------------------------------------------------

    def weights(self) -> dict[str, torch.Tensor]:
        """See :class:`Training`."""
        return {name: value.detach().clone().double() for name, value in self._full().items()}

    def _full(self) -> dict[str, torch.Tensor]:
        """Return full state, with the first rank's buffers, as the file has it that this rank would write."""
        if self.case.shards_by == "function":
            found = gather_state(self.root)
        else:
            with FullyShardedDataParallel.state_dict_type(
                self.root, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True)
            ):
                found = {name: value.clone() for name, value in self.root.state_dict().items()}
        for name in sorted(name_without_wrappers(name) for name, _ in self.root.named_buffers()):
            if name in found:
                dist.broadcast(found[name], 0)
        return found

    def reload_state(self, step: int) -> None:
        """See :class:`Training`."""
        state = {name: v * 0.75 if v.is_floating_point() else v for name, v in self._full().items()}
        self._load_full(state, self._moments() if self.case.keeps_moments(self.topology, self.topology) else None)

    def _moments(self) -> dict[str, Any]:
        if self.case.shards_by == "function":
            options = torch_state.StateDictOptions(full_state_dict=True)
            found: dict[str, Any] = torch_state.get_optimizer_state_dict(self.root, self.optimizer, options=options)
            return found
        return dict(FullyShardedDataParallel.full_optim_state_dict(self.root, self.optimizer, rank0_only=False))

    def _load_full(self, state: dict[str, torch.Tensor], moments: dict[str, Any] | None) -> None:
        if self.case.shards_by == "function":
            load_whole(self.root, state)
        else:
            with FullyShardedDataParallel.state_dict_type(self.root, StateDictType.FULL_STATE_DICT):
                self.root.load_state_dict(state)
        if moments is None:
            self.optimizer = optimizer_of(self.case, dict(self.root.named_parameters()))
        elif not moments["state"]:  # which PyTorch's functions do not load
            for group, saved in zip(self.optimizer.param_groups, moments["param_groups"], strict=True):
                group["lr"] = saved["lr"]
        elif self.case.shards_by == "function":
            options = torch_state.StateDictOptions(full_state_dict=True)
            torch_state.set_optimizer_state_dict(self.root, self.optimizer, moments, options=options)
        else:
            with FullyShardedDataParallel.state_dict_type(self.root, StateDictType.FULL_STATE_DICT):
                loaded = FullyShardedDataParallel.optim_state_dict_to_load(self.root, self.optimizer, moments)
            self.optimizer.load_state_dict(loaded)

    def _rejoin(self, step: int) -> None:
        import torch.sagemaker as tsm

        dist.barrier()
        self.model = self.root = self.optimizer = None
        tsm.shutdown()
        self._join(SEED + 1 + step)

    def resume_full(self, step: int) -> None:
        """Save full state, leave the job, and go on in another with other degrees and other first weights."""
        keeps = self.case.keeps_moments(self.former, self.topology)
        state, moments = self._full(), self._moments() if keeps else None
        self._rejoin(step)
        self._load_full(state, moments)

    def resume_sharded(self, step: int, *, is_async: bool = False) -> None:
        """The same with sharded state, which copies of the state save once."""
        import torch.sagemaker as tsm
        from torch.sagemaker.distributed.checkpoint import state_dict_saver
        from torch.sagemaker.distributed.checkpoint.state_dict_loader import load

        has_moments = bool(self.optimizer.state)
        folder, group = self._part(step), tsm.state.shard_process_group
        state = self._sharded_state(has_moments=has_moments)
        if group is None or tsm.state.ranker.get_rep_rank(tsm.state.rank) == 0:
            save = state_dict_saver.async_save if is_async else state_dict_saver.save
            save(state, checkpoint_id=folder, process_group=group)
        if is_async:
            self._spoil()
            state_dict_saver.maybe_finalize_async_calls(blocking=True)
        self._rejoin(step)
        if has_moments:
            self._prime()
        state, group = self._sharded_state(has_moments=has_moments), tsm.state.shard_process_group
        # What no step has used has no moments to be saved, and begins with those of a new optimizer.
        all_used = self.case.net != "late_head"
        load(state, checkpoint_id=self._part(step), process_group=group, check_keys_matched=all_used)
        self._load_sharded(state)

    def resume_async(self, step: int) -> None:
        """The same in the background, while weights change already."""
        self.resume_sharded(step, is_async=True)

    @torch.no_grad()
    def _spoil(self) -> None:
        for p in self.root.parameters():
            p.mul_(2)

    def _part(self, step: int) -> Path:
        import torch.sagemaker as tsm

        state = tsm.state
        names = (f"tp{state.tp_size}-{state.tp_rank}", f"ep{state.ep_size}-{state.ep_rank}")
        return self._folder.joinpath(str(step), *names)

    def _prime(self) -> None:
        """Let the optimizer create its state, so that it can be loaded into."""
        from torch.sagemaker.distributed.checkpoint.state_dict_utils import init_optim_state

        init_optim_state(self.optimizer, skip_empty_param=True)

    def _sharded_state(self, *, has_moments: bool) -> dict[str, Any]:
        # PyTorch's function for both would make moments, and count a step.
        if self.case.shards_by == "function" and not has_moments:
            return {"model": torch_state.get_model_state_dict(self.root)}
        if self.case.shards_by == "function":
            model, optimizer = torch_state.get_state_dict(self.root, self.optimizer)
            return {"model": model, "optimizer": optimizer}
        with FullyShardedDataParallel.state_dict_type(self.root, StateDictType.SHARDED_STATE_DICT):
            return {
                "model": self.root.state_dict(),
                "optimizer": FullyShardedDataParallel.optim_state_dict(self.root, self.optimizer),
            }

    def _load_sharded(self, state: dict[str, Any]) -> None:
        if "optimizer" not in state:
            torch_state.set_model_state_dict(self.root, state["model"])
            return
        if self.case.shards_by == "function":
            model, moments = state["model"], state["optimizer"]
            torch_state.set_state_dict(self.root, self.optimizer, model_state_dict=model, optim_state_dict=moments)
            return
        with FullyShardedDataParallel.state_dict_type(self.root, StateDictType.SHARDED_STATE_DICT):
            self.root.load_state_dict(state["model"])
            loaded = FullyShardedDataParallel.optim_state_dict_to_load(self.root, self.optimizer, state["optimizer"])
        self.optimizer.load_state_dict(loaded)

    def resume_local(self, step: int) -> None:
        """The same with each rank's own parts."""
        from torch.sagemaker.distributed.checkpoint import state_dict_saver
        from torch.sagemaker.distributed.checkpoint.state_dict_loader import load
        from torch.sagemaker.distributed.checkpoint.state_dict_utils import SMStateDictType, sm_state_dict_type

        root, kind = self._folder / str(step), SMStateDictType.SM_LOCAL_STATE_DICT
        with sm_state_dict_type(self.root, kind):
            has_moments = bool(self.optimizer.state)
            saved = {"model": self.root.state_dict(), "optimizer": self.optimizer.state_dict()}
            state_dict_saver.save(saved, **_local_place(self.root, root))
        self._rejoin(step)
        if has_moments:
            self._prime()
        with sm_state_dict_type(self.root, kind):
            state = {"model": self.root.state_dict(), "optimizer": self.optimizer.state_dict()}
            load(state, **_local_place(self.root, root))
        self.optimizer.load_state_dict(state["optimizer"])


def _local_place(root: nn.Module, folder: Path) -> dict[str, Any]:
    made: Any = SimpleNamespace(model=root)
    return local_place(made, folder)


def train_version2_case(text: str, folder: str) -> Record:
    """Train a case on this rank.

    Args:
        text: of :meth:`Version2Case.to_json`.
    """
    import torch.sagemaker as tsm

    began = time.process_time()
    try:
        found = Version2Job(Version2Case.from_json(text), folder).run()
        found.processor_seconds = time.process_time() - began
        return found
    finally:
        tsm.shutdown()


#: Most ranks of a case.
MOST = max(world for world, *_ in TOPOLOGIES.values())
