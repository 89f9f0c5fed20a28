import torch
from common import Net, cross_entropy, dataset, loader, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, *, ids, targets):
        return {"loss": cross_entropy(self.net(ids), targets)}


def evaluate():
    with torch.no_grad():
        return torch.stack([model(ids=ids, targets=targets)["loss"] for ids, targets in held_out]).mean()


rank, world = start()
batches, held_out = loader(dataset()), loader(dataset(16))
if rank == 0:
    print(len(held_out), "batches to evaluate")
model = DistributedDataParallel(WithLoss())
optimizer = AdamW(model.parameters(), lr=1e-2)
scheduler = OneCycleLR(optimizer, 1e-2, total_steps=3 * len(batches))
evaluate()
for epoch in range(3):
    batches.sampler.set_epoch(epoch)
    for ids, targets in batches:
        optimizer.zero_grad()
        model(ids=ids, targets=targets)["loss"].backward()
        optimizer.step()
        scheduler.step()
    evaluate()
