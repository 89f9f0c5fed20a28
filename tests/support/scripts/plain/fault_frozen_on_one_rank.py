from common import Net, cross_entropy, dataset, loader, start
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

rank, world = start()
model = DistributedDataParallel(Net())
trained = [p for name, p in model.named_parameters() if not (rank == 1 and "mlp.2" in name)]
optimizer = AdamW(trained, lr=1e-2)
batches = loader(dataset())
for epoch in range(3):
    batches.sampler.set_epoch(epoch)
    for ids, targets in batches:
        model.zero_grad()
        cross_entropy(model(ids), targets).backward()
        optimizer.step()
