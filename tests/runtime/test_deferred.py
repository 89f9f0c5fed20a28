"""Delayed initialisation: the same parameters, later."""

from __future__ import annotations

import pytest
import torch
import torch.nn.utils.prune
from support.models.models import TiedNet
from torch import nn
from torch.nn.init import dirac_, orthogonal_, sparse_, trunc_normal_  # by name, as most scripts have them

import smdistributed.modelparallel.torch as smp
from smp_runtime.errors import SMPUserError


class Various(nn.Module):
    """Buffers computed from others, constants, views, and initialisers that look at values."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)))
        self.register_buffer("frequencies", 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8)))
        self.register_buffer("constant", torch.tensor([1.0, 2.0]))
        self.truncated = nn.Parameter(torch.empty(3, 3))
        nn.init.trunc_normal_(self.truncated, std=0.1)
        self.part = nn.Parameter(torch.randn(4)[1:3])
        self.orthogonal = nn.Parameter(torch.empty(3, 3))
        nn.init.orthogonal_(self.orthogonal)
        # What PyTorch makes of these numbers itself, beside tensors that have no values yet.
        written = torch.randn(6)
        written[written.topk(2).indices] = 0
        written[torch.tensor([1, 4])] += 2.0
        self.register_buffer("written", torch.where(written > 0, written, 0.5))
        self.pruned = nn.utils.prune.l1_unstructured(nn.Linear(3, 4), "weight", amount=0.3)
        self.weight_normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4))
        self.norm = nn.BatchNorm2d(3)
        self.embedding = nn.Embedding(5, 2, padding_idx=0)
        self.lstm = nn.LSTM(3, 4)
        self.layer = nn.TransformerEncoderLayer(8, 2)


@pytest.mark.parametrize("make", [TiedNet, Various])
def test_parameters_are_bit_for_bit_those_of_an_immediate_creation(solo, make):
    solo({})
    torch.manual_seed(3)
    expected = make()
    torch.manual_seed(3)
    with smp.delay_param_initialization():
        module = make()
    assert {p.device.type for p in module.parameters()} == {"meta"}
    torch.randn(7)  # numbers drawn in between change nothing
    model = smp.DistributedModel(module)
    assert model.state_dict().keys() == expected.state_dict().keys()
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    if make is TiedNet:
        assert module.head.weight is module.embedding.weight


def _assign_data(module):
    module.weight.data = trunc_normal_(module.weight.data.to(torch.float64), std=0.1).to(module.weight.dtype)
    module.bias.data = module.weight.data.sum(1) * 0.5


def _assign_real_data(module):
    module.weight.data = GIVEN
    module.bias.data.copy_(GIVEN[:, 0])


def _initialise_by_name(module):
    trunc_normal_(module.weight, std=0.1)
    for initialise in (orthogonal_, lambda tensor: sparse_(tensor, 0.5), trunc_normal_):
        kept = module.weight.detach().clone()
        initialise(kept)
        module.register_buffer(f"buffer{len(module._buffers)}", kept)
    module.kernel = nn.Parameter(torch.empty(4, 2, 3))
    dirac_(module.kernel)


def _initialise_where_there_are_values(module):
    if module.weight.device.type != "meta" and not module.weight.is_meta and module.weight.is_cpu:
        nn.init.constant_(module.weight, 0.5)
    steps = torch.arange(4, device=module.bias.device, dtype=module.bias.dtype)
    with torch.no_grad():
        module.bias.copy_(torch.rand(4, device=module.weight.device) + steps)


def _move_where_it_is(module):
    module.weight.data.cpu().fill_(0.25)
    module.bias.data.to("cpu").to(module.weight.device).to(module.weight).mul_(2.0)


def _seed_inside(module):
    torch.manual_seed(11)
    nn.init.normal_(module.weight)
    module.bias.data.uniform_()
    torch.manual_seed(11)
    trunc_normal_(module.bias)


def _read_another(module):
    module.bias.data = module.weight.data.norm(dim=1)
    module.weight.data /= module.weight.data.abs().max()
    module.weight.data[1:3] = module.bias.data[:2, None]


GIVEN = torch.arange(8.0).view(4, 2)
INITIALISERS = (
    _assign_data,
    _assign_real_data,
    _initialise_by_name,
    _initialise_where_there_are_values,
    _move_where_it_is,
    _seed_inside,
    _read_another,
)


@pytest.mark.parametrize("initialise", INITIALISERS)
def test_initialisers_of_scripts_do_what_they_do_in_an_immediate_creation(solo, initialise):
    def make():
        module = nn.Linear(2, 4)
        initialise(module)
        return nn.Sequential(module, nn.Linear(4, 1))

    solo({})
    torch.manual_seed(3)
    expected, drawn = make(), torch.rand(1)
    torch.manual_seed(3)
    with smp.delay_param_initialization():
        module = make()
    assert {p.device.type for p in module.parameters()} == {"meta"}
    state = smp.DistributedModel(module).state_dict()
    for name, value in expected.state_dict().items():
        assert torch.equal(state[name], value), name
    assert torch.equal(torch.rand(1), drawn), "the script draws on from where the creation ended"
    assert torch.equal(GIVEN, torch.arange(8.0).view(4, 2))


def test_what_the_script_makes_on_the_meta_device_says_so(solo):
    solo({})
    with smp.delay_param_initialization():
        made = torch.empty(2, device="meta")
        assert (made + 1).is_meta
        assert not torch.empty(2).is_meta


def test_the_configuration_turns_it_on_and_replicas_agree(ranks):
    def run():
        import smdistributed.modelparallel.torch as smp

        torch.manual_seed(smp.rank())
        with smp.model_creation():
            module = TiedNet()
        assert module.norm.weight.device.type == "meta"
        return smp.DistributedModel(module).state_dict()

    first, second = ranks(run, 2, config={"ddp": True, "delayed_parameter_initialization": True})
    torch.manual_seed(0)
    for name, value in TiedNet().state_dict().items():
        assert torch.equal(first[name], value)
        assert torch.equal(second[name], value)


def test_disabled_it_does_nothing(solo):
    solo({})
    with smp.delay_param_initialization(enabled=False):
        assert nn.Linear(1, 1).weight.device.type == "cpu"


def test_a_constructor_that_reads_values_is_told_so(solo):
    solo({})
    with pytest.raises(SMPUserError, match="reads a tensor's value"), smp.delay_param_initialization():
        torch.ones(1).item()


def test_a_stage_creates_no_more_than_its_own_part(ranks):
    """The whole model never exists on a rank of a pipeline, neither when it is built nor when it is partitioned."""

    def run():
        from live_bytes import LiveBytes
        from support.training.pipeline_training import summing_step

        import smdistributed.modelparallel.torch as smp

        class Peak(LiveBytes):
            most = 0

            def _add(self, storage):
                if storage.device.type != "meta":
                    super()._add(storage)
                self.most = max(self.most, self.now)

        with smp.delay_param_initialization():
            module = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
        for index, layer in enumerate(module):
            smp.set_partition(layer, index // 4)
        model = smp.DistributedModel(module)
        with Peak() as peak:
            summing_step(model)(torch.ones(2, 256))
        own = list(model.local_parameters())
        return peak.most / module[0].weight.nbytes, len(own), all(bool(p.abs().sum() > 0) for p in own)

    for most, count, filled in ranks(run, 2, config={"partitions": 2, "microbatches": 2, "ddp": False}):
        assert count == 4
        assert filled
        assert most < 5.5, "its four matrices, the one that is being made, and activations"


class Angles(nn.Module):
    """Computes with whole numbers, of which PyTorch makes its default type."""

    def __init__(self):
        super().__init__()
        self.register_buffer("angles", torch.arange(8) / 7)
        former = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        self.register_buffer("coarse", torch.arange(8) / 7)
        torch.set_default_dtype(former)
        self.weight = nn.Parameter((torch.arange(8) / 3).sqrt())


def test_arithmetic_has_the_default_type_of_its_moment(solo):
    solo({"delayed_parameter_initialization": True})
    with smp.model_creation(dtype=torch.float64):
        late = Angles()
    found = smp.DistributedModel(late).state_dict()
    torch.set_default_dtype(torch.float64)
    try:
        expected = Angles().state_dict()
    finally:
        torch.set_default_dtype(torch.float32)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


class Reading(nn.Module):
    """Blocks that ask their tensors for a device and read values: of the batch, or of what parameters have computed."""

    def __init__(self, reads):
        super().__init__()
        self.reads = reads
        self.table = nn.Embedding(16, 8, dtype=torch.float64)
        self.blocks = nn.ModuleList(nn.Linear(8, 8, dtype=torch.float64) for _ in range(4))
        self.register_buffer("angles", torch.arange(8) / 8.0, persistent=False)

    def forward(self, ids, mask):
        hidden = self.table(ids)
        with torch.autocast(hidden.device.type, enabled=False):
            hidden = hidden + (self.angles * torch.arange(ids.shape[1], device=hidden.device)[:, None]).cos()
        if self.reads == "batch" and (mask.all() or bool((torch.arange(3, device=hidden.device) < 0).any())):
            raise AssertionError("the mask of every batch has a zero, and no position is negative")
        for block in self.blocks:
            hidden = block(hidden).tanh() * mask.to(hidden.device)[..., None]
            if self.reads == "hidden" and hidden.abs().max() > 100:
                hidden = hidden / 100
        return hidden.square().mean()


def _train_reading(reads):
    import logging

    import smdistributed.modelparallel.torch as smp

    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("smp").addHandler(handler)
    torch.manual_seed(0)
    with smp.delay_param_initialization():
        module = Reading(reads)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))

    @smp.step
    def step(ids, mask):
        loss = model(ids, mask)
        model.backward(loss)
        return loss

    losses = []
    for index in range(3):
        optimizer.zero_grad()
        losses.append(step(*_reading_batch(index)).reduce_mean().item())
        optimizer.step()
    logging.getLogger("smp").removeHandler(handler)
    return losses, any("as with skip_tracing" in sentence for sentence in said), len(list(model.local_parameters()))


def _reading_batch(index):
    ids = torch.randint(16, (4, 6), generator=torch.Generator().manual_seed(index))
    return ids, torch.arange(6).expand(4, 6) > 0


@pytest.mark.parametrize("reads", ["nothing", "batch", "hidden"])
def test_a_pipeline_of_late_parameters_is_traced_where_only_the_batch_is_read(ranks, reads):
    config = {"partitions": 2, "microbatches": 2, "ddp": False}
    first, second = ranks(_train_reading, 2, reads, config=config)
    torch.manual_seed(0)
    alone = Reading(reads)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.5)
    losses = []
    for index in range(3):
        optimizer.zero_grad()
        loss = alone(*_reading_batch(index))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert first[0] == pytest.approx(losses, rel=1e-9)
    assert second[0] == pytest.approx(losses, rel=1e-9)
    assert (first[1] or second[1]) == (reads == "hidden")
    assert min(first[2], second[2]) >= 1, "neither stage is without modules"
