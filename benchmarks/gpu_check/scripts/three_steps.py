"""Trains three steps with this library and prints one finding. The checks start it under each launcher.

python three_steps.py NAME [--config JSON] [--device cuda] [--started nccl]
"""

from __future__ import annotations

import argparse
import json
import os

import torch
import torch.distributed as dist
from gpu_check import environment
from gpu_check.results import emit

import smdistributed.modelparallel.torch as smp

parser = argparse.ArgumentParser()
parser.add_argument("name", help="of the case")
parser.add_argument("--config", type=json.loads, default={}, help="for smp.init, as JSON")
parser.add_argument("--device", default="cpu", help="the type of device that the library must choose")
parser.add_argument("--started", help="backend of a torch.distributed job that the script starts before smp.init")
arguments = parser.parse_args()

if arguments.started:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(environment.find_free_port()), RANK="0", WORLD_SIZE="1")
    dist.init_process_group(arguments.started)

smp.init(arguments.config)
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
model = smp.DistributedModel(net)
optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))


@smp.step
def step(x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


for _ in range(3):
    optimizer.zero_grad()
    loss = step(torch.ones(4, 8, device=smp.state.device)).reduce_mean()
    optimizer.step()
if smp.rank() == 0:
    emit(
        case=arguments.name,
        ok=smp.state.device.type == arguments.device,
        device=str(smp.state.device),
        backend=smp.state.backend,
        size=smp.size(),
        carrier=type(smp.state.control._carrier).__name__,
        loss=float(loss),
        file=smp.__file__,
    )
