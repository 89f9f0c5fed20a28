"""A script as people write it for GPUs, with the calls that public ones make; it prints what its test looks for."""

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.cuda.amp import custom_fwd
from torch.utils.data import DataLoader, TensorDataset

import smdistributed.modelparallel.torch as smp

assert torch.cuda.is_available(), "this script needs a GPU"
torch.backends.cudnn.benchmark = True
torch.backends.cuda.matmul.allow_tf32 = True


class Scale(torch.autograd.Function):
    @staticmethod
    @custom_fwd(cast_inputs=torch.float32)
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.register_buffer("mask", torch.ones(16, device="cuda"))

    def forward(self, x):
        noise = torch.zeros(x.size(0), 16, device=x.device)
        return self.second(F.relu(Scale.apply(self.first(x))) * self.mask + noise)


def memory(when):
    torch.cuda.synchronize()
    used, most = torch.cuda.memory_allocated(device=smp.local_rank()), torch.cuda.max_memory_allocated()
    print(
        f"{when}: {used / 2**20:.0f} MB of {torch.cuda.get_device_properties(0).total_memory / 2**20:.0f}, most {most}"
    )


@smp.step
def train_step(model, x, y):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x).float(), y)
    model.backward(loss)
    return loss


def main():
    smp.init()
    torch.cuda.set_device(smp.local_rank())
    device = torch.device("cuda", smp.local_rank())
    torch.manual_seed(7)
    torch.cuda.manual_seed_all(7)
    data = TensorDataset(torch.randn(32, 8), torch.randint(0, 4, (32,)))
    loader = DataLoader(data, batch_size=8, pin_memory=True, num_workers=1, drop_last=True)
    model = smp.DistributedModel(Net().cuda())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
    copying = torch.cuda.Stream()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    losses = []
    start.record()
    for _ in range(3):
        for x, y in loader:
            with torch.cuda.stream(copying):
                x, y = x.to(device, non_blocking=True), y.cuda(non_blocking=True)
            torch.cuda.current_stream().wait_stream(copying)
            x.record_stream(torch.cuda.current_stream())
            optimizer.zero_grad()
            with torch.cuda.nvtx.range("step") if smp.rank() == 0 else nullcontext():
                loss = train_step(model, x, y).reduce_mean()
            optimizer.step()
            losses.append(loss.detach().cpu().item())
    end.record()
    torch.cuda.synchronize()
    total = torch.tensor([losses[-1]], device=device)
    dist.all_reduce(total)
    torch.cuda.empty_cache()
    memory("after training")
    assert start.elapsed_time(end) > 0
    assert losses[-1] < losses[0], losses
    folder = os.environ["SM_MODEL_DIR"]
    smp.save({"rng": torch.cuda.get_rng_state(), "w": total}, f"{folder}/state.pt", partial=True)
    loaded = smp.load(
        f"{folder}/state.pt", partial=True, map_location=lambda storage, _: storage.cuda(smp.local_rank())
    )
    torch.cuda.set_rng_state(loaded["rng"])
    print(f"rank {smp.rank()} of {torch.cuda.device_count()} devices, on {torch.cuda.current_device()}: ok")


if __name__ == "__main__":
    main()
