"""Threads of the runtime: where they may touch CUDA, they begin with the rank's device as the current one."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import smp_runtime
import smp_tools
from smp_runtime.comm import devices

#: Files that start threads by themselves, and why their threads need no device from the helper.
_HOST_ONLY = "files, sockets and host memory only"
_SETS_IT = "sets the device, where its tensors are on one"
STARTS = {
    "smp_runtime/checkpoint/folder_lock.py": _HOST_ONLY,
    "smp_runtime/checkpoint/memory/peer_replication.py": _HOST_ONLY,
    "smp_runtime/comm/groups.py": "NCCL sets the device of each communicator that it aborts",
    "smp_runtime/module_conversion/in_place/equivalence_check.py": "models in host memory",
    "smp_runtime/pipeline/execution/task_scheduler.py": _SETS_IT,
    "smp_runtime/pipeline/transport/native_calls.py": "opening sets the device; NCCL sets that of each communicator it ends",
    "smp_runtime/preemption/stop_agreement.py": _HOST_ONLY,
    "smp_runtime/reshape/requests.py": _HOST_ONLY,
    "smp_runtime/smddp/messages.py": _HOST_ONLY,
    "smp_runtime/smddp/work.py": _HOST_ONLY,
    "smp_tools/tracking/writer.py": _SETS_IT,
    "smp_runtime/checkpoint/files/checksums.py": _HOST_ONLY,
    "smp_runtime/checkpoint/folder_transaction.py": _HOST_ONLY,
    "smp_runtime/checkpoint/save_partial.py": "reads copies in host memory; their staging names the device",
    "smp_runtime/pipeline/transport/transport.py": "its channels set the device",
    "smp_runtime/tensors/host_memory/staging.py": _SETS_IT,
    "smp_runtime/tensors/host_memory/worker_threads.py": "where tensors are on a device, its users pass a first call that sets it",
}


def _starts_threads(path):
    text = path.read_text()
    if "Thread" not in text:  # which all of the names below have; to parse a file takes a hundred times as long
        return False
    calls = (node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    return any(ast.unparse(call) in ("threading.Thread", "Thread", "ThreadPoolExecutor") for call in calls)


def test_each_thread_has_its_device_or_needs_none():
    root = Path(smp_runtime.__file__).parents[1]
    files = [path for package in (smp_runtime, smp_tools) for path in Path(package.__file__).parent.rglob("*.py")]
    found = {str(path.relative_to(root)) for path in files if _starts_threads(path)}
    assert found - {"smp_runtime/comm/devices.py"} <= STARTS.keys(), "use device_thread(), or say why not"


@pytest.mark.parametrize(("device", "expected"), [("cuda:3", [torch.device("cuda", 3)]), ("cpu", [])])
def test_the_thread_begins_on_the_device(device, expected, monkeypatch):
    done = []
    monkeypatch.setattr(torch.cuda, "set_device", done.append)
    thread = devices.device_thread(lambda: done.append("ran"), "a", torch.device(device))
    thread.start()
    thread.join(30)
    assert done == [*expected, "ran"]
    assert (thread.name, thread.daemon) == ("a", True)
