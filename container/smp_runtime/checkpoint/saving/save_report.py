"""What ranks report of a save, and the manifest that rank 0 makes of all reports."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from smp_config import Group
from smp_config.version import __version__
from smp_runtime.checkpoint.files.manifest import FileRecord, Manifest, OptimizerRecord, Piece, TensorRecord
from smp_runtime.checkpoint.files.name_translation import translation_names
from smp_runtime.checkpoint.live_state import Updated, updated_parameters
from smp_runtime.comm.control import host_name

if TYPE_CHECKING:
    from smp_runtime.job.session import Session
    from smp_runtime.model.distributed_model import DistributedModel
    from smp_runtime.optim.distributed_optimizer import DistributedOptimizer


@dataclass
class Report:
    """What a rank has written.

    Attributes:
        failure: why it could not, or None.
        pieces: by file, state key and name.
        buffers: the same.
    """

    failure: str | None = None
    files: dict[str, FileRecord] = field(default_factory=dict)
    pieces: dict[str, dict[str, dict[str, Piece]]] = field(default_factory=dict)
    parameters: dict[str, TensorRecord] = field(default_factory=dict)
    buffers: dict[str, TensorRecord] = field(default_factory=dict)
    host: str = ""  # the rank's host, if the report was sent to rank 0

    def to_json(self) -> list[Any]:
        """Return the report for rank 0, in the format of a manifest."""
        return [self.failure, host_name(), Manifest("", files=self.files, **self._tensors()).to_json()]

    @classmethod
    def from_json(cls, found: list[Any]) -> Report:
        """Return a report from the result of :meth:`to_json`."""
        failure, host, text = found
        told = Manifest.from_json(text)
        return cls(failure, told.files, told.pieces, told.parameters, told.buffers, host)

    def _tensors(self) -> dict[str, Any]:
        return {"pieces": self.pieces, "parameters": self.parameters, "buffers": self.buffers}


@dataclass(frozen=True)
class Described:
    """What rank 0 knows of the whole checkpoint before anything is written."""

    tag: str
    topology: dict[str, Any]
    precision: str
    optimizer: OptimizerRecord | None
    translations: list[str]
    order: list[str]
    steps: int
    has_content: bool


def describe(
    session: Session,
    tag: str,
    model: DistributedModel,
    optimizer: DistributedOptimizer | None,
    *,
    has_content: bool = True,
) -> Described:
    """Return the values of the manifest that do not depend on the files that ranks have written."""
    topology = {
        "world_size": session.ranks.control.size,
        "pipeline": session.ranks.size(Group.PP),
        "tensor": session.ranks.size(Group.TP),
        "sharded": session.ranks.cfg.sharded_data_parallel_degree,
        "shard_optimizer_state": session.ranks.cfg.shard_optimizer_state,
        "placement": session.ranks.topology.placement,
    }
    precision = "fp16" if session.ranks.cfg.fp16 else "bf16" if session.ranks.cfg.bf16 else "fp32"
    entries = updated_parameters(model, optimizer) if optimizer is not None else []
    return Described(
        tag,
        topology,
        precision,
        optimizer_record(optimizer, entries) if optimizer is not None else None,
        translation_names(session.module_manager.translate_functions),
        list(model.module.state_dict(keep_vars=True)),
        session.progress.step,
        has_content,
    )


def merge(described: Described, reports: list[Report], save: str) -> Manifest:
    """Merge the reports of all ranks into one manifest; the first of several copies of a file counts.

    Args:
        save: an id, the same on every host and different for every save.
    """
    manifest = Manifest(
        described.tag,
        time.time(),
        __version__,
        described.topology,
        described.precision,
        optimizer=described.optimizer,
        translations=described.translations,
        save=save,
        steps=described.steps,
        has_content=described.has_content,
    )
    for report in reports:
        for name, record in report.files.items():
            former = manifest.files.setdefault(name, record)
            if record.checksum not in former.checksums:
                manifest.files[name] = replace(former, copies=(*former.copies, record.checksum))
        for file, pieces in report.pieces.items():
            manifest.pieces.setdefault(file, pieces)
        manifest.parameters.update(report.parameters)
        manifest.buffers.update(report.buffers)
    for records in (manifest.parameters, manifest.buffers):
        ordered = {name: records[name] for name in described.order if name in records}
        rest = {name: record for name, record in records.items() if name not in ordered}
        records.clear()
        records.update({**ordered, **rest})
    if manifest.optimizer is not None:
        keys = {
            key
            for found in manifest.pieces.values()
            for key, pieces in found.items()
            if any(not piece.whole_object for piece in pieces.values())
        }
        manifest.optimizer.states = sorted(keys - {"module", "master"})
    return manifest


def optimizer_record(optimizer: DistributedOptimizer, entries: Sequence[Updated]) -> OptimizerRecord:
    """Return the optimizer's groups for the manifest."""
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        plain = {key: value for key, value in group.items() if key != "params" and _is_json(value)}
        names = [entry.name for entry in entries if entry.group == index]
        groups.append({**plain, "params": names})
    return OptimizerRecord(type(optimizer.optimizer).__name__, groups)


def _is_json(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_json(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)
