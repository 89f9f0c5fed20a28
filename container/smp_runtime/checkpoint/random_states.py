"""Random numbers of a rank: saved by every rank, continued where the topology is the same."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from smp_runtime.tensor_parallel.random_tracker import tracker_state

if TYPE_CHECKING:
    from smp_runtime.job.session import Session

logger = logging.getLogger("smp")


def file_name(rank: int) -> str:
    """The file of a rank's random state."""
    return f"rng_{rank}.pt"


def random_state(session: Session) -> dict[str, Any]:
    """This rank's generators, and what tensor parallel layers derive theirs from."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if session.ranks.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(session.ranks.device)
    tracker = tracker_state(session.ranks)
    if tracker is not None:
        state["tensor_parallel"] = tracker
    return state


def restore(session: Session, state: dict[str, Any] | None, same_topology: bool) -> None:
    """Continue a rank's random numbers; with other degrees every rank keeps its own, since none corresponds."""
    if state is None or not same_topology:
        if session.ranks.rank == 0:
            logger.info("random numbers go on from this job's seeds: the checkpoint was saved with other degrees")
        return
    torch.set_rng_state(state["cpu"])
    if session.ranks.device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], session.ranks.device)
    tracker_state(session.ranks, state.get("tensor_parallel"))
