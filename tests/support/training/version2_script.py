"""A small script as users of version 2 write it."""

SCRIPT = """
import torch
import torch.distributed as dist
import torch.sagemaker as tsm
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

dist.init_process_group("gloo")
tsm.init()
torch.manual_seed(0)
model = FSDP(tsm.transform(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))), use_orig_params=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for step in range(2):
    loss = model(torch.full((2, 4), float(tsm.state.rank))).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    state = tsm.state
    print(f"step {step} of {state.world_size} ranks, sharded over {state.hybrid_shard_degree}, seed {state.random_seed}")
dist.destroy_process_group()
"""
