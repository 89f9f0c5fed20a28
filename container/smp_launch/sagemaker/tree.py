"""The platform's folders of a host: ``/opt/ml``, or the folder in ``SAGEMAKER_BASE_DIR``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smp_config.errors import ConfigError
from smp_config.formats import strict_json
from smp_launch.errors import LaunchError
from smp_launch.sagemaker.platform_files import text_of

#: Names the base folder.
BASE_VARIABLE = "SAGEMAKER_BASE_DIR"

#: The base folder in a container of the platform.
DEFAULT_BASE = "/opt/ml"

#: Names the folder of the user's files if it is not ``code`` below the base: a job of SDK v3 has a channel for it.
CODE_VARIABLE = "SMP_LAUNCH_CODE_DIR"


@dataclass(frozen=True)
class Tree:
    """One host's folders; ``base`` is SageMaker's ``/opt/ml``, and ``code`` the user's files if they lie elsewhere."""

    base: Path
    code: Path | None = field(default=None, kw_only=True)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Tree:
        """Return the tree of this host."""
        code = environ.get(CODE_VARIABLE)
        return cls(Path(environ.get(BASE_VARIABLE) or DEFAULT_BASE).absolute(), code=Path(code) if code else None)

    def of_host(self, host: str, current_host: str) -> Tree:
        """Return the tree of another simulated host: the same path with its name instead of this host's name.

        Raises:
            LaunchError: no folder of the path has this host's name.
        """
        if host == current_host:
            return self
        parts = list(self.base.parts)
        # From the end: a folder further up may happen to have the host's name.
        for at in range(len(parts) - 1, -1, -1):
            if parts[at] == current_host:
                parts[at] = host
                return Tree(Path(*parts))
        raise LaunchError(
            f"the tree of host {host!r} cannot be found: {BASE_VARIABLE} is {self.base}, and no folder of it is called "
            f"{current_host!r}; simulated hosts need one tree each, such as JOB/{current_host}/opt/ml and "
            f"JOB/{host}/opt/ml",
            code="SMP201",
        )

    def place(self, value: str) -> str:
        """Return where a path of the platform, ``/opt/ml`` or below, lies in this tree. Return other text unchanged."""
        if value != DEFAULT_BASE and not value.startswith(f"{DEFAULT_BASE}/"):
            return value
        return f"{self.base}{value.removeprefix(DEFAULT_BASE)}"

    @property
    def input_dir(self) -> Path:
        """Return ``input``."""
        return self.base / "input"

    @property
    def config_dir(self) -> Path:
        """Return ``input/config``: the job's description, one JSON file for each part."""
        return self.input_dir / "config"

    @property
    def data_dir(self) -> Path:
        """Return ``input/data``: a folder for each channel."""
        return self.input_dir / "data"

    @property
    def code_dir(self) -> Path:
        """Return ``code``: the user's files."""
        return self.code or self.base / "code"

    @property
    def model_dir(self) -> Path:
        """Return ``model``, which becomes ``model.tar.gz``."""
        return self.base / "model"

    @property
    def output_dir(self) -> Path:
        """Return ``output``."""
        return self.base / "output"

    @property
    def output_data_dir(self) -> Path:
        """Return ``output/data``, which becomes ``output.tar.gz``."""
        return self.output_dir / "data"

    @property
    def intermediate_dir(self) -> Path:
        """Return ``output/intermediate``."""
        return self.output_dir / "intermediate"

    @property
    def failure_file(self) -> Path:
        """Return ``output/failure``: why the job failed."""
        return self.output_dir / "failure"

    def read_config(self, name: str) -> dict[str, Any]:
        """Read ``input/config/<name>.json``; raises ConfigError if it is missing, not JSON, or not an object."""
        path = self.config_dir / f"{name}.json"
        try:
            text = text_of(path)
        except (OSError, UnicodeDecodeError) as error:
            present = sorted(name for name in _names_in(self.config_dir) if name.endswith(".json"))
            raise ConfigError(
                f"{path} cannot be read ({_reason(error)}); the platform writes it before the job starts and the folder "
                f"holds {', '.join(present) or 'no JSON file'}; point {BASE_VARIABLE} to a job's opt/ml folder, or "
                "start the job with fit()",
                code="SMP201",
            ) from None
        try:
            value = strict_json.parse(text)
        except ValueError as error:
            raise ConfigError(
                f"{path} is not JSON: {error}; it holds {len(text)} "
                "characters and may have been cut or edited; write it again as one JSON object",
                code="SMP201",
            ) from None
        if not isinstance(value, dict):
            raise ConfigError(
                f"{path} holds a JSON {type(value).__name__}, not an object; the launcher reads its values by name; "
                'write it as {"name": value, ...}',
                code="SMP201",
            )
        if why := strict_json.unusable_text(value):
            raise ConfigError(
                f"{path}: {why}; what it holds becomes variables, folders and words of command lines: remove that character",
                code="SMP201",
            )
        return value


def _names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
