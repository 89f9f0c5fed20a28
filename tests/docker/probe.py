"""Trains with train_gpt.py; then every rank tells what its host gave it. The entry point of a test's job."""

import json
import os
import runpy
import socket
from pathlib import Path

import smdistributed.modelparallel.torch as smp

NAMES = ["SM_CURRENT_HOST", "CURRENT_HOST", "SMP_HOST", "SMP_LOCAL_RANK", "MASTER_ADDR", "GLOO_SOCKET_IFNAME"]
NAMES += ["NCCL_SOCKET_IFNAME", "AWS_ACCESS_KEY_ID", "SM_HOSTS", "USERS_OWN"]


def secret_in_files():
    """Files outside /proc and /sys that hold the secret key."""
    secret = os.environ["AWS_SECRET_ACCESS_KEY"].encode()
    found = []
    for top in ("/etc", "/tmp", "/root", "/home", "/run", "/var/log", "/opt", "/dev/shm"):
        for path in Path(top).rglob("*"):
            try:
                if path.is_file() and path.stat().st_size < 10_000_000 and secret in path.read_bytes():
                    found.append(str(path))
            except OSError:
                continue
    return found


try:
    runpy.run_path(str(Path(__file__).with_name("train_gpt.py")), run_name="__main__")
except SystemExit as end:
    if end.code:
        raise

seen = {name: os.environ.get(name) for name in NAMES}
seen["container"] = socket.gethostname()
seen["resources"] = json.loads(os.environ["SM_RESOURCE_CONFIG"])["current_host"]
seen["secret_in_files"] = secret_in_files()
seen["secret_in_commands"] = [
    path.parent.name
    for path in Path("/proc").glob("[0-9]*/cmdline")
    if os.environ["AWS_SECRET_ACCESS_KEY"].encode() in path.read_bytes()
]

everyone = smp.allgather(seen, smp.WORLD)
if smp.rank() == 0:
    Path(os.environ["SM_MODEL_DIR"], "seen.json").write_text(json.dumps(everyone))
