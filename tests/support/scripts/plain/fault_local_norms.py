import torch
from common import Net, cross_entropy, dataset, loader, start
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD

rank, world = start()
model = Net()
fully_shard(model)
optimizer = SGD(model.parameters(), lr=0.1)
batches = loader(dataset())
for epoch in range(3):
    batches.sampler.set_epoch(epoch)
    for ids, targets in batches:
        optimizer.zero_grad()
        cross_entropy(model(ids), targets).backward()
        shards = [parameter.grad.to_local() for parameter in model.parameters()]
        norm = torch.stack([shard.norm() for shard in shards]).norm()  # of this rank's shards only
        for shard in shards:
            shard.mul_((0.1 / norm).clamp(max=1.0))
        optimizer.step()
