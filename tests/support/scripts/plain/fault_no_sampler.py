import torch
from common import Net, cross_entropy, dataset, start
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW
from torch.utils.data import DataLoader

rank, world = start()
model = Net()
fully_shard(model)
optimizer = AdamW(model.parameters(), lr=1e-2)
batches = DataLoader(dataset(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(0))
for _ in range(3):
    for ids, targets in batches:
        optimizer.zero_grad()
        cross_entropy(model(ids), targets).backward()
        optimizer.step()
