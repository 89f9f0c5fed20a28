"""PyTorch's DDP on the backend with autocast, and with gradients in half precision."""

from __future__ import annotations

import torch
from torch import nn


def test_autocast_and_half_precision_gradients_under_ddp(ranks):
    def run():
        import torch.distributed as dist
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401 - registers the backend
        import smdistributed.modelparallel.torch as smp

        group, sent = dist.new_group(backend="smddp"), []

        def gradient(module, x, **autocast):
            def hook(state, bucket):
                sent.append(bucket.buffer().dtype)
                return allreduce_hook(group, bucket)

            model = nn.parallel.DistributedDataParallel(module, process_group=group)
            model.register_comm_hook(None, hook)
            with torch.autocast("cpu", dtype=torch.bfloat16, **autocast):
                out = model(x)
            out.float().sum().backward()
            return out.dtype, module.weight.grad[0].tolist()

        x = torch.full((2, 3), float(smp.rank()))
        return gradient(nn.Linear(3, 1), x), gradient(nn.Linear(3, 1).half(), x.half(), enabled=False), sent

    # Gradients of 0 and 2 on the two ranks; summed in the type that they have.
    for under_autocast, in_half, sent in ranks(run, 2, config={"ddp": True}):
        assert under_autocast == (torch.bfloat16, [1.0, 1.0, 1.0])
        assert in_half == (torch.float16, [1.0, 1.0, 1.0])
        assert sent == [torch.float32, torch.float16]
