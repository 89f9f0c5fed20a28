"""Trains a small model with dropout, keeps its state in memory after each step, and tells of each step when it is over."""

import argparse
import os
import time
from pathlib import Path

import torch
from torch import nn

import smdistributed.modelparallel.torch as smp

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--loop", default="own")
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--files", default="")
parser.add_argument("--resume", default="")
args, _ = parser.parse_known_args()

smp.init()
torch.manual_seed(0)
OUTPUT = Path(os.environ["SM_OUTPUT_DATA_DIR"])
LEDGER = os.open(OUTPUT / f"ledger.{smp.rank()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 32)) for _ in range(4)
        )
        self.last = nn.Linear(32, 4)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x)


@smp.step
def train_step(model, x, y):
    loss = nn.functional.cross_entropy(model(x), y)
    model.backward(loss)
    return loss


def content_after(step):
    return {"step": step + 1, "scheduler": scheduler.state_dict()}


def tell(*words):
    os.write(LEDGER, (" ".join(map(str, words)) + "\n").encode())


with smp.tensor_parallelism(enabled=smp.tp_size() > 1):
    net = Net()
model = smp.DistributedModel(net)
optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
begin = 0
if args.loop != "own":
    progress = smp.auto_resume(model, optimizer, scheduler=scheduler)
    begin = progress.step
elif smp.newest_memory_checkpoint() is not None:
    content = smp.resume_from_checkpoint(os.environ["SMP_CHECKPOINT_DIR"])
    begin = content["step"]
    scheduler.load_state_dict(content["scheduler"])
elif args.resume:
    content = smp.resume_from_checkpoint(args.files, args.resume)
    begin = content["step"]
    scheduler.load_state_dict(content["scheduler"])
batches = iter(smp.data.DataLoader(range(100_000), batch_size=args.batch, shuffle=True))
tell("start", begin, os.getpid(), time.monotonic())
print(f"rank {smp.rank()} is forked: {'warm.fork_server' in Path(f'/proc/{os.getppid()}/cmdline').read_text()}")
for step in progress.steps(args.steps) if args.loop == "steps" else range(begin, args.steps):
    samples = next(batches)
    # Four rows for each sample, which follow from it.
    draws = [torch.Generator().manual_seed(int(sample)) for sample in samples]
    x = torch.cat([torch.randn(4, 8, generator=draw) for draw in draws])
    y = torch.cat([torch.randint(0, 4, (4,), generator=draw) for draw in draws])
    model.train()
    optimizer.zero_grad()
    train_step(model, x, y)
    optimizer.step()
    scheduler.step()
    if args.files and not args.resume:
        smp.save_checkpoint(args.files, str(step + 1), True, model, optimizer, content_after(step))
    if args.loop == "own":
        smp.memory_checkpoint(model, optimizer, content_after(step))
    tell("step", step, os.getpid(), time.monotonic())
    time.sleep(args.pause)
state = {name: value for name, value in model.local_state_dict().items() if isinstance(value, torch.Tensor)}
torch.save(state, OUTPUT / f"state.{smp.rank()}.pt")
