"""Changes to each library after a script has imported it."""

from __future__ import annotations

import sys
from types import ModuleType

from smp_integrations.import_hook import when_imported
from smp_runtime.tensors.lazy_dynamo import load_compiler_later


def _accelerate(module: ModuleType) -> None:
    from smp_integrations.accelerator import give_to_scripts

    give_to_scripts(module)


def _arguments(module: ModuleType) -> None:
    from smp_integrations.trainer import adapt_arguments

    adapt_arguments(module)


def _trainer(module: ModuleType) -> None:
    from smp_integrations.trainer import adapt_trainer

    adapt_trainer(module)


def _seq2seq(module: ModuleType) -> None:
    from smp_integrations.trainer import adapt_seq2seq

    adapt_seq2seq(module)


def _sft(module: ModuleType) -> None:
    from smp_integrations.trl import adapt_sft

    adapt_sft(module)


def _dpo(module: ModuleType) -> None:
    from smp_integrations.trl import adapt_dpo

    adapt_dpo(module)


if "torch._dynamo" not in sys.modules:
    _load_at_once = load_compiler_later()
    when_imported("torch._dynamo", lambda _: _load_at_once())
when_imported("accelerate", _accelerate)
when_imported("transformers.training_args", _arguments)
when_imported("transformers.sagemaker.training_args_sm", _arguments)
when_imported("transformers.trainer", _trainer)
when_imported("transformers.trainer_seq2seq", _seq2seq)
when_imported("trl.trainer.sft_trainer", _sft)
when_imported("trl.trainer.dpo_trainer", _dpo)


def discovered() -> None:
    """Do nothing; PyTorch calls this when a rank imports it, and importing this file is all that is needed."""
