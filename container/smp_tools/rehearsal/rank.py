"""The runner of a rehearsal: ``python -m smp_tools.rehearsal.rank REQUEST train.py --epochs 3``.

It imports PyTorch once and forks a process for each kind of rank. Each process behaves as the first rank of its kind in the
whole job, and runs the script. It writes its counts, or the reason why it failed, to the request's folder. If requested,
processes for the last ranks follow, which must make the same calls.
"""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import math
import os
import runpy
import secrets
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from smp_config import ConfigError, ModelParallelParameters, Topology
from smp_config.formats.values import parse_dictionary
from smp_config.machine.launchers import SECRET_VARIABLE
from smp_emulation.installing import install_where_asked
from smp_records.rate_card import RateCard
from smp_records.rehearsal import REHEARSAL_VARIABLE, Failure, RehearsalRequest, read_request
from smp_records.script_lines import is_script_s
from smp_records.timeline import TIMELINE_VARIABLE
from smp_runtime.comm import collectives as collectives_room
from smp_runtime.comm.control_transports import SoloTransport, StoreTransport
from smp_runtime.errors import SMPRuntimeError, SMPUserError
from smp_runtime.job import session as sessions
from smp_runtime.job.ranks import PARAMETERS_VARIABLE
from smp_runtime.microbatch_state.compiled_blocks import run_eagerly
from smp_runtime.pipeline.execution import root_stage
from smp_runtime.pipeline.transport import tensor_channels
from smp_runtime.tensors.torch_private import absent_store
from smp_tools.rehearsal.assumed_masks import assume_masks
from smp_tools.rehearsal.calls import Agreement, CallLog, Difference, file_of_calls
from smp_tools.rehearsal.control import Kinds, RehearsedControl
from smp_tools.rehearsal.counters import Counters, RehearsalOver
from smp_tools.rehearsal.data import Loaders
from smp_tools.rehearsal.fake_collectives import AbsentCollectives
from smp_tools.rehearsal.message_log import MessageLog
from smp_tools.rehearsal.skip_compute_mode import PERFORMED_BYTES, as_fused, use_fresh_memory

#: What scripts import.
_PUBLIC = "smdistributed.modelparallel.torch"

#: Exit codes of a kind.
_DONE, _FAILED, _OTHER_KINDS = 0, 1, 3

#: Steps in which ranks' calls are compared. By the second step, a script has made each call that its steps make.
_COMPARED_STEPS = 2

#: Between two looks at the processes, and at their calls.
_PAUSE_SECONDS, _LOOK_SECONDS = 0.02, 0.5


class _OtherKinds(BaseException):
    """The script asks for another number of pipeline stages than there are processes."""

    def __init__(self, needed: int) -> None:
        super().__init__(needed)
        self.needed = needed


def main(arguments: Sequence[str]) -> int:
    """Rehearse a script.

    Args:
        arguments: ``[file of the request, script, *words]``.

    Returns:
        The exit code: 0 if every kind came to its end.
    """
    request = read_request(Path(arguments[0]))
    use_fresh_memory()
    install_where_asked()  # PyTorch calls it only if the packages are installed, not if a path finds them
    os.environ.setdefault(SECRET_VARIABLE, secrets.token_hex(32))
    os.environ[REHEARSAL_VARIABLE] = str(request.ranks)
    os.environ.pop(TIMELINE_VARIABLE, None)  # for which ranks compare their clocks
    public = importlib.import_module(_PUBLIC)
    for name in public.__all__:  # loaded once, for the scripts of all kinds
        getattr(public, name)
    importlib.import_module("torch._dynamo")  # some seconds; the first module that a script initializes imports it
    gc.freeze()  # imported objects stay: the forked kinds need not scan them at each collection
    codes = _fork_all(request, arguments[1:])
    if _OTHER_KINDS in codes:
        failures = [read_failure(path) for path in Path(request.folder).glob("failed-*.json")]
        needed = max(failure.kinds_needed or 1 for failure in failures)
        for path in Path(request.folder).glob("*-*.json*"):
            path.unlink()
        request = request.model_copy(update={"kinds": needed})
        codes = _fork_all(request, arguments[1:])
    if not any(codes) and request.other_ranks and request.ranks > request.kinds:
        codes = _fork_all(request.model_copy(update={"steps": _COMPARED_STEPS}), arguments[1:], last=True)
    return _DONE if not any(codes) else _FAILED


def read_failure(path: Path) -> Failure:
    """Return the failure that a kind has written because it could not continue."""
    return Failure.model_validate_json(path.read_bytes())


def _fork_all(request: RehearsalRequest, words: Sequence[str], *, last: bool = False) -> list[int]:
    """Run every kind in a process of its own, and return their exit codes.

    Args:
        last: whether to run the last ranks of the stages, after the first ones.
    """
    children = []
    pipes = []
    # Each child would write the buffered output once more.
    sys.stdout.flush()
    sys.stderr.flush()
    for kind in range(request.kinds):
        reads, writes = os.pipe()
        # Forked, since a new interpreter would import PyTorch once more for each kind of rank.
        child = os.fork()
        if child == 0:
            # Never back into the parent's code: the child leaves by os._exit(), with its output written.
            os.close(writes)
            code = _FAILED
            try:
                code = _Kind(request, kind, reads, last=last).run(words)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        os.close(reads)
        children.append(child)
        pipes.append(writes)
    # After the forks: its threads would not live on in them.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if request.kinds > 1 else None
    for pipe in pipes:
        os.write(pipe, str(0 if store is None else store.port).encode())
        os.close(pipe)
    return _watch(request, children)


def _watch(request: RehearsalRequest, children: Sequence[int]) -> list[int]:
    """Wait for the processes; ends them where two ranks make different calls, since they would wait for each other."""
    codes: dict[int, int] = {}
    agreement = Agreement(request.folder, _COMPARED_STEPS)
    looked = time.monotonic()
    while len(codes) < len(children):
        for child in children:
            if child in codes:
                continue
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                codes[child] = os.waitstatus_to_exitcode(status)
        if time.monotonic() - looked > _LOOK_SECONDS:
            looked = time.monotonic()
            if (found := agreement.difference(is_over=False)) is not None:
                for child in set(children) - set(codes):
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                _tell(request, found)
                return [_FAILED] * len(children)
        time.sleep(_PAUSE_SECONDS)
    # If ranks have failed, the calls that they did not make any more are no difference.
    is_over = not any(codes.values())
    if _OTHER_KINDS not in codes.values():
        found = agreement.difference(is_over=is_over)
        if found is not None:
            _tell(request, found)
            return [_FAILED] * len(children)
    return [codes[child] for child in children]


def _tell(request: RehearsalRequest, found: Difference) -> None:
    """Write a difference as the cause of all failures that followed from it."""
    for path in Path(request.folder).glob("failed-*.json"):
        path.unlink()
    failure = Failure(
        stage=0, rank=found.rank, error=f"{SMPUserError.__name__}: {found}", line=found.call.line, is_of_all=True
    )
    Path(request.folder, "failed-calls.json").write_text(failure.model_dump_json(), encoding="utf-8")


class _Kind:
    """The process that represents one kind of rank.

    Args:
        reads: a file descriptor to read the port of the common store from.
        last: whether it represents the kind as its last rank.
    """

    def __init__(self, request: RehearsalRequest, kind: int, reads: int, *, last: bool) -> None:
        self._request = request
        self._kind = kind
        self._last = last
        self._port = int(os.read(reads, 16).decode())
        os.close(reads)
        self._kinds: Kinds | None = None
        self._session: sessions.Session | None = None
        self._heard = MessageLog()
        card = _rates(request)
        limit = request.performed_bytes if request.performed_bytes is not None else PERFORMED_BYTES
        self._limit = limit
        self._counters = Counters(request.steps, limit, card)
        self._loaders = self._counters.loaders = Loaders(request.inputs, request.stand_in_samples)
        self._rank = 0

    def run(self, words: Sequence[str]) -> int:
        """Run the script to the last step, write a report, and return the exit code."""
        script, *rest = words
        self._place(_parameters_of_environment())
        sessions.joining.append(self._join)
        sessions.at_init.append(self._begin)
        assume_masks(self._limit)
        if self._request.on_gpu:
            F.scaled_dot_product_attention = as_fused(F.scaled_dot_product_attention)
        DistributedDataParallel.__init__ = _refused  # type: ignore[method-assign]
        torch.save = _save_nothing  # type: ignore[assignment]  # its names of arguments are not needed
        public: Any = sys.modules[_PUBLIC]
        public.save_checkpoint = self._agreed(public.save_checkpoint)
        dist.init_process_group = self._start_groups
        dist.distributed_c10d.init_process_group = self._start_groups
        sys.argv = [script, *rest]
        sys.path.insert(0, str(Path(script).absolute().parent))
        self._counters.start()
        self._loaders.start()
        try:
            with run_eagerly():  # what would be compiled computes on more than shapes
                runpy.run_path(script, run_name="__main__")
        except RehearsalOver:
            pass
        except _OtherKinds as other:
            self._leave(Failure(stage=self._kind, rank=self._rank, error="", kinds_needed=other.needed))
            return _OTHER_KINDS
        except SystemExit as left:
            if left.code not in (None, 0):
                return self._failed(left)
        except BaseException as error:  # of the script: reported as the failure of this kind of rank
            return self._failed(error)
        return self._finish()

    def _agreed(self, function: Callable[..., Any]) -> Callable[..., None]:
        """Wrap a checkpoint function that all ranks call together: it checks its arguments, and writes nothing."""
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> None:
            signature.bind(*args, **kwargs)
            if self._session is None:
                function(*args, **kwargs)  # raises: smp.init() is missing
                return
            control = self._session.ranks.control
            with control.doing(f"smp.{function.__name__}"):
                control.barrier(range(control.size))

        return call

    def _finish(self) -> int:
        if self._kinds is None:
            return self._failed(
                ConfigError(
                    "the script ended without calling smp.init(), so it has no ranks that could be rehearsed",
                    code="SMP120",
                )
            )
        if not self._last:
            report = self._counters.report(self._kind, self._rank, self._kinds.stands_for(self._kind))
            Path(self._request.folder, f"kind-{self._kind}.json").write_text(report.model_dump_json(), encoding="utf-8")
            self._heard.leave(self._rank, self._request.folder)
        try:
            sessions.shutdown()
        except Exception as error:  # the report is complete, and is not lost over this
            print(f"rehearsal: leaving the job failed: {error}", file=sys.stderr)
        return _DONE

    def _failed(self, error: BaseException) -> int:
        failure = Failure(
            stage=self._kind,
            rank=self._rank,
            error=f"{type(error).__name__}: {'it ends itself with ' if isinstance(error, SystemExit) else ''}{error}",
            line=_line_of(error),
            is_last=self._last,
        )
        self._leave(failure)
        if not isinstance(error, ConfigError | ValueError):
            traceback.print_exception(error)
        if self._session is not None:
            self._session.has_failed = True
            sessions.shutdown()
        return _FAILED

    def _leave(self, failure: Failure) -> None:
        Path(self._request.folder, f"failed-{self._kind}.json").write_text(failure.model_dump_json(), encoding="utf-8")

    def _kinds_of(self, topology: Topology) -> Kinds:
        return Kinds(topology, self._request.ranks_per_host, last=self._last)

    # -- what smp.init() meets ---------------------------------------------------------------------------------

    def _place(self, parameters: ModelParallelParameters | None) -> None:
        """Set the environment of the represented rank in this process; some of it is only known in smp.init()."""
        request = self._request
        if parameters is not None:
            topology = parameters.topology(request.ranks)
            if topology.pipeline == request.kinds:
                self._rank = self._kinds_of(topology).representatives[self._kind]
        local = self._rank % request.ranks_per_host
        for name, value in (
            (("RANK", "SMP_RANK"), self._rank),
            (("WORLD_SIZE", "SMP_WORLD_SIZE"), request.ranks),
            (("SMP_LOCAL_RANK", "LOCAL_RANK"), local),
            (("SMP_LOCAL_SIZE", "LOCAL_WORLD_SIZE"), request.ranks_per_host),
            (("SMP_HOST",), f"algo-{self._rank // request.ranks_per_host + 1}"),
        ):
            os.environ.update(dict.fromkeys(name, str(value)))

    def _join(self, parameters: ModelParallelParameters) -> tuple[RehearsedControl, Any]:
        """Return the control plane and collectives of the rehearsal, in place of connections to other ranks."""
        request = self._request
        topology: Topology = parameters.topology(request.ranks)
        if topology.pipeline != request.kinds:
            raise _OtherKinds(topology.pipeline)
        self._kinds = kinds = self._kinds_of(topology)
        self._place(parameters)
        inner: Any = SoloTransport()
        if request.kinds > 1:
            store = dist.TCPStore("127.0.0.1", self._port, is_master=False, wait_for_workers=False)
            inner = StoreTransport(store, self._kind, request.kinds, os.environ)
        host = kinds.host_of(self._rank)
        counters = self._counters
        calls = CallLog(sorted({*kinds.representatives, *kinds.others}), file_of_calls(request.folder, self._rank))
        calls.public_call = lambda: str(inner.call)
        counters.ledger.calls = calls
        counters.links.reaches(kinds.kind_of, lambda rank: kinds.host_of(rank) == host)
        tensor_channels.instead.append(counters.links.channel)
        if not dist.is_initialized():
            self._start_groups()
        if request.on_gpu:
            collectives_room.compared_bytes = math.inf
        root_stage.takes_turns = not self._last
        collectives = counters.counted(AbsentCollectives(buffers=not request.on_gpu))
        said = MessageLog(kinds.others, request.folder) if self._last else None
        heard = self._heard if request.other_ranks and not self._last else None
        control = RehearsedControl(inner, kinds, request.ranks, calls=calls, said=said, heard=heard)
        return control, collectives

    def _start_groups(self, *args: Any, **kwargs: Any) -> None:
        """Replace ``init_process_group``: create process groups with absent other ranks."""
        _init_process_group("fake", store=absent_store(), rank=self._rank, world_size=self._request.ranks)

    def _begin(self, session: sessions.Session) -> None:
        self._session = session
        if self._kinds is not None:
            self._counters.follow(session, self._kinds.hosts_of)


_save = torch.save


#: Most bytes of a tensor that is pickled for another rank; the elements of larger ones are not computed.
_TRAVELS = 1 << 26


def _save_nothing(content: Any, file: Any, *args: Any, **kwargs: Any) -> None:
    """Write a file that can be read, without elements: a rehearsal does not compute them.

    Raises:
        SMPRuntimeError: a tensor is too large to be pickled.
    """
    if not isinstance(content, torch.TypedStorage | torch.UntypedStorage):
        _save(None, file)
        return
    with warnings.catch_warnings():  # scripts should not use typed ones, tensors do
        warnings.simplefilter("ignore", UserWarning)
        size = content.nbytes()
    if size > _TRAVELS:
        raise SMPRuntimeError(
            f"a tensor of {size:,} bytes is handed to other ranks as an object, and a rehearsal has no elements of it; hand over "
            "its shape, or use a collective of tensors"
        )
    _save(content, file, *args, **kwargs)  # PyTorch pickles tensors with torch.save, and ranks send each other some


def _refused(self: Any, *args: Any, **kwargs: Any) -> None:
    """Raise an error, because PyTorch's data parallelism requests values from its backend in C++.

    Absent ranks have no such values.
    """
    raise SMPUserError(
        "DistributedDataParallel of PyTorch is made here, which cannot be rehearsed: its sums go past this library; wrap the model "
        'with smp.DistributedModel, after smp.init(), and set "ddp": True for replicas',
        code="SMP120",
    )


_init_process_group = dist.init_process_group


def _rates(request: RehearsalRequest) -> RateCard | None:
    """Return the given rates, or those of the instance type; None if they are not known."""
    if request.rates is not None:
        return request.rates
    try:
        return (
            RateCard.of_instance(request.instance_type, processes_per_host=request.ranks_per_host)
            if request.instance_type
            else None
        )
    except ConfigError:
        return None


def _parameters_of_environment() -> ModelParallelParameters | None:
    carried = os.environ.get(PARAMETERS_VARIABLE)
    return (
        ModelParallelParameters.from_mp_parameters(parse_dictionary(carried, PARAMETERS_VARIABLE)) if carried else None
    )


def _line_of(error: BaseException) -> str:
    """Return the innermost line of the script at which an error was raised."""
    found = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if is_script_s(frame.f_code.co_filename):
            found = f"{frame.f_code.co_filename}:{line}"
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
