import torch
from common import Net, cross_entropy, dataset, loader, start
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

rank, world = start()
torch.manual_seed(rank)  # DDP gives every rank the weights of rank 0
model = DistributedDataParallel(Net(tied=True))
optimizer = AdamW(model.parameters(), lr=1e-2)
batches = loader(dataset())
step = 0
for epoch in range(3):
    batches.sampler.set_epoch(epoch)
    for ids, targets in batches:
        loss = cross_entropy(model(ids), targets) / 2
        loss.backward()
        step += 1
        if step % 2 == 0:
            clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
