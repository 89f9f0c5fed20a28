from common import Net, cross_entropy, dataset, loader, start
from torch.optim import SGD

rank, world = start()
model = Net()
optimizer = SGD(model.parameters(), lr=0.1)
batches = loader(dataset())
for epoch in range(3):
    batches.sampler.set_epoch(epoch)
    for ids, targets in batches:
        optimizer.zero_grad()
        cross_entropy(model(ids), targets).backward()  # and no all-reduce of the gradients
        optimizer.step()
