from common import Net, cross_entropy, dataset, loader, start
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD

rank, world = start(seed=3)
model = Net()
fully_shard(model.mlp)
fully_shard(model)
optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
batches, passes = loader(dataset()), 2
for epoch in range(3):
    batches.sampler.set_epoch(epoch)
    for number, (ids, targets) in enumerate(batches):
        is_last = (number + 1) % passes == 0
        model.set_requires_gradient_sync(is_last)
        (cross_entropy(model(ids), targets) / passes).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
