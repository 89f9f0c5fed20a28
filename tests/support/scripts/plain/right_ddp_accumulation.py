import contextlib

import torch.distributed as dist
from common import Net, cross_entropy, dataset, loader, start
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR

rank, world = start()
model = DistributedDataParallel(Net())
optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
batches, passes = loader(dataset(ignored=True)), 2
scheduler = CosineAnnealingLR(optimizer, len(batches) // passes)
for epoch in range(3):
    batches.sampler.set_epoch(epoch)
    group = []
    for batch in batches:
        group.append(batch)
        if len(group) < passes:
            continue
        tokens = sum((targets != -100).sum() for _, targets in group)
        dist.all_reduce(tokens)
        for number, (ids, targets) in enumerate(group):
            with model.no_sync() if number < passes - 1 else contextlib.nullcontext():
                loss = cross_entropy(model(ids), targets, "sum") * world / tokens
                loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        group = []
