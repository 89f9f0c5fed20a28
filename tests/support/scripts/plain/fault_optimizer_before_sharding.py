from common import Net, cross_entropy, dataset, loader, start
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

rank, world = start()
model = Net()
optimizer = AdamW(model.parameters(), lr=1e-2)  # has the parameters that fully_shard replaces
fully_shard(model)
batches = loader(dataset())
for epoch in range(3):
    batches.sampler.set_epoch(epoch)
    for ids, targets in batches:
        model.zero_grad()
        cross_entropy(model(ids), targets).backward()
        optimizer.step()
