"""The names of SDK v2's settings in SDK v3, for the sentences of checks that both share."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from smp_config import ConfigError

#: Older name, as an expression → name in SDK v3; the longer ones stand first.
_NAMES = {
    r"^distribution: ": "",
    r'distribution\["mpi"\]': "ModelParallel",
    r'"mpi": \{"enabled": True, "processes_per_host": (\d+)\}': r"processes_per_host=\1",
    r'"processes_per_host": (\d+)': r"processes_per_host=\1",
    r'"torch_distributed": \{"enabled": True\}': "version=2",
    r'"torch_distributed"': "version=2",
    r"torch_distributed\.(?=processes_per_host)": "",
    r"distribution smdistributed\.modelparallel|smdistributed\.modelparallel\.parameters": "ModelParallel.parameters",
    r"smdistributed\.modelparallel": "ModelParallel",
    r"distribution mpi: ": "ModelParallel: ",
    r"(?<![\w.])mpi\.(?=processes_per_host|custom_mpi_options)": "",
    r"(?<![\w.])instance_count(?!\w)": "compute.instance_count",
    r"(?<![\w.])instance_type(?!\w)": "compute.instance_type",
    r"(?<![\w.])instance_groups(?!\w)": "compute.instance_groups",
    r"(?<![\w.])instance_preferences(?!\w)": "compute.instance_preferences",
    r"(?<![\w.])image_uri(?!\w)": "training_image",
    r"(?<![\w.])entry_point(?!\w)": "source_code.entry_script",
    r"(?<![\w.])source_dir(?!\w)": "source_code.source_dir",
    r"(?<![\w.])output_path(?!\w)": "output_data_config.s3_output_path",
    r"(?<![\w.])checkpoint_s3_uri(?!\w)": "checkpoint_config.s3_uri",
    r"checkpoint_local_path(?!\w)": "checkpoint_config.local_path",
    r"use_spot_instances(?!\w)": "compute.enable_managed_spot_training",
    r"max_wait(?!\w)": "stopping_condition.max_wait_time_in_seconds",
    r"max_run(?!\w)": "stopping_condition.max_runtime_in_seconds",
    r"(?<![\w.])keep_alive_period_in_seconds(?!\w)": "compute.keep_alive_period_in_seconds",
    r"enable_network_isolation(?!\w)": "networking.enable_network_isolation",
    r"the estimator's": "the trainer's",
    r"the estimator(?!\w)": "the trainer",
    r"\bfit\(\)": "train()",
}


def in_words_of_v3(sentence: str) -> str:
    """Replace the names of SDK v2's settings in a sentence by those of SDK v3."""
    for older, name in _NAMES.items():
        sentence = re.sub(older, name, sentence)
    return sentence


@contextmanager
def said_in_v3() -> Iterator[None]:
    """Run the block, and replace the names of SDK v2's settings in its errors by those of SDK v3."""
    try:
        yield
    except ConfigError as error:
        raise type(error)(in_words_of_v3(str(error))).of_the_kind_of(error) from None
