from common import Net, cross_entropy, dataset, loader, start
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

rank, world = start()
model = DistributedDataParallel(Net(norm=True), broadcast_buffers=False)
optimizer = AdamW(model.parameters(), lr=1e-2)
batches = loader(dataset())
for epoch in range(3):
    batches.sampler.set_epoch(epoch)
    for ids, targets in batches:
        optimizer.zero_grad()
        cross_entropy(model(ids), targets).backward()
        optimizer.step()
