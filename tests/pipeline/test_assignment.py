"""Assignments as files and checks, and the stages that a script sets by hand."""

from __future__ import annotations

import copy
import json
import pickle
import threading

import pytest
import torch
from support.models.models import TiedNet
from torch import nn

from smp_runtime.errors import SMPUserError
from smp_runtime.pipeline.partition.assignment import Assignment, check_together
from smp_runtime.pipeline.partition.manual_stages import ManualAssignment
from smp_runtime.pipeline.partition.module_tree import tree_without_tracing
from smp_runtime.pipeline.partition.partitioner import partition
from smp_runtime.pipeline.partition.tracing import trace


class Shared(nn.Module):
    """One layer under two names."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.two = nn.Linear(4, 4)
        self.again = self.one

    def forward(self, x):
        return self.again(self.two(self.one(x)))


# -- files ---------------------------------------------------------------------------------------------------------


def test_a_file_gives_the_assignment_back(tmp_path):
    model = TiedNet(4)
    assignment = partition(tree_without_tracing(model), 2)
    assignment.save(tmp_path / "partition.json")
    loaded = Assignment.load(tmp_path / "partition.json")
    assert loaded == assignment
    assert hash(loaded) == hash(assignment)
    loaded.check(model, 2)
    assert json.loads((tmp_path / "partition.json").read_text())["stages"] == 2
    assert sorted(loaded.paths(0) + loaded.paths(1)) == sorted(name for name, _ in model.named_modules())
    assert repr(loaded).startswith("Assignment(2 stages with ")


def test_all_names_of_a_module_are_on_one_stage():
    model = Shared()
    assignment = partition(tree_without_tracing(model), 2)
    assert assignment.stage_of("one") == assignment.stage_of("again")
    apart = {**assignment.to_dict()["modules"], "again": 1 - assignment.stage_of("one")}
    with pytest.raises(SMPUserError, match="'one' and 'again' are one module, but the partition has them on stages"):
        Assignment(2, apart).check(model, 2)


def test_an_assignment_of_another_model_is_refused():
    assignment = partition(tree_without_tracing(TiedNet(2)), 2)
    with pytest.raises(SMPUserError, match=r"model of 10 modules: it lacks 'layers.2', 'layers.3'; load"):
        assignment.check(TiedNet(4), 2)
    with pytest.raises(SMPUserError, match=r"has 'layers.1', which the model has not"):
        assignment.check(TiedNet(1), 2)
    with pytest.raises(SMPUserError, match="for 2 stages, but pipeline_parallel_degree is 4; set it to 2"):
        assignment.check(TiedNet(2), 4)


def test_an_assignment_that_parts_shared_parameters_is_refused():
    model = TiedNet(2)
    modules = {name: 0 for name, _ in model.named_modules()} | {"head": 1}
    with pytest.raises(SMPUserError, match="'embedding' on stage 0 and module 'head' on stage 1 hold or use"):
        Assignment(2, modules).check(model, 2)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([1], "this is a list"),
        ({"modules": {}}, r"the keys \['modules'\]"),
        ({"format": 9, "stages": 2, "modules": {"": 0}}, "format 9, and this version reads format 1"),
        ({"stages": "2", "modules": {"": 0}}, "no whole numbers"),
        ({"stages": 2, "modules": {"": True}}, "no whole numbers"),
        ({"stages": 2, "modules": {"": 2}}, "partition 2, but there are 2 stages, 0 to 1"),
        ({"stages": 2, "modules": {"a": 0}}, "not the model itself"),
    ],
)
def test_what_is_no_assignment(data, message):
    with pytest.raises(SMPUserError, match=message):
        Assignment.from_dict(data)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(SMPUserError, match=r"cannot be read \(No such file"):
        Assignment.load(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(SMPUserError, match="is no JSON"):
        Assignment.load(tmp_path / "bad.json")


def test_an_unknown_path_names_the_nearest():
    with pytest.raises(SMPUserError, match="no module 'hed', did you mean 'head'"):
        partition(tree_without_tracing(TiedNet()), 2).stage_of("hed")


# -- by hand -------------------------------------------------------------------------------------------------------


def test_contexts_while_building():
    manual = ManualAssignment(3, default=2)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            with manual.partition(0):
                self.a = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
                with manual.partition(1):
                    self.b = nn.Linear(2, 2)
                self.c = nn.Linear(2, 2)
            self.d = nn.Linear(2, 2)

    before = nn.Module.__init__, nn.Module.__setstate__
    model = Net()
    assert (nn.Module.__init__, nn.Module.__setstate__) == before
    assignment = manual.resolve(model)
    assert [assignment.stage_of(path) for path in ("", "a", "a.0", "a.1", "b", "c", "d")] == [2, 0, 0, 0, 1, 0, 2]
    assert manual.used_contexts


def test_a_module_made_outside_is_not_caught_and_copies_are():
    manual = ManualAssignment(3, default=2)
    outside = nn.Linear(2, 2)
    layer = nn.TransformerEncoderLayer(8, 2, 8)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            with manual.partition(0):
                self.outside = outside
                self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            with manual.partition(1):
                self.loaded = pickle.loads(pickle.dumps(outside))

    assignment = manual.resolve(copy.deepcopy(Net()))
    assert assignment.stage_of("outside") == 2
    assert assignment.stage_of("encoder.layers.1.linear1") == 0
    assert assignment.stage_of("loaded") == 1


def test_a_context_ends_with_an_error_inside():
    manual = ManualAssignment(2)
    before = nn.Module.__init__
    with pytest.raises(RuntimeError, match="stop"), manual.partition(1):
        raise RuntimeError("stop")
    assert nn.Module.__init__ is before
    assert manual.resolve(nn.Linear(2, 2)).root_stage == 0


def test_contexts_of_threads_are_their_own():
    manual = ManualAssignment(3, default=2)
    before = nn.Module.__init__, nn.Module.__setstate__
    entered, leave, made = threading.Event(), threading.Event(), {}

    def elsewhere():
        made["before"] = nn.Linear(2, 2)
        with manual.partition(1):
            made["inside"] = nn.Linear(2, 2)
            entered.set()
            leave.wait(60)
            made["after"] = nn.Linear(2, 2)

    with manual.partition(0):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        assert entered.wait(60)
        made["here"] = nn.Linear(2, 2)
    made["outside"] = nn.Linear(2, 2)
    leave.set()
    thread.join()
    assert (nn.Module.__init__, nn.Module.__setstate__) == before
    stages = {name: manual.resolve(module).root_stage for name, module in made.items()}
    assert stages == {"before": 2, "inside": 1, "after": 1, "here": 0, "outside": 2}


def test_what_other_libraries_put_over_a_context_stays(monkeypatch):
    manual = ManualAssignment(2)
    seen = []
    with manual.partition(1):
        found = nn.Module.__init__

        def counting(module, *args, **kwargs):
            seen.append(module)
            found(module, *args, **kwargs)

        monkeypatch.setattr(nn.Module, "__init__", counting)
        inside = nn.Linear(2, 2)
    outside = nn.Linear(2, 2)
    assert seen == [inside, outside]
    assert [manual.resolve(module).root_stage for module in (inside, outside)] == [1, 0]


def test_set_partition_counts_for_all_inside_but_those_set_themselves():
    manual = ManualAssignment(4, default=3)
    with manual.partition(0):
        model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))), nn.Linear(2, 2))
    manual.set_partition(model[0][1], 2)
    manual.set_partition(model[0], 1)
    assignment = manual.resolve(model)
    assert [assignment.stage_of(path) for path in ("", "0", "0.0", "0.1", "0.1.0", "1")] == [0, 1, 1, 2, 2, 0]
    assert manual.pins(model) == {"0": 1, "0.1": 2}
    assert list(model.state_dict()) == ["0.0.weight", "0.0.bias", "0.1.0.weight", "0.1.0.bias", "1.weight", "1.bias"]


def test_pins_reach_the_automatic_partition():
    manual = ManualAssignment(2, automatic=True)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    manual.set_partition(model[0], 1)
    assert partition(tree_without_tracing(model), 2, pinned=manual.pins(model)).stage_of("0") == 1


def test_shared_parameters_must_not_be_set_apart():
    manual = ManualAssignment(2)
    model = TiedNet()
    manual.set_partition(model.head, 1)
    message = (
        "module 'embedding' on stage 0 and module 'head' on stage 1 hold or use the same parameter embedding.weight, so "
        "they must be on one stage; set module 'head' to partition 0, or module 'embedding' to 1"
    )
    with pytest.raises(SMPUserError) as caught:
        manual.resolve(model)
    assert str(caught.value) == message


def test_a_parameter_that_is_used_from_afar_is_found_with_a_trace():
    class Borrows(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return nn.functional.linear(x, self.inner.weight)

    manual = ManualAssignment(2)
    model = Borrows()
    manual.set_partition(model.inner, 1)
    manual.resolve(model)
    found = trace(model, lambda: model(torch.zeros(1, 4)), device="cpu")
    with pytest.raises(SMPUserError, match="'inner' on stage 1 and the model itself on stage 0 hold or use"):
        manual.resolve(model, found)
    with pytest.raises(SMPUserError, match=r"inner\.weight"):
        check_together(Assignment(2, {"": 0, "inner": 1}), found)


@pytest.mark.parametrize("stage", [-1, 2, True, "1"])
def test_stages_that_do_not_exist(stage):
    manual = ManualAssignment(2)
    with pytest.raises(SMPUserError, match="smp.set_partition got"):
        manual.set_partition(nn.Linear(2, 2), stage)
    with pytest.raises(SMPUserError, match="smp.partition got"), manual.partition(stage):
        pass


def test_set_partition_takes_modules():
    with pytest.raises(SMPUserError, match="got a list; pass a module"):
        ManualAssignment(2).set_partition([], 0)
