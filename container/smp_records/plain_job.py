"""Facts that ranks of a plain PyTorch script write for ``smp-estimator verify --plain``, beside their recorded numbers.

Numbers show that two tensors differ. These facts show why: learning rates, clipping, ties between parameters, and the order of
samples. Each rank writes one JSON file, and replaces it as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from smp_config.errors import ConfigError

#: Stands for the name of a function that returns batches, if there is none.
NO_FUNCTION = "-"
FACTS_PREFIX, FACTS_SUFFIX = "plain-rank", ".json"


@dataclass
class LoaderFacts:
    """The batches that one ``DataLoader`` has yielded on a rank.

    Attributes:
        sampler: name of the sampler's class.
        is_distributed: whether the sampler divides samples among ranks.
        shuffles: whether the sampler is to yield another order in each epoch.
        epochs: by epoch, a digest of each batch.
    """

    sampler: str = ""
    is_distributed: bool = False
    shuffles: bool = False
    epochs: list[list[str]] = field(default_factory=list)


@dataclass
class ParameterFacts:
    """The state of a parameter on a rank, over all recorded updates."""

    is_trainable: bool = True
    has_optimizer: bool = False
    has_gradient: bool = False
    has_changed: bool = False


@dataclass
class PlainFacts:
    """The facts of one rank.

    Attributes:
        learning_rates: by update, the rate of each parameter group.
        scalings: by update, the factor between the gradients after the last backward pass and those at the update; None if they are
            no multiples.
        loss_weights: by update, the gradient of the mean loss in each backward pass; None if the loss is no scaled mean.
        clip_norms: by update, the norms by which gradients were clipped.
        broken_ties: groups of parameters that were one parameter before the script changed or wrapped the model.
        has_loss_scale: whether a ``GradScaler`` multiplies the loss.
        drew_other_weights: whether the script's first weights differ from those that it was given.
        has_statistics: whether the model has batch norms.
        end: why the script ended after the recorded updates, if it failed there.
    """

    rank: int = 0
    world: int = 1
    learning_rates: list[list[float]] = field(default_factory=list)
    scalings: list[float | None] = field(default_factory=list)
    loss_weights: list[list[float | None]] = field(default_factory=list)
    clip_norms: list[list[float]] = field(default_factory=list)
    broken_ties: list[list[str]] = field(default_factory=list)
    loaders: list[LoaderFacts] = field(default_factory=list)
    parameters: dict[str, ParameterFacts] = field(default_factory=dict)
    has_loss_scale: bool = False
    drew_other_weights: bool = False
    has_statistics: bool = False
    end: str = ""

    def write(self, folder: Path) -> None:
        """Write the facts into a folder, in place of those that the rank wrote before."""
        path = folder / f"{FACTS_PREFIX}{self.rank:05}{FACTS_SUFFIX}"
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(self)), encoding="utf-8")
        draft.replace(path)


def read_facts(folder: Path) -> list[PlainFacts]:
    """Return the facts of all ranks, in their order.

    Raises:
        ConfigError: there are none, or damaged ones.
    """
    found = [_read(path) for path in sorted(folder.glob(f"{FACTS_PREFIX}*{FACTS_SUFFIX}"))]
    if not found:
        raise ConfigError(
            f"{folder} holds no {FACTS_PREFIX}*{FACTS_SUFFIX}: the ranks ended before they wrote what they recorded; read the log "
            "beside the folder",
            code="SMP119",
        )
    return found


def _read(path: Path) -> PlainFacts:
    try:
        content: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        parameters = {name: ParameterFacts(**found) for name, found in content["parameters"].items()}
        loaders = [LoaderFacts(**found) for found in content["loaders"]]
        return PlainFacts(**{**content, "parameters": parameters, "loaders": loaders})
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{path} is no record of a rank of verify --plain ({type(error).__name__}: {str(error)[:200]}); run the command again",
            code="SMP119",
        ) from None
