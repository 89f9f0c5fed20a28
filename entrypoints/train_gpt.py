"""Trains a byte-level GPT on the text files of the ``train`` channel, with the model parallel library.

Runs the same as a SageMaker training job, as a job of host processes and under ``mpirun`` by hand. It checkpoints,
resumes from the newest checkpoint by itself, saves and leaves on SIGTERM, and at the end writes plain PyTorch
weights, ``config.json`` and ``metrics.json`` into the model folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import smdistributed.modelparallel.torch as smp

VOCABULARY = 256  # every byte is a token


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """The shape of the model; sizes count elements."""

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    seq_len: int = 128
    dropout: float = 0.0


class Attention(nn.Module):
    """Causal self-attention through PyTorch's fused kernels."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.out = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, seq, hidden]`` to the same."""
        batch, seq, hidden = x.shape
        q, k, v = self.qkv(x).view(batch, seq, 3, self.heads, hidden // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, seq, hidden))


class Block(nn.Module):
    """A transformer layer with layer norm in front of each part."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.norm_2 = nn.LayerNorm(config.hidden)
        self.mlp = nn.Sequential(
            nn.Linear(config.hidden, 4 * config.hidden), nn.GELU(), nn.Linear(4 * config.hidden, config.hidden)
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, seq, hidden]`` to the same."""
        x = x + self.dropout(self.attention(self.norm_1(x)))
        return x + self.dropout(self.mlp(self.norm_2(x)))


class GPT(nn.Module):
    """A language model over bytes; the output layer shares its weight with the token embedding."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(VOCABULARY, config.hidden)
        self.positions = nn.Embedding(config.seq_len, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, VOCABULARY, bias=False)
        self.apply(self._initialise)
        for block in self.blocks:  # residual branches begin small, so that depth does not add variance
            for layer in (block.attention.out, block.mlp[2]):
                nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * config.layers))
        self.head.weight = self.tokens.weight

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """``[batch, seq]`` to logits, ``[batch, seq, 256]``."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Corpus:
    """Bytes of all files of a channel; the last part is held out.

    Args:
        folder: read recursively, in the order of names.
        seq_len: tokens per sample.
        held_out: fraction of the bytes that evaluation uses and training never sees.

    Raises:
        FileNotFoundError: the folder is missing or holds too little text.
    """

    def __init__(self, folder: Path, seq_len: int, held_out: float = 0.05) -> None:
        files = sorted(p for p in folder.rglob("*") if p.is_file()) if folder.is_dir() else []
        text = b"".join(p.read_bytes() for p in files)
        split = int(len(text) * (1 - held_out))
        if len(text) - split <= seq_len + 1:
            raise FileNotFoundError(
                f"the train channel {folder} holds {len(text)} bytes in {len(files)} files, too little to cut "
                f"sequences of {seq_len} bytes from its held-out {held_out:.0%}; point the channel at text files"
            )
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.train, self.held_out = data[:split], data[split:]
        self.seq_len = seq_len

    def batch(self, data: torch.Tensor, size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``size`` random samples ``(ids, next ids)``, each ``[size, seq]``; the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(data) - self.seq_len - 1, (size,), generator=generator)
        windows = data[starts[:, None] + torch.arange(self.seq_len + 1)].long()
        return windows[:, :-1], windows[:, 1:]


@smp.step
def train_step(model: nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = model(ids)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    model.backward(loss)
    return loss


@smp.step
def evaluation_step(model: nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def place_among_readers() -> tuple[int, int]:
    """Return this rank's place among the ranks that read different samples, and their number.

    A common batch (``prescaled_batch``) belongs to a whole tensor parallel group.
    """
    common = smp.state.cfg.prescaled_batch
    return (smp.rdp_rank(), smp.rdp_size()) if common else (smp.dp_rank(), smp.dp_size())


def this_ranks_share(size: int) -> slice:
    """Return this rank's samples of a global batch of ``size``."""
    place, readers = place_among_readers()
    return slice(place * (size // readers), (place + 1) * (size // readers))


@torch.no_grad()
def evaluate(model: nn.Module, corpus: Corpus, args: argparse.Namespace, device: torch.device) -> float | None:
    """Return the held-out loss in nats per byte, the mean over all data parallel ranks; None when no batches are held out."""
    if args.eval_batches < 1:
        return None
    model.eval()
    losses = []
    for index in range(args.eval_batches):
        ids, targets = corpus.batch(corpus.held_out, args.batch_size, seed=10_000_019 + index)
        share = this_ranks_share(args.batch_size)
        losses.append(float(evaluation_step(model, ids[share].to(device), targets[share].to(device)).reduce_mean()))
    model.train()
    everyone = smp.allgather(sum(losses) / len(losses), smp.DP_GROUP)
    return sum(everyone) / len(everyone)


def shown(val_loss: float | None) -> str:
    return "none" if val_loss is None else f"{val_loss:.4f}"


@torch.no_grad()
def sample_text(model: GPT, prompt: str, length: int, device: torch.device, seed: int) -> str:
    """Continue ``prompt`` by ``length`` bytes."""
    model.eval()
    generator = torch.Generator(device=device).manual_seed(seed)
    ids = torch.tensor([list(prompt.encode())], device=device)
    for _ in range(length):
        logits = model(ids[:, -model.config.seq_len :])[0, -1] / 0.8
        following = torch.multinomial(torch.softmax(logits.float(), -1), 1, generator=generator)
        ids = torch.cat([ids, following[None]], dim=1)
    return bytes(ids[0].tolist()).decode("utf-8", errors="replace")


def learning_rate_factor(step: int, warmup: int, steps: int) -> float:
    """Return the factor of a linear warm-up, then of a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps")
    parser.add_argument("--batch_size", type=int, default=32, help="samples per step, over all processes")
    parser.add_argument("--seq_len", type=int, default=128, help="bytes per sample")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw", help="muon: of the blocks' matrices")
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--weight_decay", type=float, default=0.1)
    parser.add_argument("--warmup", type=int, default=20, help="steps of linear warm-up")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient")
    parser.add_argument("--eval_interval", type=int, default=100, help="steps between evaluations; 0: only at the end")
    parser.add_argument("--eval_batches", type=int, default=4, help="held-out batches per evaluation; 0: none")
    parser.add_argument("--checkpoint_interval", type=int, default=100, help="steps between checkpoints; 0: none")
    parser.add_argument("--kept_checkpoints", type=int, default=2)
    parser.add_argument("--sample_bytes", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log_losses", type=int, default=0, help="1: write every step's loss to losses.json")
    parser.add_argument("--train", type=Path, default=os.environ.get("SM_CHANNEL_TRAIN"), help="folder of text")
    parser.add_argument("--model_dir", type=Path, default=os.environ.get("SM_MODEL_DIR", "model"))
    parser.add_argument("--checkpoint_dir", type=Path, default=os.environ.get("SMP_CHECKPOINT_DIR", "checkpoints"))
    args, _ = parser.parse_known_args()
    if args.train is None:
        parser.error("no training text: give fit() a channel named 'train', or pass --train FOLDER")
    return args


def make_model(config: GPTConfig) -> smp.DistributedModel:
    """Make the model over all ranks; with tensor parallelism its ranks share the linear maps of the blocks."""
    with smp.model_creation():
        module = GPT(config)
    smp.set_tensor_parallelism(module.blocks, smp.tp_size() > 1)
    return smp.DistributedModel(module)


def make_optimizer(model: nn.Module, args: argparse.Namespace) -> smp.DistributedOptimizer:
    """Make an AdamW optimizer, or Muon with AdamW beside it; matrices decay, biases and norms do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    inner: torch.optim.Optimizer
    if args.optimizer == "muon":  # its updates are as large as AdamW's, so that the same rate and decay fit
        settings = {"weight_decay": args.weight_decay, "adamw_weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"}
        inner = smp.optimizers.Muon(model, lr=args.learning_rate, betas=(0.9, 0.95), **settings)
    else:
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": args.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        inner = torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.95))
    return smp.DistributedOptimizer(
        inner,
        static_loss_scale=None,
        dynamic_loss_scale=True,  # only float16 is scaled
        dynamic_loss_args={"init_scale": 2.0**16, "scale_window": 500},
    )


def is_due(done: int, interval: int, args: argparse.Namespace) -> bool:
    """Return whether something that happens every ``interval`` steps happens now; it always does after the last step."""
    return bool(interval) and done % interval == 0 and done < args.steps


def print_once(text: str) -> None:
    """Print on rank 0 only."""
    if smp.rank() == 0:
        print(text, flush=True)


def main() -> int:
    args = parse_arguments()
    smp.init()
    _, readers = place_among_readers()
    if args.batch_size % readers:
        raise ValueError(
            f"batch_size is {args.batch_size} samples over all processes, which cannot be shared evenly by the {readers} data "
            f"parallel {'groups' if smp.state.cfg.prescaled_batch else 'ranks'} that read different ones; use a multiple of "
            f"{readers}"
        )
    torch.manual_seed(args.seed)  # equal weights everywhere
    config = GPTConfig(args.layers, args.hidden, args.heads, args.seq_len, args.dropout)
    corpus = Corpus(Path(args.train), args.seq_len)
    model = make_model(config)
    torch.manual_seed(args.seed + smp.dp_rank())  # different dropout on every replica
    device = smp.state.device

    optimizer = make_optimizer(model, args)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, args.warmup, args.steps)
    )

    # Resumes from the newest checkpoint, saves one every few steps and on SIGTERM, after which the job ends with exit code 0.
    kept: dict[str, list[float]] = {"losses": []}
    progress = smp.auto_resume(
        model,
        optimizer,
        folder=args.checkpoint_dir,
        every=args.checkpoint_interval or None,
        user_content=kept,
        num_kept_partial_checkpoints=args.kept_checkpoints,
        scheduler=scheduler,
    )
    if progress.resumed:
        print_once(f"resumed at step {progress.step}")
    losses = kept["losses"]

    model.train()
    for step in progress.steps(args.steps):
        ids, targets = corpus.batch(corpus.train, args.batch_size, seed=args.seed * 1_000_003 + step)
        share = this_ranks_share(args.batch_size)
        optimizer.zero_grad()
        loss = train_step(model, ids[share].to(device), targets[share].to(device))
        optimizer.clip_master_grads(args.clip)
        optimizer.step()
        if not optimizer.overflow:
            scheduler.step()
        if args.log_losses:
            mine = float(loss.reduce_mean())
            losses.append(sum(smp.allgather(mine, smp.DP_GROUP)) / smp.dp_size())
        done = step + 1
        if is_due(done, args.eval_interval, args):
            val_loss = evaluate(model, corpus, args, device)
            if val_loss is not None:
                smp.state.progress.note_eval_loss(val_loss)
            print_once(f"step {done}: train_loss={float(loss.reduce_mean()):.4f} val_loss={shown(val_loss)}")

    finish(model, config, args, evaluate(model, corpus, args, device), losses)
    return 0


def finish(
    model: nn.Module, config: GPTConfig, args: argparse.Namespace, val_loss: float | None, losses: list[float]
) -> None:
    """Write the model, and show what it was trained to."""
    weights = model.state_dict(gather_to_rank0=True)  # from all ranks that hold a part of the model
    device = smp.state.device
    if smp.rank() == 0:
        whole = GPT(config)
        whole.load_state_dict(weights)
        write_model(args, config, whole, val_loss, losses)
        print(f"step {args.steps}: val_loss={shown(val_loss)}", flush=True)
        if args.sample_bytes:
            print("--- sample ---\n" + sample_text(whole.to(device), "def ", args.sample_bytes, device, args.seed))
            print("--- end of sample ---", flush=True)
    smp.barrier()


def write_model(
    args: argparse.Namespace, config: GPTConfig, model: GPT, val_loss: float | None, losses: list[float]
) -> None:
    """Write weights for plain ``torch.load``, the shape to build the model with, and what was reached."""
    args.model_dir.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.float().cpu() for name, tensor in model.state_dict().items()}
    torch.save(weights, args.model_dir / "model.pt")
    (args.model_dir / "config.json").write_text(json.dumps(dataclasses.asdict(config), indent=2))
    (args.model_dir / "metrics.json").write_text(json.dumps({"steps": args.steps, "val_loss": val_loss}))
    if args.log_losses:
        (args.model_dir / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    raise SystemExit(main())
