"""Runs a module of this package without the working folder before Python's own modules: ``isolated.py smp_launch.ranks.rank …``.

``python -m`` looks there first, and a job's folder may hold a ``random.py`` or ``select.py``. The script itself finds them later.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # The folder of this file, before anything is imported by name.
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]

import os
from importlib import import_module
from pathlib import Path

#: Names of the files that start the launcher or a rank's wrapper.
_PROGRAMS = ("smp-launch", "isolated")


def isolated_command(module: str, *words: str) -> list[str]:
    """Return the command line that calls ``main()`` of a module with ``words``."""
    return [sys.executable, __file__, module, *words]


def leave_working_folder(package: str) -> None:
    """Let ``python -m smp_launch`` find Python's own modules before those of the working folder.

    Args:
        package: the folder of the package that is run; where it lies in the working folder, the folder stays.
    """
    if (
        _is_run_as_module()
        and not getattr(sys.flags, "safe_path", False)
        and sys.path[:1] != [os.path.dirname(package)]
    ):
        del sys.path[0]


def _is_run_as_module() -> bool:
    names = {word.split(".")[0] for word in sys.orig_argv}
    return sys.argv[:1] == ["-m"] and "smp_launch" in names


def end_without_packages() -> None:
    """End the launcher, or the wrapper of a rank, with one line if a package that it needs is missing.

    Raises:
        RequiredPackageMissing: another program imports this package.
    """
    # Not above: modules of this name may lie in the working folder, see leave_working_folder().
    from smp_config.error_codes import append_code
    from smp_config.machine.packages import LAUNCHER_PACKAGES, RequiredPackageMissing, require_packages

    try:
        require_packages(LAUNCHER_PACKAGES)
    except RequiredPackageMissing as error:
        if not (_is_run_as_module() or Path(sys.argv[0]).stem in _PROGRAMS):
            raise
        print(f"smp-launch: failed: the job cannot start: {append_code(str(error), error)}", file=sys.stderr)
        sys.exit(2)  # CANNOT_START of smp_launch.errors


if __name__ == "__main__":
    _module = sys.argv.pop(1)
    sys.exit(import_module(_module).main(sys.argv[1:]))
