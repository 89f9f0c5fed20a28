"""What TRL's trainers need, without TRL: a reference model inside the trained one, and whole pairs in microbatches."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from smp_integrations.trainer_steps import ShortBatch
from smp_integrations.trl import add_reference

SHARDS = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 10, "sdp_gradient_clipping": 1e6}


class Net(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.drop, self.second = nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4)

    def forward(self, x):
        return self.second(self.drop(self.first(x)))


def _train(folder):
    policy, reference = Net(1), Net(2)
    add_reference(policy, reference)
    model = smp.DistributedModel(policy)
    model.train()
    policy.drop.eval()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(trained, lr=0.1))

    @smp.step
    def step(x):
        with torch.no_grad():
            wanted = reference(x)
        loss = (model(x) - wanted).pow(2).mean()
        model.backward(loss)
        return loss

    losses = []
    for number in range(3):
        if number == 2:
            smp.save_checkpoint(folder, tag="t", partial=True, model=model, optimizer=optimizer)
        optimizer.zero_grad()
        losses.append(float(step(_batch(number)).reduce_mean()))
        optimizer.step()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    smp.resume_from_checkpoint(folder, tag="t", partial=True)
    optimizer.zero_grad()
    again = float(step(_batch(2)).reduce_mean())
    model.load_state_dict(state)
    return losses, again, state, reference.training


def _batch(number):
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize("config", [{"pipeline_parallel_degree": 2, "microbatches": 2}, SHARDS], ids=["pp", "sdp"])
def test_a_reference_is_a_part_that_the_state_leaves_out(ranks, tmp_path, config):
    policy, reference = Net(1), Net(2).eval()
    policy.drop.eval()
    optimizer, expected = torch.optim.SGD(policy.parameters(), lr=0.1), []
    for number in range(3):
        optimizer.zero_grad()
        x = _batch(number)
        loss = (policy(x) - reference(x).detach()).pow(2).mean()
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    for losses, again, state, is_training in ranks(_train, 2, str(tmp_path), config={"ddp": True, **config}):
        assert losses == pytest.approx(expected, abs=1e-6)
        assert again == pytest.approx(expected[2], abs=1e-6)
        assert set(state) == set(policy.state_dict())
        assert not is_training


@pytest.mark.parametrize(("pairs", "count"), [(4, 2), (5, 2), (1, 3)])
def test_microbatches_have_whole_pairs(pairs, count):
    chosen = torch.arange(pairs)
    inputs = {"ids": torch.cat([chosen, 100 + chosen]), "reference": chosen, "scale": 2.0}
    batch = ShortBatch(inputs, pairs, by_samples=True, parts=2)
    seen, total = [], 0.0
    for index in range(count):
        found, weight = batch.smp_slice(count, index, 0)
        first, second = found["ids"].chunk(2)
        assert (second - first).tolist() == [100] * len(first)
        assert torch.equal(found["reference"], first)
        assert found["scale"] == 2.0
        if weight:
            seen += first.tolist()
        total += weight
    assert seen == list(range(pairs))
    assert total == pytest.approx(count)
