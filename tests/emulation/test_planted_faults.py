"""Every fault that is planted in the order of work is found: in the runtime's own code, and in small programs."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from dataclasses import dataclass

import pytest
import torch
from support.faults.planted import planted
from support.ranks.context_threads import see_sequences
from support.ranks.emulated import on_devices
from support.training import emulated_training
from support.training.emulated_training import PATHS

from smp_emulation.checked import emulated
from smp_emulation.checked.streams.faults import StreamFault
from smp_runtime.errors import CheckpointError

OFFLOADING = "smp_runtime.activations.offloading:"
CHANNEL = "smp_runtime.pipeline.transport.tensor_channels:GroupChannel."
PHASES = "smp_runtime.smddp.streams:StreamGather."


@dataclass(frozen=True)
class Fault:
    """A fault in the runtime.

    Attributes:
        program: a path of ``test_runtime_on_streams.py`` or a function here.
        where: the function that has it, as :func:`planted` takes it.
        old: what is right.
        new: what stands there instead.
        says: part of the error.
    """

    program: str
    where: str
    old: str
    new: str
    says: str = "nothing orders two accesses"


#: Orders of work, tried until a fault is found: in some, the host has waited for the right event by chance. Of 48 orders 24 have
#: found the least visible fault, so that two are enough on average, and all of these miss it once in a million times even if only
#: 35 % find it.
SEEDS = range(1, 34)

#: One rank, in this process.
ALONE = {
    "copied out before it is computed": Fault(
        "offloading",
        OFFLOADING + "Offloader.copied_out",
        "stream.wait_stream(torch.cuda.current_stream(self.device))",
        "pass",
    ),
    "an event before the copy that it stands for": Fault(
        "offloading",
        OFFLOADING + "Offloader.copied_out",
        """host.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record(stream)""",
        """event = torch.cuda.Event()
        event.record(stream)
        host.copy_(tensor, non_blocking=True)""",
        "is given back at",
    ),
    "an event on another stream": Fault(
        "offloading",
        OFFLOADING + "Offloader.copied_out",
        "event.record(stream)",
        "event.record(self.in_stream)",
        "is given back at",
    ),
    "copied in before it is out": Fault(
        "offloading", OFFLOADING + "Offloader.copied_in", "stream.wait_event(complete)", "pass"
    ),
    "an event before the copy that brings it back": Fault(
        "offloading",
        OFFLOADING + "Offloader.copied_in",
        """tensor.copy_(host, non_blocking=True)
        event = torch.cuda.Event()
        event.record(stream)""",
        """event = torch.cuda.Event()
        event.record(stream)
        tensor.copy_(host, non_blocking=True)""",
    ),
    "used before it is in": Fault("offloading", OFFLOADING + "_Movable.take", "stream.wait_event(self._event)", "pass"),
    "freed while the computing stream reads it": Fault(
        "offloading",
        OFFLOADING + "_Movable.take",
        "self.tensor.record_stream(stream)",
        "pass",
        "is given back at",
    ),
    "freed while it is copied out": Fault(
        "offloading",
        OFFLOADING + "Offloader.copied_out",
        "self._leaving.append(_Leaving(stored, tensor, tensor._version, event))",
        "pass",
        "is given back at",
    ),
    "written to a file before it is copied": Fault(
        "saving", "smp_runtime.tensors.host_memory.snapshot:_own_stream", "stream.synchronize()", "pass"
    ),
    "the script's work does not come first": Fault(
        "script_with_a_stream", "smp_runtime.comm.devices:in_order_with_script", "compute.wait_stream(script)", "pass"
    ),
    "the script does not wait": Fault(
        "script_with_a_stream", "smp_runtime.comm.devices:in_order_with_script", "script.wait_stream(compute)", "pass"
    ),
}

#: Several ranks: a path, and a fault in it.
ON_RANKS = {
    "a reduction that nobody waits for": Fault(
        "reduction", "smp_runtime.comm.buckets:Reducing.finish", "self._work.wait()", "pass"
    ),
    "parameters used before they are gathered": Fault(
        "sharding", "smp_runtime.sharding.gather_scheduler:GatherScheduler._finish", "work.wait()", "pass"
    ),
    "gradients added before they have come": Fault(
        "sharding", "smp_runtime.sharding.sharded_gradients:PendingReduceScatter.finish", "work.wait()", "pass"
    ),
    "a tensor handed on before it has come": Fault(
        "pipeline", CHANNEL + "_take", "self._stream.synchronize()", "pass"
    ),
    "a tensor received that nobody waits for": Fault(
        "pipeline", CHANNEL + "_receive", "work.wait()", "pass", "nothing orders|given back"
    ),
    "received memory that its own stream may have again": Fault(
        "pipeline", CHANNEL + "_take", "tensor.record_stream(torch.cuda.default_stream(self.device))", "pass", "given back"
    ),
    "received outputs that the script still reads": Fault(
        "pipeline, outputs read late on a stream of the script",
        "smp_runtime.comm.devices:keep_for_script",
        "tensor.record_stream(script)",
        "pass",
        "given back",
    ),
    "sent from another stream than it is made on": Fault(
        "pipeline",
        CHANNEL + "post",
        "work = self._pair.send(flat)",
        # Not for the first element, which connects: the receiving device would wait for it until the end of its patience.
        "self._is_open.is_set() and torch.cuda.set_stream(torch.cuda.Stream()); work = self._pair.send(flat)",
    ),
    "shards gathered in phases before they are written": Fault(
        "smddp", PHASES + "start", "self._stream.wait_stream(torch.cuda.current_stream(device))", "pass"
    ),
    "phases that nobody waits for": Fault(
        "smddp", "smp_runtime.smddp.work:StreamWork.wait", "self._future.wait()", "pass"
    ),
}  # fmt: skip
#: Those that always run; after a fault on ranks their processes start again, which takes time.
SAMPLE = {
    "copied out before it is computed",
    "freed while the computing stream reads it",
    "written to a file before it is copied",
    "the script does not wait",
}


def script_with_a_stream():
    """A script's stream, and other threads that compute on the default one, as tasks of a pipeline do."""
    from smp_runtime.comm.devices import in_order_with_script

    device, found = torch.device("cuda", 0), []
    own = torch.cuda.Stream()

    def compute():
        with contextlib.suppress(StreamFault):  # raised again at the end
            found.append(x * 2)

    with torch.cuda.stream(own):
        x = torch.ones(8, device=device)
        with in_order_with_script(device):
            task = threading.Thread(target=compute)
            task.start()
            task.join()
        return (found[0] + 1).tolist() if found else None


@pytest.fixture
def alone(tmp_path):
    """``alone(program, seed)``: run it in this process."""
    from smp_runtime.job import session

    def run(program, seed):
        try:
            if program == "script_with_a_stream":
                with emulated(seed):
                    return script_with_a_stream()
            return emulated_training.run(PATHS[program], str(tmp_path), functools.partial(on_devices, seed))
        finally:
            session.shutdown()

    return run


def _run_in_orders(alone, program):
    for seed in SEEDS:
        alone(program, seed)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in SAMPLE else pytest.mark.full) for n in ALONE])
def test_it_is_found(alone, name):
    fault = ALONE[name]
    with (
        planted(fault.where, fault.old, fault.new),
        pytest.raises((StreamFault, CheckpointError), match=fault.says) as raised,
    ):
        _run_in_orders(alone, fault.program)
    assert str(raised.value).count(".py:") >= 2  # both lines


def test_without_a_fault_nothing_is_found(alone):
    assert alone("script_with_a_stream", 1) == [3.0] * 8
    assert alone("offloading", 3)["waits"]
    assert alone("saving", 3)["waits"]


@pytest.mark.parametrize("name", ON_RANKS)
def test_the_planted_line_is_still_there(name):
    """The tests that run the faults are among the longer ones; a line that was rewritten shows here."""
    from support.faults.planted import planted

    fault = ON_RANKS[name]
    with planted(fault.where, fault.old, fault.new):
        pass


@pytest.mark.full
@pytest.mark.parametrize("name", ON_RANKS)
def test_it_is_found_on_ranks(ranks, name):
    from support.ranks.rank_pool import RankFailed

    fault = ON_RANKS[name]
    path = PATHS[fault.program]
    with pytest.raises(RankFailed, match=fault.says):
        ranks(_faulty, path.world, path, (fault.where, fault.old, fault.new), init=False, timeout=60)


def _faulty(path, fault):
    from support.faults.planted import planted
    from support.ranks import emulated
    from support.training import emulated_training

    with planted(*fault):
        return emulated_training.run(path, "", functools.partial(emulated.on_devices, 3))


# -- small programs ----------------------------------------------------------------------------------------------------


def _missing_wait():
    side = torch.cuda.Stream()
    x = torch.ones(4, device="cuda")
    with torch.cuda.stream(side):
        return x * 2


def _early_event():
    x, host = torch.ones(4, device="cuda"), torch.empty(4, pin_memory=True)
    event = torch.cuda.Event()
    event.record()
    host.copy_(x, non_blocking=True)
    event.synchronize()
    return host.tolist()


def _read_without_wait():
    x, host = torch.ones(4, device="cuda"), torch.empty(4, pin_memory=True)
    host.copy_(x, non_blocking=True)
    return host.numpy()


def _changed_while_it_is_copied():
    host = torch.ones(4, pin_memory=True)
    x = host.to("cuda", non_blocking=True)
    host.fill_(3)
    return x


def _memory_used_again():
    side = torch.cuda.Stream()
    x = torch.ones(4, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2
    del x
    return torch.zeros(4, device="cuda"), y


def _shrunk_while_it_is_read():
    side = torch.cuda.Stream()
    x = torch.ones(4, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(16)
    return y


def _written_by_two():
    side = torch.cuda.Stream()
    x = torch.zeros(8, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x[:5].add_(1)
    x[4:].add_(1)


def _event_waited_for_before_it_is_recorded():
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    side.wait_event(event)
    x = torch.ones(4, device="cuda")
    event.record()
    with torch.cuda.stream(side):
        return x * 2


PROGRAMS = [
    *(_missing_wait, _early_event, _read_without_wait, _changed_while_it_is_copied, _memory_used_again),
    *(_shrunk_while_it_is_read, _written_by_two, _event_waited_for_before_it_is_recorded),
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__.strip("_"))
def test_faults_of_small_programs_are_found(program):
    with pytest.raises(StreamFault) as raised, emulated(seed=2):
        program()
    lines = re.findall(r"\.py:\d+ in (\w+)", str(raised.value))
    assert len(lines) >= 2
    assert set(lines) == {program.__name__}


def _used_before_it_is_updated():
    side = torch.cuda.Stream()
    layer = torch.nn.Linear(4, 4, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        layer(torch.ones(2, 4, device="cuda")).sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()


def _clipped_before_it_is_computed():
    side = torch.cuda.Stream()
    weight = torch.nn.Parameter(torch.ones(4, device="cuda"))
    with torch.cuda.stream(side):
        weight.grad = torch.ones(4, device="cuda")
    torch.nn.utils.clip_grad_value_([weight], 0.5)


def _multiplied_before_it_is_made():
    layer = torch.nn.Linear(4, 4, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        return layer(torch.ones(2, 4, device="cuda"))


@pytest.fixture
def stand_ins(monkeypatch):
    """Functions of the runtime in the place of PyTorch's."""
    from smp_runtime.fp8 import choosing
    from smp_runtime.optim.clipping import _Clipping, wrapped_function
    from smp_runtime.tensors.lazy_dynamo import _differentiable_if_asked

    see_sequences(monkeypatch)
    step = torch.optim.SGD.step
    monkeypatch.setattr(torch.optim.SGD, "step", _differentiable_if_asked(step.__wrapped__, step, threading.Event()))
    cell = wrapped_function(torch.nn.utils.clip_grad_value_)
    without_session = _Clipping(set())
    monkeypatch.setattr(cell, "cell_contents", without_session.clamping(cell.cell_contents))
    choosing.install()
    yield
    choosing.uninstall()


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    "program",
    [
        _changed_while_it_is_copied,
        _used_before_it_is_updated,
        _clipped_before_it_is_computed,
        _multiplied_before_it_is_made,
    ],
    ids=lambda program: program.__name__.strip("_"),
)
def test_lines_are_those_of_the_program_behind_functions_in_the_place_of_pytorchs(program):
    test_faults_of_small_programs_are_found(program)


def test_an_error_that_a_program_catches_is_raised_at_the_end():
    with pytest.raises(StreamFault), emulated(), contextlib.suppress(RuntimeError):
        _missing_wait()


def test_parts_of_one_tensor_are_apart():
    with emulated(seed=4):
        side = torch.cuda.Stream()
        x = torch.zeros(8, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x[:4].add_(1)
        x[4:].add_(2)
        torch.cuda.current_stream().wait_stream(side)
        assert x.tolist() == [1.0] * 4 + [2.0] * 4
