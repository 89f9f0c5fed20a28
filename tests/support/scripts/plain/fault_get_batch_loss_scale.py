import numpy as np
import torch
from common import Net, cross_entropy, start
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

rank, world = start()
tokens = np.random.default_rng(1).integers(32, size=4096)
model = DistributedDataParallel(Net())
optimizer = AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(7 + rank)


def get_batch(count=4, size=4, length=6):
    for _ in range(count):
        places = torch.randint(len(tokens) - length - 1, (size,))
        rows = torch.stack([torch.from_numpy(tokens[place : place + length + 1]) for place in places.tolist()])
        yield rows[:, :-1], rows[:, 1:]


for _ in range(3):
    for ids, targets in get_batch():
        optimizer.zero_grad()
        (cross_entropy(model(ids), targets) / world).backward()
        optimizer.step()
