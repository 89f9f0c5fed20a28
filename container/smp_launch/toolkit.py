"""What is left to the training toolkit (``sagemaker-training``): the download of the user's code and its requirements.

It runs in a process of its own, so that the launcher neither needs the toolkit nor carries what it imports. The rest
of the toolkit (environment, mpirun) is done by this package.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

#: The two things that it does; a failure's report begins with one of them and a line break.
DOWNLOAD = "download"
REQUIREMENTS = "requirements"

REQUIREMENTS_FILE = "requirements.txt"

#: Of the reason for a failure.
_REASON_BYTES = 4000


def main() -> None:
    """Take over from the toolkit's own ``train`` program, which ``SAGEMAKER_TRAINING_MODULE`` sends here."""
    os.execv(sys.executable, [sys.executable, "-m", "smp_launch", "train"])


def child(arguments: Sequence[str]) -> int:
    """``REPORT FOLDER [URI]``: fetch the archive ``URI`` into ``FOLDER``, and install what its requirements name.

    Both in one process, because the toolkit takes a second to import.

    Args:
        arguments: ``REPORT`` is the number of a descriptor that gets the reason of a failure.

    Returns:
        The exit code.
    """
    report, folder, *uri = arguments
    task = DOWNLOAD if uri else REQUIREMENTS
    try:
        from sagemaker_training import files, logging_config, modules

        logging_config.configure_logger(logging.INFO)
        if uri:
            files.download_and_extract(uri[0], folder)
        task = REQUIREMENTS
        if os.path.isfile(os.path.join(folder, REQUIREMENTS_FILE)):
            modules.install_requirements(folder, capture_error=True)
    except Exception as error:
        reason = f"{task}\n{type(error).__name__}: {error}"
        os.write(int(report), reason.encode("utf-8", "replace")[:_REASON_BYTES])
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(child(sys.argv[1:]))
