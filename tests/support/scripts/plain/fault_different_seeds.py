import torch
import torch.distributed as dist
from common import Net, cross_entropy, dataset, loader, start
from torch.optim import SGD

rank, world = start()
torch.manual_seed(rank)
model = Net()  # and no broadcast of the weights
optimizer = SGD(model.parameters(), lr=0.1)
batches = loader(dataset())
for epoch in range(3):
    batches.sampler.set_epoch(epoch)
    for ids, targets in batches:
        optimizer.zero_grad()
        cross_entropy(model(ids), targets).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
        optimizer.step()
