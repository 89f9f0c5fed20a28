"""Communication hooks that send less, and hooks under sharded state, tensor and pipeline parallelism."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from smp_runtime.comm.collectives import TorchCollectives
from smp_runtime.data_parallel import gradient_compression as compression
from smp_runtime.errors import SMPUserError

WIDTH = 16


class CountingCollectives(TorchCollectives):
    """Counts the bytes that a rank sends, for algorithms that send no more than they must."""

    def __init__(self):
        self.sent = 0.0

    def all_to_all(self, received, sent, group):
        self.sent += sent.nbytes * (group.size() - 1) / group.size()
        return super().all_to_all(received, sent, group)

    def all_gather(self, full, shard, group):
        self.sent += shard.nbytes * (group.size() - 1)
        return super().all_gather(full, shard, group)


class OneBucket:
    """What a hook gets, of two parameters."""

    def __init__(self, parameters, gradients, group, collectives=None):
        self._parameters = parameters
        self._buffer = torch.cat([g.reshape(-1) for g in gradients])
        self.process_group = group
        self.collectives = collectives

    def buffer(self):
        return self._buffer

    def gradients(self):
        return [
            part.view(p.shape)
            for part, p in zip(self._buffer.split([p.numel() for p in self._parameters]), self._parameters, strict=True)
        ]

    def parameters(self):
        return self._parameters


def _averages(make, hook, steps, swap_at=None):
    """What a hook says of random gradients, and what it should say; with ``swap_at`` buckets are filled otherwise then."""
    import smdistributed.modelparallel.torch as smp

    parameters = [torch.zeros(40, 30), torch.zeros(7)]
    state, counter = make(), CountingCollectives()
    said, right = [], []
    for step in range(steps):
        if step == swap_at:
            parameters = parameters[::-1]
        drawn = [
            torch.randn(1207, generator=torch.Generator().manual_seed(100 * step + rank)) for rank in range(smp.size())
        ]
        parts = [[d[:1200], d[1200:]] if parameters[0].numel() == 1200 else [d[1200:], d[:1200]] for d in drawn]
        bucket = OneBucket(parameters, parts[smp.rank()], smp.get_dp_process_group(), counter)
        result = hook(state, bucket).wait()
        expected = torch.stack([torch.cat(p) for p in parts]).mean(0)
        order = slice(None) if parameters[0].numel() == 1200 else [*range(7, 1207), *range(7)]
        said.append(result[order])
        right.append(expected[order])
    return torch.stack(said), torch.stack(right), counter.sent / steps


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_int8_sends_a_quarter_and_makes_up_for_its_rounding(ranks, world):
    results = ranks(_averages, world, compression.Int8State, compression.int8_hook, 30, 3, config={"ddp": True})
    said, right, sent = results[0]
    for other, _, _ in results:
        assert torch.equal(other, said)  # or replicas would drift apart
    assert 0 < float((said - right).norm() / right.norm()) < 0.02
    # One byte of four and the scales; the least that an all-reduce of float32 sends.
    padded = -(-1207 // (256 * world)) * 256 * world
    assert sent == pytest.approx(2 * (world - 1) / world * padded * (1 + 4 / 256))
    # Errors of single steps do not add up: that of 30 steps together is as small as that of one.
    assert float((said.sum(0) - right.sum(0)).norm()) < 2 * float((said[0] - right[0]).norm())
    forgetful = ranks(_forgets, world, config={"ddp": True})[0]
    assert forgetful > 3 * float((said.sum(0) - right.sum(0)).norm())


def _forgets():
    said, right, _ = _averages(lambda: compression.Int8State(error_feedback=False), compression.int8_hook, 30)
    return float((said.sum(0) - right.sum(0)).norm())


def test_sparse_sends_what_matters_first_and_the_rest_later(ranks):
    def run():
        state = compression.SparseState(density=0.05, warm_up=(1.0, 0.5))
        said, right, _ = _averages(lambda: state, compression.sparse_hook, 12, 4)
        waiting = state.unsent.of(
            OneBucket(list(state.unsent._by_parameter), [torch.zeros(1200), torch.zeros(7)], None)
        )
        return said, right, waiting

    results = ranks(run, 2, config={"ddp": True})
    said, right, _ = results[0]
    assert torch.equal(said, results[1][0])
    torch.testing.assert_close(said[0], right[0])  # all of it, while it warms up
    sent = (said != 0).sum(1).tolist()
    assert 604 <= sent[1] <= 1207
    assert all(61 <= count <= 122 for count in sent[2:])
    # Nothing is lost: what was not sent is still there.
    waiting = torch.stack([unsent for _, _, unsent in results]).mean(0)
    torch.testing.assert_close(said.sum(0) + waiting, right.sum(0), atol=1e-5, rtol=1e-5)


def test_sparse_corrects_the_momentum(ranks):
    """With all elements sent, momentum begins anew each time; kept back, an element comes with the momentum it would have had."""

    def run():
        import smdistributed.modelparallel.torch as smp

        state, parameter = compression.SparseState(density=0.5, momentum=0.5), torch.zeros(2)
        said = []
        for _ in range(2):
            bucket = OneBucket([parameter], [torch.tensor([8.0, 1.0])], smp.get_dp_process_group())
            said.append(compression.sparse_hook(state, bucket).wait().tolist())
        bucket = OneBucket([parameter], [torch.tensor([0.0, 1.0])], smp.get_dp_process_group())
        return [*said, compression.sparse_hook(state, bucket).wait().tolist()]

    # The second element: velocities 1, 1.5, 1.75, sent together when the first has nothing new.
    assert ranks(run, 2, config={"ddp": True})[0] == [[8.0, 0.0], [8.0, 0.0], [0.0, 4.25]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("make", "hook"),
    [
        (compression.Int8State, compression.int8_hook),
        (lambda: compression.SparseState(density=0.1, momentum=0.5), compression.sparse_hook),
    ],
)
def test_an_overflow_is_heard_everywhere_and_forgotten(ranks, make, hook, bad):
    def run():
        import smdistributed.modelparallel.torch as smp

        state, parameter = make(), torch.zeros(600)
        said = []
        for step in range(3):
            gradient = torch.ones(600)
            if step == 1 and smp.rank() == 0:
                gradient[17] = bad
            bucket = OneBucket([parameter], [gradient], smp.get_dp_process_group())
            said.append(bool(hook(state, bucket).wait().isfinite().all()))
        return said

    assert ranks(run, 2, config={"ddp": True}) == [[True, False, True]] * 2


def _trained(make_hook):
    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    if smp.tp_size() > 1:
        smp.set_tensor_parallelism(model[1], True)
    model = smp.DistributedModel(model, bucket_cap_mb=2 * WIDTH * WIDTH * 4 / 2**20)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    if make_hook is not None:
        model.register_comm_hook(*make_hook())

    @smp.step
    def step(x):
        loss = (model(x) - x).square().mean()
        model.backward(loss)
        return loss

    position = smp.rdp_rank() if smp.state.cfg.prescaled_batch else smp.dp_rank()
    losses = []
    for number in range(4):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * number + position))
        optimizer.zero_grad()
        losses.append(float(step(x).reduce_mean()))
        optimizer.step()
    return losses, {name: value.float() for name, value in model.state_dict().items()}


def _exact():
    return compression.SparseState(density=1.0), compression.sparse_hook


def _int8():
    return compression.Int8State(), compression.int8_hook


#: Strategies under which gradients are averaged, or handed on, otherwise.
LAYOUTS = {
    "replicas": (2, {}),
    "sharded state": (2, {"shard_optimizer_state": True}),
    "sharded state, bf16": (2, {"shard_optimizer_state": True, "bf16": True}),
    "tensor": (4, {"tensor_parallel_degree": 2}),
    "tensor, one batch, sharded state": (
        4,
        {"tensor_parallel_degree": 2, "prescaled_batch": True, "shard_optimizer_state": True},
    ),
    "pipeline": (4, {"pipeline_parallel_degree": 2, "microbatches": 2}),
}
ALWAYS = {"sharded state", "tensor", "tensor, one batch, sharded state"}


@pytest.mark.parametrize("layout", [pytest.param(n, marks=[] if n in ALWAYS else pytest.mark.full) for n in LAYOUTS])
def test_a_hook_trains_as_no_hook_does(ranks, layout):
    world, config = LAYOUTS[layout]

    # A job each, since a pipeline has one model.
    results = [ranks(_trained, world, make, config={"ddp": True, **config}) for make in (None, _exact, _int8)]
    for plain, exact, rounded in zip(*results, strict=True):
        assert exact[0] == pytest.approx(plain[0], rel=1e-2 if "bf16" in config else 1e-5)
        assert rounded[0] == pytest.approx(plain[0], rel=2e-2)
        for name, value in plain[1].items():
            if "bf16" not in config:
                torch.testing.assert_close(exact[1][name], value, atol=1e-6, rtol=1e-5)
        assert any(not torch.equal(rounded[1][name], value) for name, value in plain[1].items())


def test_pytorchs_own_ddp_takes_the_hooks(ranks):
    def run():
        import smdistributed.modelparallel.torch as smp

        def gradients(hook, state):
            torch.manual_seed(0)
            network = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
            model = nn.parallel.DistributedDataParallel(network, bucket_cap_mb=0.001)
            if hook is not None:
                model.register_comm_hook(state, hook)
            found = []
            for step in range(3):  # DDP fills its buckets otherwise after the first
                x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * step + smp.rank()))
                model.zero_grad()
                model(x).square().mean().backward()
                found.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))
            return torch.stack(found)

        plain = gradients(None, None)
        exact = gradients(compression.sparse_hook, compression.SparseState(density=1.0))
        rounded = gradients(compression.int8_hook, compression.Int8State())
        torch.testing.assert_close(exact, plain)
        return float((rounded - plain).norm() / plain.norm())

    assert all(0 < error < 0.02 for error in ranks(run, 2, config={"ddp": True}))


def test_a_hook_of_torchs_over_other_ranks_is_refused(ranks):
    def run():
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        import smdistributed.modelparallel.torch as smp

        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        smp.set_tensor_parallelism(model[0], True)
        model = smp.DistributedModel(model)
        for group in (smp.get_dp_process_group(), None):
            with pytest.raises(SMPUserError, match=r"over the ranks \[0, 1\], but .* only the ranks \[[01]\]"):
                model.register_comm_hook(group, default_hooks.allreduce_hook)

    ranks(run, 2, config={"ddp": True, "tensor_parallel_degree": 2})


def test_shared_out_state_of_tensor_parallel_ranks_needs_a_common_batch(ranks):
    def run():
        import smdistributed.modelparallel.torch as smp

        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        smp.set_tensor_parallelism(model[0], True)
        with pytest.raises(SMPUserError, match='set "prescaled_batch": True'):
            smp.DistributedModel(model).register_comm_hook(*_int8())

    ranks(run, 4, config={"ddp": True, "tensor_parallel_degree": 2, "shard_optimizer_state": True})


def test_sharded_data_parallelism_has_no_whole_gradients(ranks):
    def run():
        import smdistributed.modelparallel.torch as smp

        with pytest.raises(SMPUserError, match="shards parameters too.*use shard_optimizer_state"):
            smp.DistributedModel(nn.Linear(2, 2)).register_comm_hook(*_int8())

    ranks(run, 2, config={"ddp": True, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0})


def test_a_bucket_of_nothing(solo):
    solo({})
    empty = OneBucket([torch.zeros(0)], [torch.zeros(0)], None)
    for state, hook in (_int8(), _exact()):
        state.peers = lambda bucket: (None, None)
        assert hook(state, empty).wait().shape == (0,)


@pytest.mark.parametrize("settings", [{"density": 0}, {"density": 1.5}, {"warm_up": [2]}, {"momentum": 1.0}])
def test_shares_that_cannot_be(settings):
    with pytest.raises(SMPUserError, match="it is the share of .*: use for example"):
        compression.SparseState(**settings)
