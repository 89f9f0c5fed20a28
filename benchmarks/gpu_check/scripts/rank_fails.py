"""Trains with two ranks; before its fourth step rank 1 fails.

python rank_fails.py CONFIGURATION raise|die [--nccl]
"""

from __future__ import annotations

import argparse
import json
import os
import time

import torch
from gpu_check import nccl

import smdistributed.modelparallel.torch as smp

parser = argparse.ArgumentParser()
parser.add_argument("configuration", type=json.loads, help="for smp.init, as JSON")
parser.add_argument("kind", choices=["raise", "die"], help="raise an exception, or end without one")
parser.add_argument("--nccl", action="store_true", help="exchange over NCCL, although ranks share a GPU")
arguments = parser.parse_args()

if arguments.nccl:
    os.environ.update(nccl.SHARED_GPU)

smp.init(arguments.configuration)
model = smp.DistributedModel(torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)]))
optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))


@smp.step
def step(x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


for number in range(6):
    if number == 3 and smp.rank() == 1:
        print("FAILS", time.time(), flush=True)
        if arguments.kind == "raise":
            raise ValueError("planted on rank 1")
        os._exit(9)
    optimizer.zero_grad()
    loss = step(torch.ones(8, 256, device=smp.state.device)).reduce_mean()
    optimizer.step()
    float(loss)
