"""What is done for each library, once a script has imported it."""

from __future__ import annotations

from types import ModuleType

from smp_runtime.libraries.import_hook import when_imported


def _accelerate(module: ModuleType) -> None:
    from smp_runtime.libraries.accelerator import give_to_scripts

    give_to_scripts(module)


when_imported("accelerate", _accelerate)
