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
batches = iter(smp.data.DataLoader(range(100_000), batch_size=4, shuffle=True))
tell("start", begin, os.getpid(), time.monotonic())
print(f"rank {smp.rank()} is forked: {'warm.zygote' in Path(f'/proc/{os.getppid()}/cmdline').read_text()}")
for step in progress.steps(args.steps) if args.loop == "steps" else range(begin, args.steps):
    samples = next(batches)
    draw = torch.Generator().manual_seed(int(samples @ torch.arange(len(samples))))
    x, y = torch.randn(16, 8, generator=draw), torch.randint(0, 4, (16,), generator=draw)
    model.train()
    optimizer.zero_grad()
    train_step(model, x, y)
    optimizer.step()
    scheduler.step()
    if args.loop == "own":
        smp.memory_checkpoint(model, optimizer, {"step": step + 1, "scheduler": scheduler.state_dict()})
    tell("step", step, os.getpid(), time.monotonic())
    time.sleep(args.pause)
state = {name: value for name, value in model.local_state_dict().items() if isinstance(value, torch.Tensor)}
torch.save(state, OUTPUT / f"state.{smp.rank()}.pt")
