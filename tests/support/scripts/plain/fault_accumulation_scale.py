import contextlib

from common import Net, cross_entropy, dataset, loader, start
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

rank, world = start()
model = DistributedDataParallel(Net())
optimizer = SGD(model.parameters(), lr=0.1)
batches, passes = loader(dataset()), 2
for epoch in range(3):
    batches.sampler.set_epoch(epoch)
    for number, (ids, targets) in enumerate(batches):
        is_last = (number + 1) % passes == 0
        with contextlib.nullcontext() if is_last else model.no_sync():
            cross_entropy(model(ids), targets).backward()  # is not divided by the passes
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
