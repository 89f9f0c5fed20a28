import torch
from common import Net, cross_entropy, dataset, loader, start
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import AdamW

rank, world = start()
model = Net(tied=True)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
fully_shard(model.mlp, mp_policy=policy)
fully_shard(model, mp_policy=policy)
optimizer = AdamW(model.parameters(), lr=1e-2)
batches = loader(dataset())
for epoch in range(3):
    batches.sampler.set_epoch(epoch)
    for ids, targets in batches:
        optimizer.zero_grad()
        cross_entropy(model(ids).float(), targets).backward()
        optimizer.step()
