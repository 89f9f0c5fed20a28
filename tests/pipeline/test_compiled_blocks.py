"""``"compile": true``: repeated blocks are compiled, each kind once, and train as they do eagerly."""

from __future__ import annotations

import copy
import pickle
import shutil

import pytest
import torch
from support.training.closeness import close
from torch import nn

from smp_runtime.microbatch_state.compiled_blocks import BlockClass, CompiledForward, is_compiled, run_eagerly


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return torch.nn.functional.linear(x, self.table.weight)


def network():
    torch.manual_seed(4)
    return Net()


IDS = torch.randint(11, (8, 5), generator=torch.Generator().manual_seed(1))
STEPS = 6


def loss_of(output, ids):
    return torch.nn.functional.cross_entropy(output.flatten(0, 1), ids.roll(1, 1).flatten())


def alone():
    model, losses = network(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model(IDS), IDS)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def trained(backend):
    from torch._dynamo.utils import counters

    import smdistributed.modelparallel.torch as smp

    model = smp.DistributedModel(network())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    counters.clear()

    @smp.step
    def step(ids):
        loss = loss_of(model(ids), ids)
        model.backward(loss)
        return loss

    each = IDS.chunk(smp.dp_size())[smp.dp_rank()]
    losses, after_three = [], {}
    for number in range(STEPS):
        optimizer.zero_grad()
        losses.append(step(each).reduce_mean().item())
        optimizer.step()
        if number == 2:
            after_three = dict(counters["stats"])
    blocks = [path for path, module in model.module.named_modules() if is_compiled(module)]
    return {
        "losses": losses,
        "state": model.state_dict(),
        "blocks": blocks,
        "stats": [after_three, dict(counters["stats"])],
        "breaks": dict(counters["graph_break"]),
    }


def _trained(*args):
    return trained(*args)


#: Everything is sharded; with a threshold of 10 norms and biases stay whole.
SHARDED = {
    "ddp": True,
    "sharded_data_parallel_degree": 2,
    "sdp_param_persistence_threshold": 1,
    "sdp_gradient_clipping": 1e9,
}
#: Degrees, and what is compiled with.
PAIRS = [
    ({"pipeline_parallel_degree": 2, "microbatches": 2}, "aot_eager"),
    ({"ddp": True, "microbatches": 2}, "aot_eager"),
    ({"pipeline_parallel_degree": 2, "microbatches": 2, "pipeline": "zero_bubble"}, "aot_eager"),
    ({"pipeline_parallel_degree": 2, "microbatches": 2}, "inductor"),
    ({"ddp": True, "shard_optimizer_state": True}, "inductor"),
    ({**SHARDED, "microbatches": 2}, "aot_eager"),
    ({**SHARDED, "sdp_param_persistence_threshold": 10}, "inductor"),
]


@pytest.mark.parametrize(
    ("degrees", "backend"),
    [
        pytest.param(
            degrees, backend, marks=pytest.mark.full, id=f"{number}-{backend}"
        )  # the compiler alone takes 20 s to load
        for number, (degrees, backend) in enumerate(PAIRS)
    ],
)
def test_compiled_blocks_train_as_eager_ones(ranks, degrees, backend):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor compiles with g++, which is not here")
    losses, state = alone()
    config = {**degrees, "compile": True, "compile_backend": backend}
    results = ranks(_trained, 2, backend, config=config, timeout=300)
    spread = len(results) if degrees.get("pipeline_parallel_degree") else 1
    assert sorted({path for result in results for path in result["blocks"]}) == [f"blocks.{i}" for i in range(4)]
    assert sum(len(result["blocks"]) for result in results) == 4 * len(results) // spread
    for result in results:
        assert not result["breaks"]
        # One graph for all blocks of the rank, and none more once training is under way.
        assert result["stats"][0]["unique_graphs"] == result["stats"][1]["unique_graphs"] == 1
    if spread > 1:
        assert results[0]["losses"] == pytest.approx(losses, rel=1e-5)
    for name, value in state.items():
        close(results[0]["state"][name], value, name, 1e-4)


def _sharded(most, register):
    """Where blocks keep their hooks, what is said, and what a forward pass gathers."""
    import logging

    import smdistributed.modelparallel.torch as smp

    heard = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("smp").addHandler(handler)
    net = network()
    if register:
        smp.register_parameter(net.blocks[1].norm, net.table.weight)
    model = smp.DistributedModel(net)
    logging.getLogger("smp").removeHandler(handler)
    blocks = model.module.blocks
    compiled = [isinstance(vars(block).get("forward"), CompiledForward) for block in blocks]
    hooked = [[bool(part._forward_pre_hooks) for part in block.modules()] for block in blocks]
    kinds = {type(part._parameters) for block in blocks for part in block.modules() if part._parameters}
    with torch.no_grad():
        for block in blocks:  # by what they do when nothing is compiled
            vars(block).pop("forward", None)
        out = model(IDS)
    gathered = model.shards.scheduler.gathers
    return compiled, hooked, dict in kinds, [line for line in heard if "eagerly" in line], gathered, out


@pytest.mark.parametrize(("most", "register"), [(10**6, False), (10**6, True), (100, False)])
def test_a_block_that_is_gathered_as_one_has_nothing_inside_that_interrupts_it(ranks, most, register):
    config = {**SHARDED, "sdp_max_live_parameters": most, "compile": True, "compile_backend": "aot_eager"}
    whole = [most > 100 and not (register and number == 1) for number in range(4)]
    with torch.no_grad():
        expected = network()(IDS)
    found = ranks(_sharded, 2, most, register, config=config)
    assert not found[1][3]  # one rank of the host says it
    for compiled, hooked, is_plain, _, gathered, out in found:
        assert compiled == whole
        assert is_plain == any(whole)
        for inside, one in zip(hooked, whole, strict=True):
            assert inside == ([True] + [False] * (len(inside) - 1) if one else [True] * len(inside))
        assert gathered >= 5
        torch.testing.assert_close(out, expected)
    if all(whole):
        assert not found[0][3]
    else:
        (line,) = found[0][3]
        assert ("1 of 4 blocks (blocks.1" in line) == register
        assert ("smp.register_parameter" if register else "half of sdp_max_live_parameters") in line


def test_what_cannot_be_compiled_runs_eagerly_and_says_why(solo, caplog):
    import torch._dynamo

    import smdistributed.modelparallel.torch as smp

    @torch._dynamo.register_backend(name="no_such_compiler")
    def no_such_compiler(graph, inputs):
        raise RuntimeError("no compiler on this machine")

    solo({"compile": True, "compile_backend": "no_such_compiler"})
    model, eager = smp.DistributedModel(network()), network()
    with caplog.at_level("WARNING", logger="smp"):
        close(model(IDS), eager(IDS), "outputs")
    said = [record.getMessage() for record in caplog.records if "run eagerly" in record.getMessage()]
    (line,) = said  # one for the kind
    assert "'blocks.0'" in line
    assert "no compiler on this machine" in line
    close(model(IDS), eager(IDS), "outputs")


def _graphs(model, batches):
    """How many graphs there are after each of the batches."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()  # what other tests have compiled in this process
    counters.clear()
    found = []
    for rows in batches:
        model(IDS[:rows]).sum().backward()
        found.append(counters["stats"]["unique_graphs"])
    return found


def test_another_batch_size_costs_one_graph_and_no_further_ones(solo):
    import smdistributed.modelparallel.torch as smp

    solo({"compile": True, "compile_backend": "eager"})
    assert _graphs(smp.DistributedModel(network()), (8, 8, 3, 8, 5, 6, 7)) == [1, 1, 2, 2, 2, 2, 2]


def test_a_script_names_what_is_compiled(solo):
    import smdistributed.modelparallel.torch as smp

    solo()
    net, eager = network(), network()
    smp.compile(net.blocks[1], backend="eager")
    smp.compile(nn.ModuleList([net.blocks[3].norm]), backend="eager")
    model = smp.DistributedModel(net)
    assert [path for path, part in model.module.named_modules() if is_compiled(part)] == ["blocks.1", "blocks.3.norm"]
    assert list(model.state_dict()) == list(eager.state_dict())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in eager.named_parameters()]
    assert _graphs(model, (8, 8)) == [2, 2]
    close(model(IDS), eager(IDS), "outputs")
    with pytest.raises(ValueError, match="wrapped already"):
        smp.compile(model.module.blocks[0])
    with pytest.raises(ValueError, match="pass a module"):
        smp.compile(net.forward)


def test_a_block_with_a_checkpointed_module_inside_runs_eagerly_and_a_checkpointed_block_does_not(solo, caplog):
    import smdistributed.modelparallel.torch as smp

    solo({"compile": True, "compile_backend": "eager"})
    model = smp.DistributedModel(network())
    for block in model.module.blocks:
        smp.set_activation_checkpointing(block)
    assert _graphs(model, (8, 8)) == [1, 1]
    model = smp.DistributedModel(network())
    smp.set_activation_checkpointing(model.module.blocks[0].up)
    with caplog.at_level("WARNING", logger="smp"):
        assert _graphs(model, (8, 8)) == [0, 0]
    (line,) = [record.getMessage() for record in caplog.records if "run eagerly" in record.getMessage()]
    assert "its Linear is checkpointed by itself" in line


def test_generation_does_not_compile(solo):
    import smdistributed.modelparallel.torch as smp

    solo({"compile": True, "compile_backend": "eager"})
    model = smp.DistributedModel(network())
    with run_eagerly():
        assert _graphs(model, (8, 4)) == [0, 0]
    assert _graphs(model, (8,)) == [1]


def _goes_on(folder, compiles, changed):
    """Losses of two updates, of one after other degrees (or of a job that goes on from a checkpoint), and what is compiled then."""
    import smdistributed.modelparallel.torch as smp

    model = smp.DistributedModel(network())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    @smp.step
    def step(ids):
        loss = loss_of(model(ids), ids)
        model.backward(loss)
        return loss

    def update():
        optimizer.zero_grad()
        mean = step(IDS.chunk(smp.dp_size())[smp.dp_rank()]).reduce_mean().item()
        optimizer.step()
        return sum(smp.allgather(mean, smp.DP_GROUP)) / smp.dp_size()

    if not compiles:
        smp.resume_from_checkpoint(folder, tag="two", partial=False)
        return [update()], []
    smp.record_numerics(f"{folder}/numbers")
    losses = [update(), update()]
    smp.save_checkpoint(folder, tag="two", partial=False, model=model, optimizer=optimizer)
    smp.reshape(changed)
    losses.append(update())
    return losses, [path for path, part in model.module.named_modules() if is_compiled(part)]


@pytest.mark.full
def test_a_compiled_job_records_saves_and_goes_over_to_other_degrees(ranks, tmp_path):
    compiles = {"compile": True, "compile_backend": "aot_eager", "ddp": True}
    losses, _ = alone()
    changed = {
        **compiles,
        "pipeline_parallel_degree": 1,
        "microbatches": 1,
        "sharded_data_parallel_degree": 2,
        "sdp_param_persistence_threshold": 1,
    }
    changed |= {"sdp_gradient_clipping": 1e9}
    before = {**compiles, "pipeline_parallel_degree": 2, "microbatches": 2}
    for found, blocks in ranks(_goes_on, 2, str(tmp_path), True, changed, config=before, timeout=300):
        assert found == pytest.approx(losses[:3], rel=1e-5)
        assert blocks == [f"blocks.{i}" for i in range(4)]
    for found, _ in ranks(_goes_on, 2, str(tmp_path), False, None, config={"ddp": True}, timeout=300):
        assert found == pytest.approx(losses[2:3], rel=1e-5)


def test_copies_and_pickles_of_compiled_blocks_have_their_own_forward():
    block, x = Block(), torch.ones(2, 8)
    block.__dict__["forward"] = CompiledForward(block, "blocks.0", BlockClass(Block, "forward", "eager", tells=True))
    expected = Block.forward(block, x)
    for other in (copy.deepcopy(nn.Sequential(block))[0], copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        with torch.no_grad():
            other.down.weight.zero_()
            other.down.bias.zero_()
        torch.testing.assert_close(other(x), x)
    close(block(x), expected, "outputs of the original")
