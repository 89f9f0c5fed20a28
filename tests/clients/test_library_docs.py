"""The scripts of ``docs/accelerate.md`` and ``docs/lightning.md`` run as a reader would copy them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def _blocks(page):
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)


def _run(script, folder):
    import os
    import runpy

    place = Path(folder) / "script.py"
    if os.environ["RANK"] == "0":
        place.write_text(script)
    import smdistributed.modelparallel.torch as smp

    smp.barrier()
    before = os.getcwd()
    os.chdir(folder)
    try:
        runpy.run_path(str(place), run_name="__main__")
    finally:
        os.chdir(before)
    return sorted(path.name for path in Path(folder).iterdir())


@pytest.mark.parametrize("degrees", [{"pipeline_parallel_degree": 2}, {}], ids=["pp 2", "dp 2"])
@pytest.mark.parametrize(
    ("page", "number", "leaves"),
    [
        pytest.param(
            "accelerate.md",
            0,
            ["script.py", "state", "weights"],
            marks=pytest.mark.client("Accelerate", "example", "pp 2"),
        ),
        pytest.param(
            "lightning.md", 0, ["checkpoints", "script.py"], marks=pytest.mark.client("Lightning", "example", "pp 2")
        ),
        pytest.param(
            "lightning.md", 1, ["script.py", "state.ckpt"], marks=pytest.mark.client("Fabric", "example", "pp 2")
        ),
    ],
    ids=["Accelerate", "Trainer", "Fabric"],
)
@pytest.mark.full
def test_the_script_of_the_page(ranks, tmp_path, page, number, leaves, degrees):
    config = {"ddp": True, "microbatches": 2, **degrees}
    found = ranks(_run, 2, _blocks(page)[number], str(tmp_path), config=config, timeout=100)
    assert [name for name in found[0] if name in leaves] == leaves
