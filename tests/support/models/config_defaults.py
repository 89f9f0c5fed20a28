"""Writes the default sizes of Transformers' language models, for configurations that leave fields out.

python tests/support/models/config_defaults.py
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "container"), str(ROOT / "tests")]

FILE = ROOT / "smp_estimator" / "models" / "config_defaults.json"


def defaults_of(kind: type) -> dict[str, Any]:
    """Return the defaults of a configuration's class that decide the number of parameters."""
    from smp_estimator.planning.model_config import OPTIONAL_FIELDS, SIGNS

    found = {}
    for name, parameter in inspect.signature(kind).parameters.items():
        value = parameter.default
        if name.startswith(SIGNS):  # its presence counts, and not its value
            found[name] = True
        elif name in OPTIONAL_FIELDS and isinstance(value, bool | int | str):
            found[name] = value
    return found


def main() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from support.models.tiny_families import families

    names = sorted({family.model_type for family in families()})
    lines = [f"{json.dumps(name)}: {json.dumps(defaults_of(CONFIG_MAPPING[name]))}" for name in names]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
