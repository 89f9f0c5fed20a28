"""Trains a small model and hangs on purpose: ``--hang`` says how, ``--rank`` and ``--step`` where.

The line that a verdict must name is marked with ``# <- KIND``; a kind may have several.
"""

import argparse
import os
import queue
import random
import signal
import tempfile
import threading
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import smdistributed.modelparallel.torch as smp

parser = argparse.ArgumentParser()
parser.add_argument("--hang", default="")
parser.add_argument("--rank", type=int, default=1)
parser.add_argument("--step", type=int, default=3)
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--delay", type=float, default=0.0)
args, _ = parser.parse_known_args()

smp.init()
torch.manual_seed(0)
ME = smp.rank() == args.rank
FOREVER = 1e9
CHECKPOINTS = os.environ["SMP_CHECKPOINT_DIR"]


def hangs(kind, step):
    return ME and args.hang == kind and step == args.step


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64 * args.steps

    def __getitem__(self, index):
        if ME and args.hang == "dataset" and index >= 16 * args.step:
            time.sleep(FOREVER)  # <- dataset
        if ME and args.hang in ("worker", "workers_lock") and index >= 16 * args.step:
            if args.hang == "worker":
                time.sleep(FOREVER)
            threading.Lock().acquire()
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        return torch.full((16,), float(index % 7)), index % 4


class Block(nn.Module):
    def __init__(self, last=False):
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.last = last
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.training and self.last and args.hang == "forward" and state["step"] == args.step and ME:
            time.sleep(FOREVER)  # <- forward
        if self.training and self.last and args.hang == "forward_spin" and state["step"] == args.step and ME:
            while True:  # <- forward_spin
                pass  # <- forward_spin
        if self.training and not self.last and args.hang == "piece" and state["step"] == args.step and ME:
            time.sleep(FOREVER)  # <- piece
        return x + torch.tanh(self.inner(x))


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if hangs("backward", state["step"]):
            time.sleep(FOREVER)  # <- backward
        return gradient


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block(), Block(last=True)])
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(Slow.apply(x) if args.hang == "backward" else x)


noise = random.Random(smp.rank())
state = {"step": 0}
model = smp.DistributedModel(Model())
optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))


@smp.step
def train_step(model, x, y):
    if hangs("step_function", state["step"]):
        time.sleep(FOREVER)  # <- step_function
    loss = F.cross_entropy(model(x), y)
    model.backward(loss)
    return loss


@smp.step
def other_step(model, x, y):
    loss = F.cross_entropy(model(x), y)
    model.backward(loss)
    return loss


@smp.step
def evaluate(model, x, y):
    return F.cross_entropy(model(x), y)


def helper_thread():
    if args.hang == "thread_lock" and ME:
        lock.acquire()


lock = threading.Lock()
waiting = queue.Queue()
fifo = os.path.join(tempfile.mkdtemp(), "fifo")
os.mkfifo(fifo)


def batches():
    workers = 1 if args.hang in ("worker", "workers_lock") else 0
    sampler = torch.utils.data.DistributedSampler(Data(), smp.dp_size(), smp.dp_rank(), shuffle=False)
    length = args.steps - 3 * (args.hang in ("uneven", "uneven_plain") and ME)
    loader = torch.utils.data.DataLoader(Data(), batch_size=8, sampler=sampler, num_workers=workers, drop_last=True)
    for number, batch in enumerate(loader):  # <- worker workers_lock
        if number == length:
            return
        if hangs("generator", number):
            time.sleep(FOREVER)  # <- generator
        yield batch


def user_code(step):
    """Hangs of the script's own, between two steps."""
    if hangs("sleep", step):
        time.sleep(FOREVER)  # <- sleep
    if hangs("spin", step):
        while True:  # <- spin
            pass  # <- spin
    if hangs("spin_c", step):
        sum(iter(int, 1))  # <- spin_c
    if hangs("lock", step):
        lock.acquire()
        lock.acquire()  # <- lock
    if hangs("thread_lock", step):
        other = threading.Thread(target=helper_thread, daemon=True)
        other.start()
        other.join()
        lock.acquire()  # <- thread_lock
    if hangs("join", step):
        other = threading.Thread(target=time.sleep, args=(FOREVER,), daemon=True)
        other.start()
        other.join()  # <- join
    if hangs("event", step):
        threading.Event().wait()  # <- event
    if hangs("queue", step):
        waiting.get()  # <- queue
    if hangs("input", step):
        os.read(os.open(fifo, os.O_RDWR), 1)  # <- input
    if hangs("fifo", step):
        open(fifo).read()  # noqa: SIM115  # <- fifo
    if hangs("process", step):
        import subprocess

        subprocess.run(["sleep", "100000"])  # <- process
    if hangs("socket", step):
        import socket

        server = socket.socket()
        server.bind(("127.0.0.1", 0))
        server.listen()
        server.accept()  # <- socket
    if hangs("sigwait", step):
        signal.sigwait({signal.SIGHUP})  # <- sigwait
    if hangs("poll", step):
        while not os.path.exists("/nowhere"):  # <- poll
            time.sleep(0.01)  # <- poll
    if hangs("spin_torch", step):
        a = torch.eye(64)
        while True:  # <- spin_torch
            a = a @ a  # <- spin_torch
    if hangs("future", step):
        from concurrent.futures import Future

        Future().result()  # <- future
    if hangs("process_queue", step):
        import multiprocessing

        multiprocessing.Queue().get()  # <- process_queue
    if hangs("select", step):
        import select

        select.select([os.open(fifo, os.O_RDWR)], [], [])  # <- select
    if hangs("pool", step):
        import multiprocessing

        with multiprocessing.get_context("fork").Pool(1) as pool:
            pool.apply(time.sleep, (FOREVER,))  # <- pool
    if hangs("send", step):
        smp.send("x", (smp.rank() + 1) % smp.size(), smp.RankType.WORLD_RANK)  # <- send
    if hangs("dp_barrier", step):
        smp.dp_barrier()  # <- dp_barrier
    if args.hang == "branch" and step == args.step:
        if ME:
            smp.save_checkpoint(CHECKPOINTS, "branch", model=model, optimizer=optimizer)  # <- branch
        else:
            dist.barrier()  # <- branch
    if hangs("stop", step):
        os.kill(os.getpid(), signal.SIGSTOP)  # <- stop
    if hangs("stop_mpirun", step):
        os.kill(os.getppid(), signal.SIGSTOP)
        time.sleep(FOREVER)
    if hangs("stop_launcher", step):
        status = open(f"/proc/{os.getppid()}/stat", "rb").read()  # noqa: SIM115
        os.kill(int(status.rpartition(b")")[2].split()[1]), signal.SIGSTOP)
        time.sleep(FOREVER)
    if hangs("extra_barrier", step):
        smp.barrier()  # <- extra_barrier
    if args.hang == "skipped_barrier" and step == args.step and not ME:
        smp.barrier()  # <- skipped_barrier
    if hangs("extra_allgather", step):
        smp.allgather(1, smp.WORLD)  # <- extra_allgather
    if hangs("recv", step):
        smp.recv_from((smp.rank() + 1) % smp.size(), smp.RankType.WORLD_RANK)  # <- recv
    if hangs("torch_barrier", step):
        dist.barrier()  # <- torch_barrier
    if args.hang == "torch_swapped" and step == args.step:
        if ME:
            dist.all_reduce(torch.ones(3))  # <- torch_swapped
            smp.barrier()
        else:
            smp.barrier()  # <- torch_swapped
            dist.all_reduce(torch.ones(3))
    if args.hang == "torch_extra_reduce" and step == args.step and ME:
        dist.all_reduce(torch.ones(3))  # <- torch_extra_reduce
    if args.hang == "save_one" and step == args.step and ME:
        smp.save_checkpoint(CHECKPOINTS, "one", model=model, optimizer=optimizer)  # <- save_one
    if args.hang == "save_all_but_one" and step == args.step and not ME:
        smp.save_checkpoint(CHECKPOINTS, "most", model=model, optimizer=optimizer)  # <- save_all_but_one
    if hangs("extra_state", step):
        model.state_dict()  # <- extra_state
    if args.delay:
        time.sleep(args.delay * 8 * noise.random())
        if step % 100 == 99:
            smp.save_checkpoint(CHECKPOINTS, "often", model=model, optimizer=optimizer)
            model.eval()
            for _ in range(20 * (smp.rank() == 0 and smp.pp_size() == 1 and smp.dp_size() == smp.size())):
                evaluate(model, x, y)
                time.sleep(args.delay * 4)
            model.train()


for number, (x, y) in enumerate(batches()):  # <- dataset
    step = state["step"] = number
    if hangs("skip_step", step):
        continue
    if hangs("skip_optimizer", step):
        train_step(model, x, y)  # <- skip_optimizer
        continue
    if step == args.step and model.pipeline is not None and model.pipeline.context.root_program.was_followed:
        print(f"rank {smp.rank()} has followed a step program")
    if args.hang == "step_only_one" and step == args.step and ME:
        evaluate(model, x, y)  # <- step_only_one
    if hangs("other_step", step):
        other_step(model, x, y)  # <- other_step
    else:
        train_step(model, x, y)  # <- skip_step skip_optimizer uneven other_step
    optimizer.step()  # <- uneven_optimizer skip_optimizer
    optimizer.zero_grad()
    user_code(step)
    if step == 1:
        smp.save_checkpoint(CHECKPOINTS, "early", model=model, optimizer=optimizer)

if ME and args.hang == "at_end":
    time.sleep(FOREVER)  # <- at_end
smp.barrier()
print(f"rank {smp.rank()} is done")
