"""The uploaded source of a job in a stock image: the user's files, and the runtime beside them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from smp_config import ConfigError
from smp_estimator.cloud import entry, requirements
from smp_estimator.cloud.wheel import build_wheel, travelling_requirements

#: What the platform starts; it prepares the runtime and runs the user's script.
PROGRAM = "smp_entry.py"

#: Hyperparameter that names the user's script; of the platform's prefix, so that scripts never see it as an argument.
USER_PROGRAM = entry.USER_PROGRAM


@contextmanager
def with_runtime(entry_point: str, source_dir: str | None) -> Iterator[Path]:
    """A folder with what a job runs: the user's files (as links), the wheel, its requirements and the program.

    Args:
        entry_point: relative to ``source_dir``, or a path when there is none.
        source_dir: a local directory, or None.

    Raises:
        ConfigError: the user has a file of one of our names, or requirements that contradict ours.
    """
    folder = Path(tempfile.mkdtemp(prefix="smp-source-"))
    try:
        if source_dir:
            for item in sorted(Path(source_dir).expanduser().absolute().iterdir()):
                (folder / item.name).symlink_to(item, target_is_directory=item.is_dir())
        else:
            script = Path(entry_point).expanduser().absolute()
            (folder / script.name).symlink_to(script)
        if (folder / PROGRAM).is_symlink():
            raise ConfigError(
                f"source_dir {source_dir} holds a file {PROGRAM}, the name under which the runtime starts the script in a "
                "stock image; rename it"
            )
        shutil.copyfile(entry.__file__, folder / PROGRAM)
        build_wheel(folder)
        _add_requirements(folder / "requirements.txt")
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def program_of(entry_point: str, source_dir: str | None) -> str:
    """The user's script relative to the code directory."""
    return entry_point if source_dir else os.path.basename(entry_point)


def _add_requirements(path: Path) -> None:
    """Append ours to the user's; the platform installs the file before it starts the program."""
    text = requirements.combined(path, travelling_requirements())
    if path.is_symlink():
        path.unlink()
    path.write_text(text, encoding="utf-8")
