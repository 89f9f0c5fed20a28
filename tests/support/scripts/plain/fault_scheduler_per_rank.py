from common import Net, cross_entropy, dataset, loader, start
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR

rank, world = start()
model = DistributedDataParallel(Net())
optimizer = AdamW(model.parameters(), lr=1e-2)
scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
batches = loader(dataset())
for epoch in range(3):
    batches.sampler.set_epoch(epoch)
    for ids, targets in batches:
        optimizer.zero_grad()
        cross_entropy(model(ids), targets).backward()
        optimizer.step()
        for _ in range(world):  # once for each rank
            scheduler.step()
