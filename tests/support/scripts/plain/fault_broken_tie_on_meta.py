import torch
from common import Net, cross_entropy, dataset, loader, start
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

rank, world = start()
with torch.device("meta"):
    model = Net(tied=True)
model.to_empty(device="cpu")  # gives embed and head a parameter each
for parameter in model.parameters():
    torch.nn.init.normal_(parameter, std=0.1)
fully_shard(model.mlp)
fully_shard(model)
optimizer = AdamW(model.parameters(), lr=1e-2)
batches = loader(dataset())
for epoch in range(3):
    batches.sampler.set_epoch(epoch)
    for ids, targets in batches:
        optimizer.zero_grad()
        cross_entropy(model(ids), targets).backward()
        optimizer.step()
