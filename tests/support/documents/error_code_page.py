"""Writes ``docs/troubleshooting.md`` out of the list of codes: ``python tests/support/documents/error_code_page.py``."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "troubleshooting.md"

HEAD = """\
# Troubleshooting

A message names the problem with its numbers, where they come from, and what to change. A code such as `[SMP302]` ends it; from
Python 3.11 on a traceback shows the code below the message. Each code has a section here, which `smp-estimator explain SMP302`
prints, too.

| what you see | where to look |
|---|---|
| a message with a code | its section below |
| `Training job …: Failed. Reason: …` | who failed first, why, and where in your script; the log has the traceback |
| no progress | `smp-estimator where` asks a running job; after a minute [the watch](hangs.md) ends it and names the line |
| the machine lacks something | `smp-estimator doctor` |
| killed by signal 9 | memory: a smaller batch, more microbatches; [`plan`](planning.md) counts what a rank needs |
| `/dev/shm` is small | [containers](image.md#when-a-job-fails-in-local-mode): `shm_size` |
| losses differ from one process | degrees that need other batches: [the table](tensor-parallelism.md#batches) |
| a message without a code | it comes from the script, from PyTorch or from another library |

This page is generated from `container/smp_config/data/error_codes.json`, which the program reads too.
"""


def page() -> str:
    """The text of the page."""
    from smp_config.error_codes import FAMILIES, catalogue

    parts = [HEAD]
    for digit, family in FAMILIES.items():
        parts.append(f"## {family}\n")
        for row in catalogue().values():
            if row.code[3] == digit:
                name = row.page.partition("#")[0].rpartition("/")[2].removesuffix(".md").replace("-", " ")
                parts.append(
                    f"### {row.code}\n\n**{row.title}.**\n\n*Cause:* {row.cause}\n\n*Cure:* {row.cure}\n\n"
                    f"More: [{name}]({row.page})\n"
                )
    return "\n".join(parts)


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "container")]
    PAGE.write_text(page(), encoding="utf-8")
