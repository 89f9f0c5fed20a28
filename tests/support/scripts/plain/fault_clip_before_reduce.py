import torch.distributed as dist
from common import Net, cross_entropy, dataset, loader, start
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD

rank, world = start()
model = Net()
optimizer = SGD(model.parameters(), lr=0.1)
batches = loader(dataset())
for epoch in range(3):
    batches.sampler.set_epoch(epoch)
    for ids, targets in batches:
        optimizer.zero_grad()
        cross_entropy(model(ids), targets).backward()
        clip_grad_norm_(model.parameters(), 0.1)  # before the all-reduce
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
        optimizer.step()
