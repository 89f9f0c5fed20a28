from common import Net, cross_entropy, dataset, loader, start
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD

rank, world = start()
model = Net()
fully_shard(model)
optimizer = SGD(model.parameters(), lr=0.1)
batches, passes = loader(dataset()), 2
for epoch in range(3):
    batches.sampler.set_epoch(epoch)
    for number, (ids, targets) in enumerate(batches):
        (cross_entropy(model(ids), targets) / (passes * world)).backward()  # FSDP has averaged over ranks already
        if (number + 1) % passes == 0:
            optimizer.step()
            optimizer.zero_grad()
