"""Settings of version 2 of the library (``import torch.sagemaker as tsm``): nine documented keys and ``fp8``, typed.

Source: the developer guide's page ``distributed-model-parallel-v2-reference``. The notebook's ``parameters``, the file or
dictionary that a script gives to ``tsm.init``, and the hyperparameter ``mp_parameters`` of a job are the same class.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError, model_validator

from smp_config.errors import ConfigError, kind_of, show_value, suggest
from smp_config.formats import strict_json
from smp_config.formats.numbers_given import Whole  # noqa: TC001 - pydantic reads the types
from smp_config.parameters import KEYS
from smp_config.version2.topology import lay_out

if TYPE_CHECKING:
    from smp_config.topology import Topology

_FLAG = "true or false, without quotes (in Python True or False)"
_DEGREE = "a whole number from 1 to the number of processes"

#: Settings that are taken for scripts that have them, and change nothing; a false one asks for nothing.
_WITHOUT_EFFECT = {
    "allow_empty_shards": "PyTorch's own sharding pads small parameters",
}

#: What each setting may be, for messages.
_ALLOWED = {
    "hybrid_shard_degree": "a whole number from 0 to the number of processes; 0 leaves it to the script's FSDP, 1 shards nothing",
    "sm_activation_offloading": _FLAG,
    "activation_loading_horizon": "a whole number of layers of 1 or more, such as 2",
    "fsdp_cache_flush_warnings": _FLAG,
    "allow_empty_shards": _FLAG,
    "tensor_parallel_degree": _DEGREE,
    "context_parallel_degree": _DEGREE,
    "expert_parallel_degree": _DEGREE,
    "random_seed": "a whole number of 0 or more, such as 12345",
    "fp8": _FLAG,
}


class Version2Parameters(BaseModel):
    """All settings of version 2, with the documented names and defaults. Degrees count processes.

    Raises:
        ConfigError: from :meth:`from_parameters`; pydantic's ``ValidationError`` when constructed directly.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    hybrid_shard_degree: Whole = Field(
        0,
        ge=0,
        description="Processes that share parameters, gradients and optimizer state; 1: none, 0: as the script's FSDP has it, "
        "or as many as there are with tensor parallelism.",
    )
    sm_activation_offloading: StrictBool = Field(
        True,
        description="Checkpointed activations that a script offloads wait in CPU memory, and are loaded ahead of use.",
    )
    activation_loading_horizon: Whole = Field(
        2, ge=1, description="Layers whose offloaded activations are in device memory at once."
    )
    fsdp_cache_flush_warnings: StrictBool = Field(
        True, description="Warn when the memory allocator empties its cache, which slows a step down."
    )
    allow_empty_shards: StrictBool = Field(
        False, description="Let ranks have no part of a parameter that is smaller than the number of ranks."
    )
    tensor_parallel_degree: Whole = Field(1, ge=1, description="Processes that share each layer; needs tsm.transform.")
    context_parallel_degree: Whole = Field(
        1, ge=1, description="Processes that share each sequence out, which the script cuts; needs tsm.transform."
    )
    expert_parallel_degree: Whole = Field(
        1, ge=1, description="Processes that share the experts of a mixture out; needs tsm.transform."
    )
    random_seed: Whole = Field(
        12345,
        ge=0,
        description="Seed of what tensor and expert parallel ranks draw on their own; their ranks are added.",
    )
    fp8: StrictBool = Field(
        False, description="Linear layers multiply numbers of 8 bits in all passes; needs tsm.transform."
    )

    @classmethod
    def from_parameters(cls, given: Mapping[str, Any]) -> Version2Parameters:
        """Check settings by their documented names.

        Raises:
            ConfigError: an unknown name, a wrong type, or values that exclude each other.
        """
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"the parameters are {kind_of(given)}; pass a dictionary such as {{'hybrid_shard_degree': 8}}",
                code="SMP101",
            )
        for name in given:
            if name not in cls.model_fields:
                raise ConfigError(_unknown(name, list(cls.model_fields)), code="SMP101")
        try:
            return cls(**given)
        except ValidationError as error:
            first = error.errors()[0]
            if not first["loc"]:
                raise ConfigError(first["msg"].removeprefix("Value error, "), code="SMP101") from None
            name = str(first["loc"][0])
            value = f"{show_value(first['input'])}, {kind_of(first['input'])}"
            raise ConfigError(f"{name} is {value}; write {_ALLOWED[name]}, or leave it out", code="SMP101") from None

    @classmethod
    def from_given(cls, given: Any) -> Version2Parameters:
        """Check settings that are a dictionary, its JSON text, or None for none.

        Raises:
            ConfigError: no such thing, or as for :meth:`from_parameters`.
        """
        if isinstance(given, str):
            try:
                given = strict_json.parse(given)
            except ValueError as error:
                raise ConfigError(
                    f"the parameters of version 2 are {show_value(given)}, which is no JSON ({error}); write one JSON object such "
                    'as {"hybrid_shard_degree": 8}',
                    code="SMP101",
                ) from None
        return cls.from_parameters({} if given is None else given)

    @classmethod
    def from_file(cls, path: str | Path) -> Version2Parameters:
        """Read settings from a JSON file.

        Raises:
            ConfigError: no such file, or none that holds a JSON object with settings.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot read the parameters in {path}: {error}; it must be a JSON file", code="SMP101"
            ) from None
        if not isinstance(content, dict):
            raise ConfigError(
                f"{path} holds {kind_of(content)}; it must hold one JSON object with parameters", code="SMP101"
            )
        return cls.from_parameters(content)

    @model_validator(mode="after")
    def _context(self) -> Version2Parameters:
        beside = {
            f"expert_parallel_degree is {self.expert_parallel_degree}": self.expert_parallel_degree > 1,
            "fp8 is true": self.fp8,
        }
        for what, is_so in beside.items() if self.context_parallel_degree > 1 else ():
            if is_so:
                raise ValueError(
                    f"context_parallel_degree is {self.context_parallel_degree} and {what}, which do not go together: remove "
                    "one of them"
                )
        return self

    def to_mp_parameters(self) -> dict[str, Any]:
        """Return the settings that were given, as ``mp_parameters`` carries them."""
        return self.model_dump(exclude_unset=True)

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment variables for the interpreter of every rank: none."""
        return {}

    def shard_degree(self, world_size: int) -> int:
        """Return the number of ranks that share one copy of the state; 0 leaves that to the script's FSDP."""
        model = self.tensor_parallel_degree * self.expert_parallel_degree
        if self.hybrid_shard_degree or model == 1:
            return self.hybrid_shard_degree
        return max(1, world_size // model)

    def topology(self, world_size: int) -> Topology:
        """Lay the ranks out: tensor parallel ranks are neighbors, then come expert parallel and sharding ranks.

        Raises:
            ConfigError: the degrees do not divide the number of processes.
        """
        return lay_out(
            world_size,
            tensor=self.tensor_parallel_degree,
            shard=self.shard_degree(world_size),
            expert=self.expert_parallel_degree,
            context=self.context_parallel_degree,
        )

    def warnings(self) -> list[str]:
        """Return sentences on settings that were given and have no effect."""
        found = []
        for name, reason in _WITHOUT_EFFECT.items():
            value = getattr(self, name)
            if name in self.model_fields_set and value is not False:
                found.append(f"{name} is {value}, which has no effect: {reason}")
        if "activation_loading_horizon" in self.model_fields_set and not self.sm_activation_offloading:
            found.append(
                f"activation_loading_horizon is {self.activation_loading_horizon}, which has no effect: sm_activation_offloading "
                "is false, and PyTorch's own offload_wrapper loads no activations ahead"
            )
        return found


def _unknown(name: object, known: list[str]) -> str:
    """Return the message for a key that version 2 does not have."""
    if name in KEYS:
        return (
            f"unknown parameter {name!r}: it belongs to version 1 of the model parallel library (scripts that import "
            'smdistributed.modelparallel.torch), which starts with "mpi": {"enabled": True, "processes_per_host": 8} in place of '
            f'"torch_distributed"; remove it, since version 2 has {", ".join(known)}'
        )
    return (
        f"version 2 of the library has no parameter {show_value(name)}{suggest(str(name), known)}; it has {', '.join(known)}: "
        "remove it, or correct its name"
    )
