"""PyTorch's FSDP2, with tensors that have no memory: what a Llama of 8 billion parameters allocates and reserves.

``python benchmarks/rehearsal/rehearsed_fsdp2.py 8`` is row 1 of ``benchmarks/published.py``, and ``128`` is row 4: parameters in
fp32, gathers in bf16, sums in fp32, a loss in fp32, selective checkpointing, nothing compiled. ``8 32 1 32768 each`` is row 7 but
for its compiled layers: ranks, layers, samples, tokens, each layer checkpointed.

FSDP2's own code runs in one process, whose group does not send anything. Each storage takes and frees a block of the model of
PyTorch's allocator, and gathers take theirs on a stream of their own, as FSDP2 does on a GPU. Prints GiB: allocated at most, and
reserved.

The model is written here, with the sizes of Llama 3.1 8B. The kernels of its attention are the processor's.
"""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from smp_emulation.gpu_model.allocator import CachingAllocator, Chunk

GIB = 2**30
_HIDDEN, _HEADS, _KEYS, _WIDTH, _FORWARD, _WORDS = 4096, 32, 8, 128, 14_336, 128_256
_PRODUCT = torch.ops.aten.mm.default
_KEPT = {_PRODUCT, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default}


class Norm(nn.Module):
    """Root mean square norm, computed in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(_HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of each token."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return wide.type_as(x) * self.weight


class Block(nn.Module):
    """Llama decoder layer."""

    def __init__(self) -> None:
        super().__init__()

        def linear(inner: int, outer: int) -> nn.Linear:
            return nn.Linear(inner, outer, bias=False)

        self.before, self.between = Norm(), Norm()
        self.q, self.k, self.v = (linear(_HIDDEN, heads * _WIDTH) for heads in (_HEADS, _KEYS, _KEYS))
        self.o = linear(_HIDDEN, _HIDDEN)
        self.gate, self.up, self.down = linear(_HIDDEN, _FORWARD), linear(_HIDDEN, _FORWARD), linear(_FORWARD, _HIDDEN)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """Return the layer's result."""
        batch, length, _ = x.shape
        y = self.before(x)
        q, k, v = (part(y).view(batch, length, -1, _WIDTH) for part in (self.q, self.k, self.v))
        q, k = _turned(q, turns), _turned(k, turns)
        k, v = (
            each[:, :, :, None].expand(batch, length, _KEYS, _HEADS // _KEYS, _WIDTH).reshape(q.shape)
            for each in (k, v)
        )
        found = F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v)), is_causal=True)
        x = x + self.o(found.transpose(1, 2).contiguous().view(batch, length, -1))
        y = self.between(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def _turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Return rotated heads."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(3).type_as(x)


class Llama(nn.Module):
    """All layers with their tables of words."""

    def __init__(self, layers: int, length: int) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, _HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.out = Norm(), nn.Linear(_HIDDEN, _WORDS, bias=False)
        self.register_buffer("turns", torch.ones(1, length, 1, _WIDTH // 2, dtype=torch.complex64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x, self.turns)
        return self.out(self.norm(x))


@dataclass
class _Block:
    """Memory of a storage."""

    size: int = 0
    chunk: Chunk | None = None


class Storages(TorchDispatchMode):
    """Gives the storage of each tensor memory of a model of PyTorch's allocator, as long as it lives."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = CachingAllocator(0, 10**12)
        self.stream = 0
        self._blocks: dict[int, _Block] = {}

    def see(self, tensor: torch.Tensor) -> None:
        """Take a tensor's storage in, or its new size."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._blocks:
            self._blocks[key] = _Block()
            weakref.finalize(storage, self._gone, key)
        if self._blocks[key].size != storage.nbytes():
            self._resize(key, storage.nbytes())

    def _resize(self, key: int, size: int) -> None:
        block = self._blocks[key]
        if block.chunk is not None:
            self.allocator.release(block.chunk)
        block.size, block.chunk = size, self.allocator.allocate(size, self.stream) if size else None

    def _gone(self, key: int) -> None:
        self._resize(key, 0)
        del self._blocks[key]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor)
        return found

    def follow_fsdp2(self) -> None:
        """See FSDP2's storages change their size, and make its gathers on a stream of their own."""

        def seen(own: Callable[..., Any]) -> Callable[..., Any]:
            def changed(tensor: torch.Tensor) -> None:
                own(tensor)
                self.see(tensor)

            return changed

        _fsdp_param.alloc_storage = seen(_fsdp_param.alloc_storage)
        _fsdp_param.free_storage = seen(_fsdp_param.free_storage)
        gather = _fsdp_param_group.foreach_all_gather

        def apart(*args: Any, **kwargs: Any) -> Any:
            self.stream = 1
            try:
                return gather(*args, **kwargs)
            finally:
                self.stream = 0

        _fsdp_param_group.foreach_all_gather = apart


def _selective() -> Any:
    """Return contexts of a checkpoint that keeps attention's result and every second product."""
    products: dict[bool, int] = defaultdict(int)

    def policy(context: Any, func: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if func == _PRODUCT:
            products[context.is_recompute] += 1
        is_second = func == _PRODUCT and products[context.is_recompute] % 2 == 0
        return CheckpointPolicy.MUST_SAVE if func in _KEPT and not is_second else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def rehearsed(
    ranks: int, layers: int = 32, batch: int = 2, length: int = 8192, *, selective: bool = True
) -> tuple[float, float]:
    """Return GiB of rank 0 in two steps: allocated at most, and reserved. The second step has the state of the optimizer."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))
    storages = Storages()
    storages.follow_fsdp2()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = Llama(layers, length)
        for place, layer in enumerate(model.layers):
            how = {"context_fn": _selective} if selective else {}
            wrapped = checkpoint_wrapper(layer, preserve_rng_state=False, **how)
            model.layers[place] = wrapped
            fully_shard(wrapped, mesh=mesh, mp_policy=policy, reshard_after_forward=place < layers - 1)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        for parameter in model.parameters():
            storages.see(parameter.to_local())
        storages.see(model.turns)
        state: list[torch.Tensor] = []
        with storages:
            for _ in range(2):
                tokens = torch.zeros(batch, length, dtype=torch.long)
                logits = model(tokens)
                loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
                del logits
                loss.backward()
                # AdamW's two moments, which its first step makes.
                state = state or [torch.zeros_like(each.to_local()) for each in model.parameters() for _ in range(2)]
                for parameter in model.parameters():
                    parameter.grad = None
    found = storages.allocator.statistics()
    dist.destroy_process_group()
    return found.allocated.peak / GIB, found.reserved.peak / GIB


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:] if word != "each"]
    allocated, reserved = rehearsed(*numbers, selective="each" not in sys.argv)
    print(f"allocated {allocated:.1f} GiB, reserved {reserved:.1f}")
