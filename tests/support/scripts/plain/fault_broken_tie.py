from common import Net, cross_entropy, dataset, loader, start
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

rank, world = start()
net = Net(tied=True)
saved = {name: tensor.clone() for name, tensor in net.state_dict().items()}
net.load_state_dict(saved, assign=True)  # gives embed and head a parameter each
model = DistributedDataParallel(net)
optimizer = AdamW(model.parameters(), lr=1e-2)
batches = loader(dataset())
for epoch in range(3):
    batches.sampler.set_epoch(epoch)
    for ids, targets in batches:
        optimizer.zero_grad()
        cross_entropy(model(ids), targets).backward()
        optimizer.step()
