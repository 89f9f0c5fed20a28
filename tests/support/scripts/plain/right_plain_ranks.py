import torch.distributed as dist
from common import Net, cross_entropy, dataset, loader, start
from torch.optim import AdamW

rank, world = start()
model = Net()
optimizer = AdamW(model.parameters(), lr=1e-2)
batches = loader(dataset(ignored=True))
for epoch in range(3):
    batches.sampler.set_epoch(epoch)
    for ids, targets in batches:
        tokens = (targets != -100).sum()
        dist.all_reduce(tokens)
        optimizer.zero_grad()
        (cross_entropy(model(ids), targets, "sum") / tokens).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)  # a sum: the loss is divided by the tokens of all ranks already
        optimizer.step()
