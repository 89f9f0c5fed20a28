"""A script that trains a small model of Transformers' families at any degrees: ``family_script.py FAMILY``."""

from __future__ import annotations

import sys

import torch

import smdistributed.modelparallel.torch as smp


@smp.step
def train_step(model, ids, labels):
    loss = model(input_ids=ids, labels=labels)["loss"]
    model.backward(loss)
    return loss


def main(family):
    from support.models.huggingface import tiny_model

    smp.init()
    torch.manual_seed(0)
    with smp.tensor_parallelism(smp.tp_size() > 1):
        module = tiny_model(family, 32)
    model = smp.DistributedModel(module.train())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    common = smp.state.cfg.prescaled_batch
    reader, readers = (smp.rdp_rank(), smp.rdp_size()) if common else (smp.dp_rank(), smp.dp_size())
    for number in range(100):
        ids = torch.randint(3, 32, (8, 9), generator=torch.Generator().manual_seed(number)).chunk(readers)[reader]
        optimizer.zero_grad()
        train_step(model, ids, ids)
        optimizer.step()


if __name__ == "__main__":
    main(sys.argv[1])
