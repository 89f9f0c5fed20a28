"""The program that SDK v3's ``ModelTrainer`` starts on every host of a job with ``ModelParallel``.

It lies in the container beside the runtime's wheel, and needs nothing but Python until that is unpacked. Then it becomes
the launcher, in the same process, so that a signal to it is a signal to the launcher.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smp_estimator.cloud import entry
else:
    try:
        import smp_entry as entry
    except ModuleNotFoundError:  # not in a container
        from smp_estimator.cloud import entry

#: What the runtime needs of other packages, a line for each, in this folder.
REQUIREMENTS = "smp_requirements.txt"

#: Errors whose message says all; a tuple, since this is also read by Pythons that are then refused.
_PLAIN = (ValueError, RuntimeError, ImportError)

#: Of pip's last words, in the message of a failure.
_PIP_CHARACTERS = 1500


def main() -> None:
    """Make the runtime importable and become the launcher; a failure before that is written where the platform reads it."""
    try:
        ships = json.loads(os.environ.get("SM_DISTRIBUTED_CONFIG") or "{}").get("ship_runtime", True)
        entry.check_versions(entry.TORCH_FLOOR)
        here = os.path.dirname(os.path.abspath(__file__))
        if ships:
            with open(os.path.join(here, REQUIREMENTS), encoding="utf-8") as file:
                install(find_missing(file.read().split()))
            entry.prefer(entry.unpack_wheel(entry.wheel_in(here)))
        _launch()
    except BaseException as error:  # of a failed job, the platform shows its failure file only
        _tell(error)
        sys.exit(1)


def _launch() -> None:
    """Become the launcher; raises ImageError if there is none."""
    try:
        from smp_launch.sagemaker import model_trainer
    except ModuleNotFoundError as error:
        raise entry.ImageError(
            f"the image has no runtime of the model parallel library ({error}), and ModelParallel(ship_runtime=False) says that it "
            "has: leave ship_runtime out, or use an image that has it"
        ) from None
    model_trainer.main()


def find_missing(requirements: Iterable[str]) -> list[str]:
    """Return the ``requirements`` (``name>=version``) that this Python lacks, or has in a version that is too old."""
    return [wanted for wanted in requirements if not _is_there(wanted)]


def install(requirements: list[str]) -> None:
    """Install packages from the index that pip is configured for; raises ImageError, with pip's last words, if it cannot."""
    if not requirements:
        return
    print(f"[smp] installing what the image lacks: {' '.join(requirements)}", flush=True)
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", *requirements]
    # No deadline: an index may be slow, and the platform limits the whole job.
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise entry.ImageError(
            f"the image lacks {', '.join(requirements)}, which the model parallel runtime needs, and pip cannot install "
            "it; without a network (enable_network_isolation) use an image that has them, or one that has the runtime, with "
            f"ModelParallel(ship_runtime=False). pip said:\n{done.stdout.strip()[-_PIP_CHARACTERS:]}"
        )


def _is_there(requirement: str) -> bool:
    name, _, floor = requirement.partition(">=")
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return _number(found) >= _number(floor)


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _tell(error: BaseException) -> None:
    """Report why the job failed, in the log and in the failure file; its first line becomes the job's failure reason."""
    base = os.environ.get("SAGEMAKER_BASE_DIR") or "/opt/ml"
    text = f"the job cannot start: {error}"
    if not isinstance(error, _PLAIN):
        text += f"\n\n{traceback.format_exc()}"
    print(f"[smp] failed: {text}", file=sys.stderr, flush=True)
    try:
        os.makedirs(os.path.join(base, "output"), exist_ok=True)
        with open(os.path.join(base, "output", "failure"), "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as reason:
        print(f"[smp] the failure file cannot be written: {reason}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
