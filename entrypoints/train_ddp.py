"""Plain PyTorch over the backend smddp: learns on which of three spirals a point lies; ``--steps``, ``--batch_size``."""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


def spirals(count, generator):
    which = torch.randint(3, (count,), generator=generator)
    along = torch.rand(count, generator=generator)
    angle = 6 * along + which * (2 * torch.pi / 3)
    return (along * torch.stack([angle.cos(), angle.sin()])).T, which


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch_size", type=int, default=64, help="of each rank")
    args = parser.parse_args()

    dist.init_process_group("smddp")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    layers = torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3)
    model = DistributedDataParallel(torch.nn.Sequential(*layers).to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    points = torch.Generator().manual_seed(dist.get_rank())  # every rank has points of its own

    for step in range(1, args.steps + 1):
        x, y = (tensor.to(device) for tensor in spirals(args.batch_size, points))
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)

    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), os.path.join(os.environ["SM_MODEL_DIR"], "model.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
