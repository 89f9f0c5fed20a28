from common import Net, cross_entropy, dataset, loader, start
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD

rank, world = start()
model = Net()
fully_shard(model)
optimizer = SGD(model.parameters(), lr=0.1)
batches = loader(dataset(ignored=True))
for epoch in range(3):
    batches.sampler.set_epoch(epoch)
    for ids, targets in batches:
        optimizer.zero_grad()
        cross_entropy(model(ids), targets).backward()  # a mean over the rank's own tokens
        optimizer.step()
