"""Trains a small model for some steps, as users write it; what is rehearsed and run."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import smdistributed.modelparallel.torch as smp

VOCABULARY, SEQUENCE, BATCH = 512, 64, 8


class Attention(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x):
        batch, seq, hidden = x.shape
        q, k, v = self.qkv(x).view(batch, seq, 3, self.heads, hidden // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, seq, hidden))


class Block(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, layers, hidden, heads):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, hidden), nn.Embedding(SEQUENCE, hidden)
        self.blocks = nn.Sequential(*[Block(hidden, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(x)))


class MLP(nn.Module):
    def __init__(self, layers, hidden):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, hidden)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU()) for _ in range(layers)])
        self.head = nn.Linear(hidden, VOCABULARY)

    def forward(self, ids):
        return self.head(self.blocks(self.tokens(ids)))


class CNN(nn.Module):
    """Convolutions over the embedded tokens, with skips and running statistics."""

    def __init__(self, layers, hidden):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, hidden)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv1d(hidden, hidden, 3, padding=1), nn.BatchNorm1d(hidden), nn.ReLU())
            for _ in range(layers)
        )
        self.head = nn.Linear(hidden, VOCABULARY)

    def forward(self, ids):
        x = self.tokens(ids).transpose(1, 2)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.transpose(1, 2))


class Experts(nn.Module):
    """Each token goes to one of the experts, which have room for so many (Fedus et al. 2021)."""

    def __init__(self, hidden, experts):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(hidden), nn.Linear(hidden, experts)
        self.up = nn.Parameter(torch.randn(experts, hidden, 2 * hidden) * hidden**-0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * hidden, hidden) * hidden**-0.5)

    def forward(self, x):
        seq = x.shape[1]
        experts = self.router.out_features
        room = 2 * seq // experts
        shares = self.router(self.norm(x)).softmax(-1)
        share, chosen = shares.max(-1)
        mine = F.one_hot(chosen, experts)
        place = mine.cumsum(1) * mine - 1
        slots = F.one_hot(place.clamp(0, room - 1), room) * ((place >= 0) & (place < room)).unsqueeze(-1)
        slots = slots.to(x.dtype)  # [batch, seq, experts, room]
        given = torch.einsum("bser,bsh->berh", slots, x)
        made = torch.einsum("berh,ehw->berw", given, self.up).relu()
        made = torch.einsum("berw,ewh->berh", made, self.down)
        return x + torch.einsum("bser,berh->bsh", slots * share[..., None, None], made)


class Mixture(nn.Module):
    def __init__(self, layers, hidden):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, hidden)
        self.blocks = nn.Sequential(*[Experts(hidden, 4) for _ in range(layers)])
        self.head = nn.Linear(hidden, VOCABULARY)

    def forward(self, ids):
        return self.head(self.blocks(self.tokens(ids)))


def transformers_model(name, layers, hidden):
    """A small model of Transformers, without dropout."""
    import transformers

    none = {"use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if name == "gpt2":
        shape = {"n_layer": layers, "n_embd": hidden, "n_head": 4, "n_positions": SEQUENCE, "vocab_size": VOCABULARY}
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **dropout, **none))
    if name == "llama":
        shape = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": 2 * hidden}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY}
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **heads, **none))
    shape = {"num_layers": layers // 2, "num_decoder_layers": layers // 2, "d_model": hidden, "d_ff": 4 * hidden}
    heads = {"num_heads": 4, "d_kv": hidden // 4, "vocab_size": VOCABULARY, "dropout_rate": 0.0}
    none["decoder_start_token_id"] = 0
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**shape, **heads, **none))


def blocks_of(module):
    """The layers that are checkpointed."""
    if hasattr(module, "encoder"):
        return [*module.encoder.block, *module.decoder.block]
    found = getattr(module, "transformer", None) or getattr(module, "model", None)
    return module.blocks if found is None else getattr(found, "h", None) or found.layers


@smp.step
def train_step(model, ids, targets):
    words = {"decoder_input_ids": ids} if hasattr(model.module, "encoder") else {}
    output = model(ids, **words)
    logits = output if isinstance(output, torch.Tensor) else output["logits"]
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    model.backward(loss)
    return loss


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--model", default="gpt")
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--hidden", type=int, default=128)
    options.add_argument("--checkpoint", action="store_true")
    options.add_argument("--tensor", action="store_true")
    options.add_argument("--muon", action="store_true")
    options.add_argument("--wrong", default="")
    given = options.parse_args()
    smp.init({"pipeline_parallel_degree": 2, "ddp": True} if given.wrong == "degree" else {})
    device = torch.device("cuda", smp.local_rank())
    torch.manual_seed(1)
    made = {
        "gpt": lambda: GPT(given.layers, given.hidden, 4),
        "mlp": lambda: MLP(given.layers, given.hidden),
        "cnn": lambda: CNN(given.layers, given.hidden),
        "moe": lambda: Mixture(given.layers, given.hidden),
    }
    with smp.tensor_parallelism(enabled=given.tensor):
        make = made.get(given.model) or (lambda: transformers_model(given.model, given.layers, given.hidden))
        module = make()
    model = smp.DistributedModel(module)
    if given.checkpoint:
        for block in blocks_of(model.module):
            smp.set_activation_checkpointing(block)
    adamw = lambda: torch.optim.AdamW(model.parameters(), lr=1e-3)  # noqa: E731
    optimizer = smp.DistributedOptimizer(smp.optimizers.Muon(model) if given.muon else adamw())
    data = torch.randint(0, VOCABULARY, (64, SEQUENCE + 1))
    for step in range(10):
        rows = torch.randperm(len(data))[: BATCH if given.wrong != "batch" else BATCH - 1]
        ids = data[rows].to(device)
        optimizer.zero_grad()
        loss = train_step(model, ids[:, :-1], ids[:, 1:])
        assert all(seen.shape == (2,) for seen in smp.allgather(torch.ones(2), smp.CommGroup.DP_GROUP))
        if given.wrong == "values":
            model.module.head.weight.nonzero()
        optimizer.step()
        if given.wrong == "barrier" and smp.rank() == 0:
            smp.barrier()
        if given.wrong == "sum" and smp.rank() == 0:
            dist.all_reduce(torch.ones(1))
        if given.wrong == "save" and smp.dp_rank() == 0:
            smp.save_checkpoint(os.environ["SMP_CHECKPOINT_DIR"], tag="last", model=model, optimizer=optimizer)
        value = loss.reduce_mean().item()
        if smp.rank() == 0:
            print(f"step {step}: {value:.3f}", flush=True)


if __name__ == "__main__":
    main()
