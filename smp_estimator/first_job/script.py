"""``train.py`` of a first job: whole, and with a place for the reader's own model and data."""

from __future__ import annotations

from smp_estimator.first_job.answers import MODELS, STRATEGIES, Answers

_HEAD = '''\
"""Trains {what}, with {how}.

    {command}

Other degrees need no change of this file. On every rank: steps, saving, and all that talks to other ranks.
"""

import argparse
import os
from pathlib import Path

import torch
{imports}

import smdistributed.modelparallel.torch as smp

'''

_OWN_MODEL = '''
def make_model():
    """Your model; any nn.Module."""
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def make_data():
    """Your samples: any data set with a length. Here, which of the first ten numbers is the largest."""
    inputs = torch.randn(1024, 64, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(inputs, inputs[:, :10].argmax(dim=1))


@smp.step  # runs once for each microbatch
def train_step(model, inputs, targets):
    loss = cross_entropy(model(inputs), targets)
    model.backward(loss)
    return loss

'''

_TRANSFORMERS_MODEL = '''
def make_model():
    """Your model: LlamaForCausalLM.from_pretrained("…"), whose weights are kept, in the place of this small one."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=64,
        )
    )


def make_data():
    """Your samples: token ids, all of one length. Here, 64 bytes of a text each."""
    text = torch.tensor(list(b"to be or not to be, that is the question. " * 400))
    ids = text[: len(text) // 64 * 64].view(-1, 64)
    return torch.utils.data.TensorDataset(ids, ids)


@smp.step  # runs once for each microbatch
def train_step(model, ids, labels):
    loss = model(input_ids=ids, labels=labels)["loss"]
    model.backward(loss)
    return loss

'''

_MAIN = """
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=32, help="samples of each rank that reads")
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--model_dir", type=Path, default=os.environ.get("SM_MODEL_DIR", "model"))
    args, _ = parser.parse_known_args()  # a job passes --mp_parameters besides

    smp.init()
    torch.manual_seed(0)  # the same weights on every rank
    model = make_model()
{divide}    model = smp.DistributedModel(model)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=args.learning_rate))
    loader = smp.data.DataLoader(make_data(), batch_size=args.batch_size, shuffle=True, drop_last=True)
{resume}
    device = smp.state.device
    for epoch in range(loader.epoch, args.epochs):
        loader.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = train_step(model, inputs.to(device), targets.to(device))
            optimizer.step()
        if smp.rank() == 0:
            print(f"epoch {{epoch}}: loss {{float(loss.reduce_mean()):.3f}}", flush=True)
{save}

if __name__ == "__main__":
    main()
"""

_DIVIDE = "    smp.set_tensor_parallelism(model)  # its supported modules are replaced when it is wrapped\n"

_RESUME = """\
    # Goes on from the newest checkpoint, at any degrees; saves every so many steps, and when the job is stopped.
    smp.auto_resume(model, optimizer, every=100)
"""

_SAVE_OWN = """
    weights = model.state_dict(gather_to_rank0=True)  # from all ranks that hold a part of the model
    if smp.rank() == 0:
        args.model_dir.mkdir(parents=True, exist_ok=True)
        torch.save(weights, args.model_dir / "model.pt")  # for make_model().load_state_dict(...) anywhere
    smp.barrier()
"""

_SAVE_TRANSFORMERS = """
    model.save_pretrained(args.model_dir)  # whole, for from_pretrained anywhere
"""


def script(answers: Answers) -> str:
    """Return the text of ``train.py``."""
    own = answers.model == "own"
    imports = (
        "from torch import nn\nfrom torch.nn.functional import cross_entropy"
        if own
        else "from transformers import LlamaConfig, LlamaForCausalLM"
    )
    head = _HEAD.format(
        what=MODELS[answers.model],
        how=STRATEGIES[answers.strategy].partition(":")[0],
        # In a docstring a backslash would be the beginning of something else.
        command=answers.command.replace(" \\\n  ", " "),
        imports=imports,
    )
    main = _MAIN.format(
        divide=_DIVIDE if answers.strategy == "tensor" else "",
        resume=_RESUME if answers.checkpoints else "",
        save=_SAVE_OWN if own else _SAVE_TRANSFORMERS,
    )
    return head + (_OWN_MODEL if own else _TRANSFORMERS_MODEL) + main
