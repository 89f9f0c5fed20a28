"""Errors in a pipeline: told on every rank with their origin, and the job goes on."""

from __future__ import annotations

import time

import pytest


def _errors(what):
    """A step that fails, between two good ones; returns what the rank saw."""
    import threading

    import torch
    from support.models.pipeline_models import WIDTH, numbers
    from torch import nn

    import smdistributed.modelparallel.torch as smp

    class Layer(nn.Module):
        def __init__(self, number):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.number = number
            self.fails = None

        def forward(self, x, extra=None):
            if self.fails == "raises" and self.number == 2:
                raise KeyError("no such token: 17")
            if self.fails == "late" and self.number == 2:
                return Late.apply(self.linear(x))
            if self.fails == "shape" and self.number == 2:
                x = x[:, :-1]
            return torch.tanh(self.linear(x))

    class Late(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ArithmeticError("the gradient overflows")

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer(number) for number in range(4))

        def forward(self, x, extra=None):
            for layer in self.layers:
                x = layer(x, extra)
            return x

    torch.manual_seed(0)
    net = Net()
    for number, layer in enumerate(net.layers):
        smp.set_partition(layer, number % smp.pp_size())
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))

    @smp.step
    def train(x, y, failing=None, batches=0):
        if failing == "step function":
            raise LookupError("the script's own error")
        loss = (model(x, threading.Lock() if failing == "pickle" else None) - y).square().mean()
        model.backward(loss)
        if failing == "twice":
            model.backward(loss)
        return loss

    def good(number):
        optimizer.zero_grad()
        loss = float(train(*numbers(number, 8)).reduce_mean())
        optimizer.step()
        return loss

    seen = {"losses": [good(0)]}
    for failing in what:
        for layer in net.layers:
            layer.fails = failing
        began = time.monotonic()
        optimizer.zero_grad()
        try:
            if failing == "outside":
                model(numbers(0, 8)[0])
            elif failing == "backward outside":
                model.backward(torch.ones((), requires_grad=True))
            elif failing == "divides":
                train(*numbers(1, 7))
            else:
                train(*numbers(1, 8), failing)
        except Exception as error:
            seen[failing] = (type(error).__name__, str(error), time.monotonic() - began, isinstance(error, ValueError))
        for layer in net.layers:
            layer.fails = None
        seen["losses"].append(good(1))
    seen["losses"] += [good(number) for number in range(2, 7)]
    seen["threads"] = threading.active_count()
    return seen


FAILURES = ["raises", "late", "shape", "step function", "pickle", "twice", "outside", "backward outside", "divides"]


@pytest.fixture(scope="module")
def failures(_shared_pool):
    """All failures, one after the other in one job of four stages."""
    settings = {"partitions": 4, "microbatches": 2, "auto_partition": False, "default_partition": 0}
    return _shared_pool.run(_errors, 4, FAILURES, config=settings, timeout=200)


def test_every_failure_reaches_every_rank_long_before_the_timeout_and_the_job_goes_on(failures):
    for seen in failures:
        assert seen.keys() >= set(FAILURES)
        assert all(seen[failure][2] < 20 for failure in FAILURES)
        assert seen["losses"] == failures[0]["losses"]
        # The batch of the steps after each failure is the same one, so the loss must fall.
        losses = seen["losses"][1 : len(FAILURES) + 1]
        assert losses == sorted(losses, reverse=True)


def test_an_exception_in_a_remote_module_carries_rank_module_and_traceback(failures):
    for seen in failures:
        kind, text, _, _ = seen["raises"]
        assert kind == "StageError"
        assert "pipeline stage 2 (rank 2), module 'layers.2': KeyError: 'no such token: 17'" in text
        assert "Traceback of rank 2" in text
        assert 'raise KeyError("no such token: 17")' in text


def test_an_exception_in_a_backward_pass_carries_rank_and_module(failures):
    for seen in failures:
        kind, text, _, _ = seen["late"]
        assert kind == "StageError"
        assert "pipeline stage 2 (rank 2), module 'layers.2': ArithmeticError: the gradient overflows" in text


def test_a_wrong_shape_is_told_with_the_module_that_got_it(failures):
    for seen in failures:
        said = seen["shape"][1].replace("RuntimeError: addmm: ", "RuntimeError: ")  # PyTorch 2.15 names the operation
        assert "module 'layers.2': RuntimeError: mat1 and mat2 shapes cannot be multiplied" in said


def test_an_exception_in_the_step_function_stays_itself_where_the_script_runs(failures):
    assert failures[0]["step function"][:2] == ("LookupError", "the script's own error")
    for seen in failures[1:]:
        kind, text, _, _ = seen["step function"]
        assert kind == "StageError"
        assert "pipeline stage 0 (rank 0), the step function: LookupError: the script's own error" in text


def test_an_argument_that_cannot_travel_is_named(failures):
    for seen in failures:
        text = seen["pickle"][1]
        assert "lock" in text
        assert "cannot travel to another stage" in text


def test_backward_twice_says_what_to_do(failures):
    for seen in failures:
        text = seen["twice"][1]
        assert "second time" in text


def test_calls_outside_a_step_say_what_to_do(failures):
    for seen in failures:
        assert seen["outside"][0] == "SMPUserError"
        assert "decorated with smp.step" in seen["outside"][1]
        assert seen["backward outside"][0] == "SMPUserError"
        assert "decorated with smp.step" in seen["backward outside"][1]


def test_a_batch_that_does_not_divide_is_a_value_error_on_every_rank(failures):
    for seen in failures:
        _, text, _, is_value_error = seen["divides"]
        assert is_value_error
        assert "7" in text
        assert "2 microbatches" in text


def _idle_stage():
    import torch
    from torch import nn

    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(0)  # else the first loss may be next to nothing
    model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))

    @smp.step
    def train(x):
        loss = model(x).square().sum()
        model.backward(loss)
        return loss

    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        losses.append(float(train(torch.ones(4, 4)).reduce_mean()))
        optimizer.step()
    return losses, len(list(model.local_parameters()))


def test_a_stage_without_modules_takes_part(ranks):
    settings = {"partitions": 2, "auto_partition": False, "default_partition": 0, "microbatches": 2}
    (losses, here), (theirs, there) = ranks(_idle_stage, 2, config=settings, timeout=120)
    assert losses == theirs
    assert losses[-1] < losses[0]
    assert (here, there) == (4, 0)


def _shape_mismatch():
    """A loss that fails in the step function, which runs on the last rank; what its exception would tell the launcher."""
    import traceback

    import torch
    from torch import nn

    import smdistributed.modelparallel.torch as smp

    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    smp.set_partition(net[0], 0)
    model = smp.DistributedModel(net)
    criterion = nn.CrossEntropyLoss()

    @smp.step(non_split_inputs=["y"])
    def train(x, y):
        logits = model(x)
        loss = criterion(logits, y)
        model.backward(loss)
        return loss

    train(torch.ones(8, 4), torch.zeros(4, dtype=torch.long))
    try:
        train(torch.ones(8, 4), torch.zeros(3, dtype=torch.long))
    except Exception as error:
        failure = getattr(error, "failure", None)
        told = failure.model_dump() if failure is not None else {}
        return type(error).__name__, str(error), told, "".join(traceback.format_exception(error))
    return None


def test_ranks_that_only_heard_of_an_error_carry_the_one_that_was_raised(ranks):
    settings = {"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 1}
    heard, raised = ranks(_shape_mismatch, 2, config=settings, env={"SMP_HOST": "algo-7"}, timeout=100)
    message = "Expected input batch_size (4) to match target batch_size (3)."
    assert raised[:2] == ("ValueError", message)
    assert heard[0] == "StageError"
    failure = heard[2]
    assert (failure["rank"], failure["host"]) == (1, "algo-7")
    assert (failure["error_type"], failure["message"]) == ("ValueError", message)
    assert failure["when"] > 0
    for text in (failure["traceback"], raised[3]):
        lines = [line.strip() for line in text.splitlines()]
        assert "loss = criterion(logits, y)" in lines
        assert any("cross_entropy" in line for line in lines)
        assert lines[-1] == f"ValueError: {message}"
        # From the script's line to the error there is nothing of ours.
        below = lines[lines.index("loss = criterion(logits, y)") :]
        assert not any("smp_runtime" in line for line in below)
    assert "smp_runtime" not in failure["traceback"]
    assert len(failure["traceback"]) < 3000


def _no_memory(early):
    """Stage 1 has no memory for a tensor that comes: in a step, or for the next one, which it has not entered yet."""
    import threading
    from unittest import mock

    import torch
    from support.training.pipeline_training import summing_step
    from torch import nn

    import smdistributed.modelparallel.torch as smp
    from smp_runtime.pipeline.transport.tensor_channels import Announcement

    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    for stage in (1, 2):
        smp.set_partition(net[stage], stage)
    model = smp.DistributedModel(net)
    train, failed = summing_step(model), threading.Event()
    allocate = Announcement.allocate

    def out_of_memory(announced, device, **how):
        if threading.current_thread().name == "smp-from-0":
            failed.set()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return allocate(announced, device, **how)

    train(torch.ones(2, 4))
    seen = []
    with mock.patch.object(Announcement, "allocate", out_of_memory) if smp.rank() == 1 else mock.MagicMock():
        smp.barrier()  # rank 0 would send a tensor before rank 1 refuses it
        if early and smp.rank() == 1:
            assert failed.wait(30)
        for _ in range(2):
            try:
                train(torch.ones(2, 4))
            except Exception as error:
                told = getattr(error, "failure", None)
                seen.append((type(error).__name__, str(error), told.model_dump() if told is not None else {}))
    smp.barrier()
    return seen


@pytest.mark.parametrize("early", [False, True], ids=["in a step", "between steps"])
def test_an_error_of_the_rank_that_receives_a_tensor_is_told_as_its_own_on_every_rank(ranks, early):
    settings = {"partitions": 3, "auto_partition": False, "default_partition": 0}
    for seen in ranks(_no_memory, 3, early, config=settings, timeout=100):
        assert len(seen) == 2
        for kind, text, failure in seen:
            assert kind == "StageError"
            assert "pipeline stage 1 (rank 1), receiving from stage 0: OutOfMemoryError: CUDA out of memory." in text
            assert "probably died" not in text
            assert (failure["rank"], failure["error_type"]) == (1, "OutOfMemoryError")
            assert failure["message"] == "CUDA out of memory. Tried to allocate 2.00 GiB."
        assert seen[1][1].startswith("no step can run any more: ")


def test_a_failure_record_of_an_error_that_another_rank_raised_is_that_ranks():
    from smp_records.records import FailureRecord
    from smp_runtime.pipeline.execution.failures import STEP_FUNCTION, error_of, message_of

    try:
        raise ValueError("no \udc80 good")
    except ValueError as error:
        told = message_of(error, STEP_FUNCTION, 1, 5)
    record = FailureRecord.of(0, "algo-1", error_of(told), "a traceback of rank 0")
    assert (record.rank, record.error_type, record.message) == (5, "ValueError", "no \\udc80 good")
    assert 'raise ValueError("no' in record.traceback


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ("layers.1", "module 'layers.1'"),
        ("", "module ''"),
        ("the step function", "the step function"),
        ("(a message from stage 3)", "a message from stage 3"),
    ],
)
def test_what_raised_is_named_as_what_it_is(place, told):
    from smp_runtime.pipeline.execution.failures import message_of

    assert message_of(ValueError("no"), place, 1, 5).place == told


def test_an_error_that_we_raise_ourselves_says_where():
    from smp_runtime.errors import SMPRuntimeError
    from smp_runtime.pipeline.execution.failures import traceback_of, without_own_frames
    from smp_runtime.pipeline.observe.recorder import estimate_offset

    try:
        estimate_offset([])
    except SMPRuntimeError as error:
        assert "in estimate_offset" in traceback_of(error)
        assert without_own_frames(error.__traceback__).tb_next.tb_frame.f_code.co_name == "estimate_offset"


SCRIPT = """
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp

smp.init()
torch.manual_seed(0)
model = smp.DistributedModel(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)))
smp.set_partition(model.module, 1)
smp.set_partition(model.module[0], 0)
criterion = nn.CrossEntropyLoss()


@smp.step(non_split_inputs=["y"])
def train_step(x, y):
    logits = model(x)
    loss = criterion(logits, y)
    model.backward(loss)
    return loss


for number in range(3):
    train_step(torch.ones(256, 8), torch.zeros(120 if number == 2 else 128, dtype=torch.long))
"""


@pytest.mark.job
@pytest.mark.timeout(120)
def test_fit_tells_the_rank_that_raised_and_the_lines_of_the_script(tmp_path):
    from smp_estimator import SMPEstimator

    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text(SCRIPT)
    parameters = {"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 1}
    job = SMPEstimator(
        entry_point="train.py",
        source_dir=str(tmp_path / "src"),
        instance_type="local",
        output_path=f"file://{tmp_path / 'out'}",
        distribution={
            "smdistributed": {"modelparallel": {"enabled": True, "parameters": parameters}},
            "mpi": {"enabled": True, "processes_per_host": 2},
        },
    )
    message = "ValueError: Expected input batch_size (128) to match target batch_size (120)."
    with pytest.raises(Exception, match=r"rank 1 \(algo-1\): ValueError") as caught:
        job.fit(logs=False)
    failure = job.sagemaker_session.job(job._current_job_name).tree.root
    (written,) = [path.read_text() for path in failure.rglob("output/failure")]
    assert written.startswith(f"rank 1 (algo-1): {message}\n")
    for text in (str(caught.value), written):
        assert any(line.endswith("loss = criterion(logits, y)") for line in text.splitlines())
        assert message in text
        assert "rank 0" not in text
