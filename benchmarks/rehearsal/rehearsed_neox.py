r"""A GPT of the size of GPT-NeoX-20B, of plain modules, as it is rehearsed on 1,024 GPUs.

smp-estimator rehearse benchmarks/rehearsal/rehearsed_neox.py --instance ml.p4d.24xlarge --count 128 --only-first-ranks \
    --parameters '{"ddp": true, "pipeline_parallel_degree": 4, "microbatches": 8, "sharded_data_parallel_degree": 32, "bf16": true}'
"""

import torch
import torch.nn.functional as F
from torch import nn

import smdistributed.modelparallel.torch as smp

LAYERS, HIDDEN, HEADS, VOCABULARY, SEQUENCE, BATCH = 44, 6144, 64, 50432, 2048, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.Sequential(
            nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN)
        )

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (t.view(batch, length, HEADS, -1).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, HIDDEN))
        return x + self.mlp(x)


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, ids):
        return self.head(self.norm(self.blocks(self.tokens(ids))))


@smp.step
def train_step(model, ids, targets):
    loss = F.cross_entropy(model(ids).flatten(0, 1).float(), targets.flatten())
    model.backward(loss)
    return loss


def main():
    smp.init()
    device = torch.device("cuda", smp.local_rank())
    torch.cuda.set_device(device)
    with smp.delay_param_initialization(enabled=True):
        module = GPT()
    model = smp.DistributedModel(module)
    for block in model.module.blocks:
        smp.set_activation_checkpointing(block)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
    for _ in range(100):
        ids = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), device=device)
        optimizer.zero_grad()
        loss = train_step(model, ids[:, :-1], ids[:, 1:])
        optimizer.step()
        if smp.rank() == 0:
            print(loss.reduce_mean().item())


if __name__ == "__main__":
    main()
