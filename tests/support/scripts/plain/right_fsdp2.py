from common import Net, cross_entropy, dataset, loader, start
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

rank, world = start()
model = Net()
fully_shard(model.mlp)
fully_shard(model)
optimizer = AdamW(model.parameters(), lr=1e-2)
batches = loader(dataset())
for epoch in range(3):
    batches.sampler.set_epoch(epoch)
    for ids, targets in batches:
        optimizer.zero_grad()
        cross_entropy(model(ids), targets).backward()
        clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
