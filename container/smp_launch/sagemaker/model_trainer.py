"""A job of SDK v3's ``ModelTrainer``: adds what its own scripts leave out, and starts the launcher.

These scripts have read ``/opt/ml``. They give the code its own channel, hand the configuration over in
``SM_DISTRIBUTED_CONFIG``, and know neither ``mp_parameters`` nor ``SM_FRAMEWORK_PARAMS``. The launcher reads all that
from two variables. The ranks do too, because on every host they inherit the environment of their launcher.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from smp_config.distributed_config import as_distribution
from smp_config.errors import ConfigError, show_value
from smp_config.formats import strict_json
from smp_config.job import JSON_ARGUMENTS_VARIABLE, MP_PARAMETERS, JobSettings, decoded_hyperparameter
from smp_launch.sagemaker.environment import MORE_VARIABLE, gpu_count
from smp_launch.sagemaker.platform_files import check_names
from smp_launch.sagemaker.tree import CODE_VARIABLE, Tree

#: Variables of ``ModelTrainer``'s scripts.
CONFIG_VARIABLE = "SM_DISTRIBUTED_CONFIG"
SCRIPT_VARIABLE = "SM_ENTRY_SCRIPT"
SOURCE_VARIABLE = "SM_SOURCE_DIR"

#: Channel of the code, below the folder of the data.
_CODE_CHANNEL = "code"


def main() -> None:
    """Become the launcher of this host.

    Raises:
        ConfigError: the configuration is missing or cannot work.
    """
    environ = {**os.environ, **launcher_variables(os.environ)}
    os.execve(sys.executable, [sys.executable, "-m", "smp_launch", "train"], environ)


def launcher_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the launcher needs for a job of ``ModelTrainer``.

    Raises:
        ConfigError: the configuration is missing or cannot work, or the job's hyperparameters contradict it.
    """
    tree = Tree.from_environment(environ)
    sent = tree.read_config("hyperparameters")
    resources = tree.read_config("resourceconfig")
    check_names(resources, tree.config_dir / "resourceconfig.json")
    settings = _settings(environ, resources.get("current_instance_type") or None)
    more = settings.to_hyperparameters()
    _refuse_contradiction(more.get(MP_PARAMETERS), decoded_hyperparameter(sent.get(MP_PARAMETERS)))
    if script := environ.get(SCRIPT_VARIABLE):
        more["sagemaker_program"] = script
    code = environ.get(SOURCE_VARIABLE) or str(tree.data_dir / _CODE_CHANNEL)
    return {MORE_VARIABLE: json.dumps(more), CODE_VARIABLE: code, JSON_ARGUMENTS_VARIABLE: "1"}


def _settings(environ: Mapping[str, str], instance_type: str | None) -> JobSettings:
    text = environ.get(CONFIG_VARIABLE, "")
    try:
        config = strict_json.parse(text)
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise ConfigError(
            f"{CONFIG_VARIABLE} is {text[:200]!r}, which is no JSON object; ModelTrainer's scripts set it from "
            "distributed=ModelParallel(…), which starts this program: give the job a ModelParallel, and leave the variable to it",
            code="SMP201",
        )
    # The default of ModelTrainer's own drivers if no number is given.
    config.setdefault("processes_per_host", None)
    if config["processes_per_host"] is None:
        config["processes_per_host"] = gpu_count(environ) or 1
    return JobSettings.from_distribution(as_distribution(config), instance_type=instance_type)


def _refuse_contradiction(configured: Any, sent: Any) -> None:
    if sent is not None and sent != configured:
        raise ConfigError(
            f"the hyperparameter {MP_PARAMETERS} is {show_value(sent)}, and ModelParallel says {show_value(configured)}; the "
            "job would "
            f"have to obey both: remove {MP_PARAMETERS} from the hyperparameters of ModelTrainer",
            code="SMP201",
        )
