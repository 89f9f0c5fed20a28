"""Runs the notebooks of ``examples/`` and keeps their outputs in them: ``python notebook_outputs.py [pipeline …]``.

A notebook runs in an empty folder. Its outputs are cleaned: no paths of this machine, no warnings of other libraries, and long logs
without their middle. The notebook's metadata has a digest of its code, by which a test finds outputs that are out of date.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[3] / "examples"
#: Under this name the metadata of a notebook have the digest of the code that printed the outputs.
DIGEST = "outputs_of"
#: Lines that other libraries print, with paths of the machine or advice that is not about the notebook.
_NOISE = re.compile(
    r"sagemaker\.config INFO|INFO:sagemaker|DeprecationWarning|UserWarning|V2_WARNING|v2_deprecation|SDK v2, which"
)
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
#: Lines that are kept of the beginning and the end of a long log.
_FIRST, _LAST = 25, 15
#: Characters that are kept of the text of a result that is shown as a table or picture.
_CHARACTERS = 200


def code_digest(notebook: dict[str, Any]) -> str:
    """Return a digest of the code of all cells."""
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return hashlib.blake2b(json.dumps(code).encode(), digest_size=8).hexdigest()


def clean_text(text: str, folder: str) -> str:
    """Return a log without escape sequences, noise, paths of this machine, and the middle of a long log."""
    text = _ESCAPES.sub("", text)
    for path, short in (
        (f"{folder}/examples", "/path/to"),
        (folder, "/path/to"),
        (sys.prefix, "…"),
        (str(EXAMPLES.parent), "…"),
        (str(Path.home()), "~"),
    ):
        text = text.replace(path, short)
    lines = [line.rpartition("\r")[2].rstrip() for line in text.splitlines() if not _NOISE.search(line)]
    if len(lines) > _FIRST + _LAST + 1:
        lines = [*lines[:_FIRST], "…", *lines[-_LAST:]]
    return "".join(f"{line}\n" for line in lines)


def clean_outputs(outputs: list[Any], folder: str) -> list[dict[str, Any]]:
    """Return the outputs of a cell in the form that is kept; texts that follow one another are one."""
    kept: list[dict[str, Any]] = []
    for output in outputs:
        if output["output_type"] == "stream":
            if kept and kept[-1]["output_type"] == "stream":
                kept[-1]["text"] += output["text"]
            else:
                kept.append({"name": "stdout", "output_type": "stream", "text": output["text"]})
        elif output["output_type"] in ("display_data", "execute_result"):
            kept.append({**output, "data": _short_data(output["data"]), "metadata": {}})
    for output in kept:
        if output["output_type"] == "stream":
            output["text"] = clean_text(output["text"], folder)
    return [output for output in kept if output.get("text", True)]


def _short_data(data: dict[str, Any]) -> dict[str, Any]:
    """Return the forms of a result, with the beginning of its text if a table or picture shows it."""
    if "text/html" not in data:
        return dict(data)
    plain = "".join(data["text/plain"])
    return {**data, "text/plain": plain if len(plain) <= _CHARACTERS else f"{plain[:_CHARACTERS]}…"}


def run(path: Path) -> None:
    """Run a notebook, and write its outputs into it."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "examples"  # the quickstart finds the script beside this folder
        place.mkdir()
        shutil.copy(EXAMPLES / "corpus.py", place)
        shutil.copytree(EXAMPLES.parent / "entrypoints", Path(folder) / "entrypoints")
        settings = {"metadata": {"path": str(place)}}
        NotebookClient(notebook, timeout=1200, kernel_name="python3", resources=settings).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times
        if cell.cell_type == "code":
            cell.outputs = [nbformat.from_dict(each) for each in clean_outputs(cell.outputs, folder)]
    notebook.metadata.language_info = {"name": "python"}
    notebook.metadata[DIGEST] = code_digest(notebook)
    nbformat.write(notebook, path)


def main(names: list[str]) -> None:
    os.environ |= {"OMP_NUM_THREADS": "1", "SAGEMAKER_SUPPRESS_V2_WARNING": "1", "COLUMNS": "100"}
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for path in sorted(EXAMPLES.glob("*.ipynb")):
        if not names or path.stem in names:
            run(path)
            print(f"{path.name}: {path.stat().st_size:,} bytes", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
