"""The control plane over real MPI, and the degrees that only show under a launcher."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.platform.jobs import artifact

pytestmark = [pytest.mark.job, pytest.mark.timeout(120)]

SCRIPT = """
import json, os, time
import smdistributed.modelparallel.torch as smp

smp.init()
seen = {"rank": smp.rank(), "local": smp.local_rank(), "local_size": smp.local_size(), "host": os.environ["SM_CURRENT_HOST"]}
seen["all"] = smp.allgather(smp.rank() ** 2, smp.WORLD)
if smp.rank() == 0:
    smp.broadcast({"big": b"x" * 5_000_000}, smp.CommGroup.WORLD)
    start = time.monotonic()
    smp.send("late", 3, smp.RankType.DP_RANK)
    seen["waited"] = time.monotonic() - start
else:
    seen["big"] = len(smp.recv_from(0, smp.RankType.WORLD_RANK)["big"])
if smp.rank() == 3:
    time.sleep(0.6)
    seen["got"] = smp.recv_from(0, smp.RankType.DP_RANK)
smp.barrier()
smp.dp_barrier()
smp.mp_barrier()
import torch.distributed as dist, torch
x = torch.tensor(float(smp.rank()))
dist.all_reduce(x, group=smp.get_dp_process_group())
seen["sum"] = float(x)
everyone = smp.allgather(seen, smp.WORLD)
if smp.rank() == 0:
    open(os.path.join(os.environ["SM_MODEL_DIR"], "seen.json"), "w").write(json.dumps(everyone))
"""


def test_ranks_messages_and_groups_over_two_simulated_hosts(gpt_job, text, tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "talk.py").write_text(SCRIPT)
    job = gpt_job(2, hosts=2, entry_point="talk.py", source_dir=str(tmp_path / "src"))
    job.fit({"train": f"file://{text}"}, logs=False)
    seen = artifact(job, "seen.json")
    assert [s["rank"] for s in seen] == [0, 1, 2, 3]
    assert [s["local"] for s in seen] == [0, 1, 0, 1]
    assert {s["local_size"] for s in seen} == {2}
    assert [s["host"] for s in seen] == ["algo-1", "algo-1", "algo-2", "algo-2"]
    assert all(s["all"] == [0, 1, 4, 9] and s["sum"] == 6.0 for s in seen)
    assert [s["big"] for s in seen[1:]] == [5_000_000] * 3
    assert seen[3]["got"] == "late"
    assert seen[0]["waited"] >= 0.4


#: Under plain mpirun: rank 1 leaves the job, rank 0 waits for it, and then fails while rank 1 is busy.
ENDS = """
import sys, time
import smdistributed.modelparallel.torch as smp

smp.init()
if smp.rank() == 0:
    try:
        smp.barrier()
    except Exception as error:
        print("told:", error, flush=True)
    open(sys.argv[1], "w").write("written at the end")  # by the interpreter, which ends as it does without MPI
    held = open(sys.argv[1] + ".held", "w")
    held.write("also")
    raise ValueError("boom")
smp.shutdown()
time.sleep(100)
"""


def test_plain_mpirun_ends_when_a_rank_has_ended_or_failed(tmp_path):
    (tmp_path / "ends.py").write_text(ENDS)
    program = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_", "SMP_"))}
    environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [program, "--oversubscribe", "-np", "2", sys.executable, "ends.py", "left"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=80, check=False)
    said = done.stdout + done.stderr
    assert "told: rank 1 ended its script while rank 0 waits in smp.barrier; call it on every rank" in said
    assert "ValueError: boom" in said
    assert done.returncode == 1
    assert (tmp_path / "left").read_text() == "written at the end"
    assert (tmp_path / "left.held").read_text() == "also"
