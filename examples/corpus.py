"""A real text corpus without a download: the source text of the installed Python standard library."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

#: Not part of the library's own text, or generated tables that teach a model little.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "pydoc_data"}


def make_corpus(folder: Path, megabytes: float = 9.0) -> Path:
    """Write ``train.txt`` into ``folder``.

    The files come in an order that mixes the packages and is the same on every run, so that the end of the text,
    which the training script holds out, is like the rest.

    Args:
        folder: made if it is missing.
        megabytes: upper bound of the text, in 10^6 bytes; the library has about 10.

    Returns:
        The path of the file.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [
        path
        for path in library.rglob("*.py")
        if path.is_file() and not _LEFT_OUT.intersection(path.relative_to(library).parts)
    ]
    files.sort(key=lambda path: hashlib.sha256(path.relative_to(library).as_posix().encode()).digest())
    folder.mkdir(parents=True, exist_ok=True)
    target, written = folder / "train.txt", 0
    with target.open("wb") as out:
        for path in files:
            text = path.read_bytes()
            if written + len(text) + 1 > megabytes * 1e6:
                continue
            out.write(text + b"\n")
            written += len(text) + 1
    return target
