"""The environment of a training script: the ``SM_*`` variables and its command line.

Names and values are those that the SageMaker training toolkit documents. So scripts and libraries that read
them (``transformers``, ``accelerate``) see no difference.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smp_config.errors import ConfigError, show_value, suggest
from smp_config.formats import strict_json
from smp_config.job import (
    JSON_ARGUMENTS_VARIABLE,
    MP_PARAMETERS,
    PLATFORM_PREFIX,
    SCRIPT_ARGUMENTS_VARIABLE,
    SCRIPT_SUFFIXES,
    decoded_hyperparameter,
)
from smp_config.limits import MOST_SECONDS
from smp_config.machine import device_files, emulation
from smp_launch.sagemaker.platform_files import check_channels, check_hyperparameters, check_resources

if TYPE_CHECKING:
    from smp_launch.sagemaker.tree import Tree

#: Names this host; truer than ``resourceconfig.json``, which a platform may copy from the leader.
HOST_VARIABLE = "CURRENT_HOST"

JOB_NAME_VARIABLE = "TRAINING_JOB_NAME"

#: A JSON object of hyperparameters that the platform's file lacks. If the file has one of them, the file's value holds.
MORE_VARIABLE = "SMP_LAUNCH_HYPERPARAMETERS"

#: Hyperparameters that steer the container itself and are not handed on in ``SM_FRAMEWORK_PARAMS``.
_CONTAINER_PARAMETERS = frozenset(
    """sagemaker_program sagemaker_submit_directory sagemaker_container_log_level sagemaker_job_name sagemaker_region
    sagemaker_enable_cloudwatch_metrics sagemaker_use_env_vars_prefix""".split()
)

#: What ``SM_TRAINING_ENV`` repeats of the other variables.
_IN_TRAINING_ENV = frozenset(
    """current_host current_instance_group current_instance_group_hosts current_instance_type
    distribution_instance_groups framework_module hosts input_config_dir input_data_config instance_groups
    instance_groups_dict is_hetero job_name log_level model_dir module_dir module_name network_interface_name num_cpus
    num_gpus num_neurons output_data_dir output_dir output_intermediate_dir resource_config user_entry_point""".split()
)

#: Devices by which a GPU may be reached without the usual names (WSL, Tegra, AMD).
_OTHER_DEVICES = ("dxg", "nvhost*", "nvgpu*", "kfd")

#: Line of the log if GPUs are emulated.
EMULATION_LINE = (
    f"no GPU here: calls of torch.cuda act on the CPU, so that a GPU script runs ({emulation.VARIABLE}=1; "
    f'environment={{"{emulation.VARIABLE}": "0"}} turns it off)'
)

_DEFAULT_LOG_LEVEL = 20  # logging.INFO


@dataclass(frozen=True)
class TrainingEnvironment:
    """The facts about a job in the files under ``input/config``, seen from one host."""

    tree: Tree
    hyperparameters: Mapping[str, Any]
    resources: Mapping[str, Any]
    channels: Mapping[str, Any]
    current_host: str
    job_name: str = ""
    more_arguments: tuple[str, ...] = ()
    has_json_arguments: bool = False

    @classmethod
    def read(cls, tree: Tree, environ: Mapping[str, str], host: str | None = None) -> TrainingEnvironment:
        """Read a host's tree.

        Args:
            host: the host's name; by default ``CURRENT_HOST``, else the name in ``resourceconfig.json``.

        Raises:
            ConfigError: a file is missing or invalid.
        """
        resources = tree.read_config("resourceconfig")
        check_resources(resources, tree.config_dir / "resourceconfig.json")
        hosts = resources["hosts"]
        current = host or environ.get(HOST_VARIABLE) or resources.get("current_host")
        if not isinstance(current, str) or current not in hosts:
            raise ConfigError(
                f"this host is {show_value(current)}, which is not among the hosts "
                f"{show_value(hosts)}{suggest(str(current), hosts)}; the "
                f"name comes from {HOST_VARIABLE} or from current_host in resourceconfig.json; set {HOST_VARIABLE} to one "
                "of the hosts",
                code="SMP201",
            )
        given = {**_json_of(environ, MORE_VARIABLE, dict), **tree.read_config("hyperparameters")}
        decoded = {name: decoded_hyperparameter(value) for name, value in given.items()}
        check_hyperparameters(decoded, str(tree.config_dir / "hyperparameters.json"))
        channels = tree.read_config("inputdataconfig")
        check_channels(channels, tree.config_dir / "inputdataconfig.json")
        words = _json_of(environ, SCRIPT_ARGUMENTS_VARIABLE, list)
        if not all(isinstance(word, str) for word in words):
            raise ConfigError(
                f"{SCRIPT_ARGUMENTS_VARIABLE} is {show_value(words)}; it lists words of the script's command line: write each "
                "as text",
                code="SMP201",
            )
        return cls(
            tree=tree,
            hyperparameters=decoded,
            resources=resources,
            channels=channels,
            current_host=current,
            job_name=environ.get(JOB_NAME_VARIABLE, ""),
            more_arguments=tuple(words),
            has_json_arguments=environ.get(JSON_ARGUMENTS_VARIABLE) == "1",
        )

    def over(self, hosts: Sequence[str], parameters: Mapping[str, Any] | None = None) -> TrainingEnvironment:
        """Return the environment of a job that goes on with some of its hosts.

        Args:
            hosts: the remaining hosts, the leader first.
            parameters: the new ``mp_parameters``; None keeps those of the job.
        """
        groups = [
            {**group, "hosts": [host for host in group.get("hosts", []) if host in hosts]}
            for group in self.resources.get("instance_groups") or []
        ]
        resources = {**self.resources, "hosts": list(hosts)}
        if groups:
            resources["instance_groups"] = groups
        given = {} if parameters is None else {MP_PARAMETERS: dict(parameters)}
        return replace(self, resources=resources, hyperparameters={**self.hyperparameters, **given})

    @property
    def hosts(self) -> list[str]:
        """Return the names of all hosts, the leader's first."""
        return list(self.resources["hosts"])

    @property
    def network_interface(self) -> str:
        """Return the interface through which hosts reach each other."""
        return str(self.resources.get("network_interface_name") or "eth0")

    @property
    def instance_type(self) -> str:
        """Return the instance type of this host, or ``local`` if the platform names none."""
        return str(self.resources.get("current_instance_type") or "local")

    @cached_property
    def user_hyperparameters(self) -> dict[str, Any]:
        """Return the hyperparameters on the script's command line. They include ``mp_parameters``, as with the toolkit."""
        return {k: v for k, v in self.hyperparameters.items() if not k.startswith(PLATFORM_PREFIX)}

    @cached_property
    def framework_parameters(self) -> dict[str, Any]:
        """Return the platform's own hyperparameters (``sagemaker_mpi_enabled`` …)."""
        return {
            k: v
            for k, v in self.hyperparameters.items()
            if k.startswith(PLATFORM_PREFIX) and k not in _CONTAINER_PARAMETERS
        }

    @property
    def entry_point(self) -> str:
        """Return the script's path, relative to the code folder.

        Raises:
            ConfigError: no script is named, it is missing, or it is neither Python nor shell.
        """
        name = self.hyperparameters.get("sagemaker_program")
        code = self.tree.code_dir
        if not name or not isinstance(name, str):
            raise ConfigError(
                f"no entry point: the hyperparameter sagemaker_program is {show_value(name)}, so the launcher does not know "
                "what to "
                f"start; {_held(code, self._scripts())}; give the estimator entry_point='train.py' or another of these",
                code="SMP201",
            )
        if os.path.isabs(name) or os.path.normpath(name).split(os.sep)[0] == os.pardir:
            raise ConfigError(
                f"the entry point {show_value(name)} lies outside the code folder {code}; the launcher runs what was shipped "
                "with the "
                "job: give entry_point a path relative to source_dir, of a file that is in it",
                code="SMP201",
            )
        if not os.path.isfile(code / name):
            present = self._scripts()
            raise ConfigError(
                f"the entry point {show_value(name)} does not exist: {_held(code, present)}{suggest(name, present)}; give "
                "entry_point a "
                "path relative to source_dir, of a file that is in it",
                code="SMP201",
            )
        if Path(name).suffix not in SCRIPT_SUFFIXES:
            raise ConfigError(
                f"the entry point {show_value(name)} is neither a Python nor a shell script: its ending is "
                f"{Path(name).suffix or 'empty'!r}, and the launcher starts .py with Python and .sh with bash; rename it",
                code="SMP201",
            )
        return name

    def _scripts(self) -> list[str]:
        """Return the scripts that could be the entry point. For a large folder this takes a while."""
        code = self.tree.code_dir
        return sorted(p.relative_to(code).as_posix() for p in code.rglob("*") if p.suffix in SCRIPT_SUFFIXES)

    def check_channels(self) -> None:
        """Raise ConfigError, naming the channel and the folder, if a channel's data is missing."""
        for name, channel in self.channels.items():
            path = self.tree.data_dir / name
            mode = channel.get("TrainingInputMode", "File") if isinstance(channel, Mapping) else "File"
            if mode != "Pipe" and not path.exists():
                target = f" (a link to {os.readlink(path)}, which does not exist)" if path.is_symlink() else ""
                raise ConfigError(
                    f"the data of channel {name!r} is missing: {path} does not exist{target}; "
                    f"inputdataconfig.json lists the channels {', '.join(sorted(self.channels))}; give fit() an input "
                    f"for {name!r} that exists, such as file:///absolute/folder",
                    code="SMP201",
                )

    def user_arguments(self) -> list[str]:
        """Return ``--name value`` for every user hyperparameter, sorted by name, and then further words."""
        return [*words_of(self.user_hyperparameters, as_json=self.has_json_arguments), *self.more_arguments]

    def variables(self) -> dict[str, str]:
        """Return all ``SM_*`` variables, as text."""
        tree = self.tree
        entry = self.hyperparameters.get("sagemaker_program") or ""
        group = self.resources.get("current_group_name", "")
        groups = self.resources.get("instance_groups") or []
        log_level = self.hyperparameters.get("sagemaker_container_log_level", _DEFAULT_LOG_LEVEL)
        given = {k: tree.place(v) if isinstance(v, str) else v for k, v in self.user_hyperparameters.items()}
        values: dict[str, Any] = {
            "hosts": self.hosts,
            "current_host": self.current_host,
            "current_instance_type": self.instance_type,
            "current_instance_group": group,
            "current_instance_group_hosts": next(
                (g.get("hosts", []) for g in groups if g.get("instance_group_name") == group), self.hosts
            ),
            "instance_groups": [g.get("instance_group_name") for g in groups],
            "instance_groups_dict": {g.get("instance_group_name"): g for g in groups},
            "distribution_instance_groups": self.hyperparameters.get("sagemaker_distribution_instance_groups", []),
            "is_hetero": len(groups) > 1,
            "num_cpus": cpu_count(),
            "num_gpus": gpu_count(os.environ),
            "num_neurons": 0,
            "model_dir": str(tree.model_dir),
            "module_dir": self.hyperparameters.get("sagemaker_submit_directory") or str(tree.code_dir),
            "module_name": str(Path(entry).with_suffix("")) if entry.endswith(".py") else entry,
            "user_entry_point": entry,
            "user_args": [tree.place(word) for word in self.user_arguments()],
            "input_dir": str(tree.input_dir),
            "input_config_dir": str(tree.config_dir),
            "output_dir": str(tree.output_dir),
            "output_data_dir": str(tree.output_data_dir),
            "output_intermediate_dir": str(tree.intermediate_dir),
            "channels": sorted(self.channels),
            "hps": given,
            "framework_module": "",
            "framework_params": self.framework_parameters,
            # current_host is this host's, even if the platform's file holds the leader's.
            "resource_config": {**self.resources, "current_host": self.current_host},
            "input_data_config": dict(self.channels),
            "network_interface_name": self.network_interface,
            "log_level": log_level,
            "job_name": self.job_name or self.hyperparameters.get("sagemaker_job_name", ""),
        }
        values["training_env"] = {
            "additional_framework_parameters": self.framework_parameters,
            "channel_input_dirs": {name: str(tree.data_dir / name) for name in self.channels},
            "hyperparameters": given,
            "input_dir": str(tree.input_dir),
            "is_master": self.current_host == self.hosts[0],
            "master_hostname": self.hosts[0],
            **{name: values[name] for name in _IN_TRAINING_ENV},
        }
        values.update({f"channel_{name}": str(tree.data_dir / name) for name in self.channels})
        values.update({f"hp_{name}": value for name, value in given.items()})
        return {f"SM_{name.upper()}": _text(value) for name, value in values.items()}


def seconds_of(environ: Mapping[str, str], name: str, default: float) -> float:
    """Return the seconds that a variable sets, or ``default`` if the value is invalid or too large for a clock."""
    try:
        seconds = float(environ.get(name, default))
    except ValueError:
        return default
    return max(0.0, seconds) if seconds <= MOST_SECONDS else default


def cpu_count() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def gpu_count(environ: Mapping[str, str]) -> int:
    """Return how many GPUs the ranks of this host can see, without loading a driver."""
    return device_files.count_visible(len(device_files.nvidia_devices()), environ)


def emulates_cuda(environ: Mapping[str, str]) -> bool:
    """Return whether this host's ranks emulate ``torch.cuda`` on the CPU: it was asked for, and there is no GPU."""
    return emulation.is_asked_for(environ) and not has_gpu(environ)


def has_gpu(environ: Mapping[str, str]) -> bool:
    """Return whether ranks of this host may see a GPU."""
    return gpu_count(environ) > 0 or has_unusual_gpu()


def has_unusual_gpu() -> bool:
    """Return whether there may be GPUs that :func:`gpu_count` does not count."""
    return any(next(Path("/dev").glob(pattern), None) for pattern in _OTHER_DEVICES)


def _held(code: Path, scripts: list[str]) -> str:
    return f"{code} holds {', '.join(scripts[:20]) or 'no .py or .sh file'}"


def _json_of(environ: Mapping[str, str], variable: str, kind: type) -> Any:
    """Return a variable's JSON value, or an empty ``kind`` if the variable is not set.

    Raises:
        ConfigError: the value is not a JSON ``kind`` of usable texts.
    """
    text = environ.get(variable)
    if not text:
        return kind()
    try:
        found, why = strict_json.parse(text), ""
    except ValueError as error:
        found, why = None, f" ({error})"
    is_of_kind = isinstance(found, kind)
    if is_of_kind:
        why = strict_json.unusable_text(found) or ""
    if not is_of_kind or why:
        wanted = "object" if kind is dict else "list"
        raise ConfigError(
            f"{variable} is {show_value(text)}, which is no JSON {wanted} of usable texts{why}; what starts the launcher sets it: "
            f"leave it to that, or write a JSON {wanted}",
            code="SMP201",
        )
    return found


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def words_of(hyperparameters: Mapping[str, Any], *, as_json: bool = False) -> list[str]:
    """Return the words of a command line with these hyperparameters, sorted by name.

    Args:
        as_json: as the drivers of SDK v3 write them: ``--name``, and anything but text as JSON. Otherwise as the training
            toolkit does: one dash before one letter, and Python's text. ``mp_parameters`` are ``a=1,b=2`` in both.
    """
    words = []
    for name, value in sorted(hyperparameters.items()):
        if as_json and name != MP_PARAMETERS:
            text = value if isinstance(value, str) else json.dumps(value)
            words += [f"--{name}", text]
        else:
            dashes = "--" if len(name) > 1 else "-"
            words += [dashes + name, _argument(value)]
    return words


def _argument(value: Any) -> str:
    """Return a hyperparameter's value as a word of the command line.

    A dictionary becomes ``a=1,b=2``, as scripts that parse ``--mp_parameters`` expect. Other values become Python's text.
    """
    if isinstance(value, Mapping):
        return ",".join(f"{key}={value[key]}" for key in sorted(value))
    return "" if value is None else str(value)
