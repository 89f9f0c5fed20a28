"""A stage that does not fit, and one that has nothing to do, are found and named with their modules before any launch."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from smp_estimator.planning import Verdict
from smp_estimator.rehearsal import rehearse
from smp_tools.rehearsal.module_inventory import ModuleInventory
from tests.rehearsal.test_command import GIB, kind, rehearsed

SCRIPT = Path(__file__).with_name("stages_script.py")
FOUR = {"ddp": True, "pipeline_parallel_degree": 4, "microbatches": 4, "auto_partition": False, "default_partition": 0}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 2, bias=False)
        self.two_again = self.two


def looked(called, stage_of=None, stage=0, trained=()):
    model = Model()
    for name in trained:
        model.get_submodule(name).weight.grad = torch.zeros(2, 4)
    assignment = None if stage_of is None else SimpleNamespace(stage_of=stage_of)
    found = ModuleInventory()
    found.look([SimpleNamespace(module=model, assignment=assignment)], stage, called)
    return found


def test_what_no_step_calls_is_told_with_its_parameters():
    found = looked({"", "one", "one.0"})
    assert (found.parameters, found.idle_parameters) == (28, 8)
    assert (found.modules, found.idle_modules) == (["one", "two"], ["two"])
    assert looked({"", "one"}).idle_modules == ["one.0", "two"]
    assert looked({""}).idle_modules == ["one", "two"]


def test_a_module_whose_weights_have_gradients_is_used_without_a_call():
    assert looked({"", "one", "one.0"}, trained=("two",)).idle_parameters == 0


def test_of_another_stage_nothing_is_held():
    found = looked({"one.0"}, lambda path: 1 if path.startswith("one") else 0, 1)
    assert (found.parameters, found.modules, found.idle_modules) == (20, ["one"], [])


def test_parts_of_sharded_parameters_count():
    model = nn.Linear(4, 4, bias=False)
    model.weight.ds_tensor = torch.zeros(8)
    found = ModuleInventory()
    found.look([SimpleNamespace(module=model, assignment=None)], 0, set())
    assert found.parameters == 8


def test_an_unused_stage_is_told_with_its_modules():
    words = [f"parts.{number}" for number in range(7)]
    found = rehearsed(
        kind(0, GIB, idle_modules=["head"], idle_parameters=3),
        kind(1, GIB, idle_modules=["parts.2"], idle_parameters=10),
        kind(2, GIB, parameters=0, modules=words),
    )
    assert [one.stage for one in found.unused] == [1, 2]
    text = " ".join(str(found).split())
    assert "stage 1 holds parts.2, which no step calls, and nothing else with parameters" in text
    assert "stage 2 holds no parameters, only parts.0, parts.1, parts.2, parts.3 and 3 more" in text
    assert "no step calls head of stage 0 (3 parameters)" in text


@pytest.mark.full
@pytest.mark.job
@pytest.mark.timeout(180)
def test_memory_that_only_the_last_stage_lacks_is_found_with_its_module():
    found = rehearse(SCRIPT, ["--wide", "3"], parameters=FOUR, gpu_memory_bytes=2 * 2**20, other_ranks=False)
    assert found.verdict is Verdict.DOES_NOT_FIT
    verdicts = [found.verdict_of(one) for one in found.rehearsal.kinds]
    assert verdicts == [Verdict.FITS] * 3 + [Verdict.DOES_NOT_FIT]
    assert found.fullest.holders[0].bytes > 2**20
    assert all(holder.module.startswith("parts.3") for holder in found.fullest.holders if holder.kind == "activation")
    assert found.unused == []


@pytest.mark.full
@pytest.mark.job
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("words", "stage", "said"),
    [
        (["--empty", "2"], 2, "stage 2 holds no parameters, only parts.2"),
        (["--left-out", "1"], 1, "stage 1 holds parts.1, which no step calls"),
    ],
)
def test_a_stage_without_work_is_found_with_its_modules(words, stage, said):
    found = rehearse(SCRIPT, words, parameters=FOUR, other_ranks=False)
    assert [one.stage for one in found.unused] == [stage]
    assert said in " ".join(str(found).split())
