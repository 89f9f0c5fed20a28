"""What is left to the training toolkit (``sagemaker-training``): the download of the user's code and its requirements.

It runs in a process of its own, so that the launcher neither needs the toolkit nor carries what it imports. The rest
of the toolkit (environment, mpirun) is done by this package.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

#: What the child process can be asked to do.
DOWNLOAD = "download"
REQUIREMENTS = "requirements"

#: Of the reason for a failure.
_REASON_BYTES = 4000


def main() -> None:
    """Take over from the toolkit's own ``train`` program, which ``SAGEMAKER_TRAINING_MODULE`` sends here."""
    os.execv(sys.executable, [sys.executable, "-m", "smp_launch", "train"])


def child(arguments: Sequence[str]) -> int:
    """``download REPORT URI FOLDER`` or ``requirements REPORT FOLDER``.

    Args:
        arguments: ``REPORT`` is the number of a descriptor that gets the reason of a failure.

    Returns:
        The exit code.
    """
    task, report, *words = arguments
    try:
        from sagemaker_training import files, logging_config, modules

        logging_config.configure_logger(20)
        if task == DOWNLOAD:
            files.download_and_extract(*words)
        else:
            modules.install_requirements(words[0], capture_error=True)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        os.write(int(report), reason.encode("utf-8", "replace")[:_REASON_BYTES])
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(child(sys.argv[1:]))
