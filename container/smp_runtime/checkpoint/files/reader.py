"""Reading tensors out of a partial checkpoint: by name and region, streamed from mapped files, in any process."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from smp_config.errors import kind_of
from smp_runtime.checkpoint.files.atomic_file import damaged_file, map_file
from smp_runtime.checkpoint.files.manifest import EXTRA, MASTER, MODULE, Manifest, Piece, TensorRecord
from smp_runtime.checkpoint.files.opened_files import CheckpointFiles, Identity
from smp_runtime.checkpoint.files.tensor_regions import TensorRegion, copy_common
from smp_runtime.errors import CheckpointError

#: Sections of a file that store a state key, if it is not at ``file["state"][name][key]``.
_SECTIONS = {MODULE: ("module", "shards"), MASTER: ("masters",)}
_FLAT = "fp32_flat_groups"


class CheckpointReader:
    """The tensors of a partial checkpoint.

    Files are mapped, not read: what is copied out of them is all the memory that reading takes.

    Args:
        identity: of the folder when its manifest was read; None where it does not matter.
    """

    def __init__(self, folder: Path, manifest: Manifest, identity: Identity | None = None) -> None:
        self.folder = folder
        self.manifest = manifest
        self._identity = identity
        self._opened: CheckpointFiles | None = None
        self._files: dict[str, Any] = {}
        self._pieces: dict[tuple[str, str], list[tuple[str, Piece]]] = {}
        for file, keys in manifest.pieces.items():
            for key, found in keys.items():
                for name, piece in found.items():
                    self._pieces.setdefault((key, name), []).append((file, piece))

    @property
    def files(self) -> CheckpointFiles:
        """Return the folder, opened at the first use; later reads use it even if its name changes.

        Raises:
            CheckpointError: it was replaced by another folder, or is gone.
        """
        if self._opened is None:
            self._opened = CheckpointFiles(self.folder, self._identity)
        return self._opened

    # -- what there is ---------------------------------------------------------------------------------------------

    def holds(self, key: str, name: str) -> bool:
        """Return whether any file has ``key`` of the tensor called ``name``."""
        return (key, name) in self._pieces

    def weight_key(self, name: str) -> str:
        """Return the state key with the most exact weights of a parameter: float32 ones if there are any."""
        return MASTER if self.holds(MASTER, name) else MODULE

    def state_keys(self) -> dict[str, list[str]]:
        """Return the keys of the optimizer's state, by the names of the parameters that have any."""
        found: dict[str, list[str]] = {}
        for key, name in self._pieces:
            if key not in (MODULE, MASTER, EXTRA):
                found.setdefault(name, []).append(key)
        return found

    def files_with(self, key: str, name: str, wanted: TensorRegion | None = None) -> list[str]:
        """Return the files with a region of a tensor; a region of None means the whole tensor."""
        record = self._record(name)
        return [
            file
            for file, piece in self._pieces.get((key, name), ())
            if wanted is None or piece.whole_object or wanted.overlaps(TensorRegion.of_piece(record, piece))
        ]

    # -- reading ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def fill(self, target: torch.Tensor, wanted: TensorRegion, key: str, name: str) -> None:
        """Read a region into a tensor; types may differ.

        Args:
            target: contiguous, with ``wanted.elements`` elements; any shape and device.
            wanted: the region, of a tensor of the shape that was saved.
            key: of the state: ``"module"``, ``"master"``, or one of the optimizer's such as ``"exp_avg"``.
            name: global name.

        Raises:
            CheckpointError: the files do not have all of it.
        """
        record = self._record(name)
        given = [
            (file, piece, TensorRegion.of_piece(record, piece))
            for file, piece in self._pieces.get((key, name), ())
            if not piece.whole_object
        ]
        crossed = any(r.axis is not None and wanted.axis not in (None, r.axis) for _, _, r in given)
        if crossed:  # saved in slices along another axis: through the whole tensor
            whole = torch.empty(record.shape, dtype=target.dtype, device="cpu")
            self.fill(whole, TensorRegion.of(record.shape), key, name)
            target.view(-1).copy_(wanted.cut(whole).reshape(-1)[wanted.first : wanted.last])
            return
        flat = target.view(-1)
        if not wanted.is_slice and not all(wanted.same_slice(r) or not wanted.overlaps(r) for _, _, r in given):
            # A part of a slice, from other slices: through the slice.
            slice_ = torch.empty(wanted.slice_shape, dtype=target.dtype, device="cpu")
            region = TensorRegion.of(wanted.shape, wanted.axis, wanted.cuts)
            self.fill(slice_, region, key, name)
            flat.copy_(slice_.view(-1)[wanted.first : wanted.last])
            return
        copied = 0
        for file, piece, region in given:
            if wanted.overlaps(region):
                copied += copy_common(flat, wanted, self._tensor(file, key, name, piece), region)
        if copied != wanted.elements:
            raise CheckpointError(
                f"{self.folder} has {copied:,} of the {wanted.elements:,} wanted elements of {key} of {name}: files of some ranks "
                "are missing, or the checkpoint is damaged; use another one"
            )

    def whole(self, key: str, name: str) -> torch.Tensor:
        """Return a whole tensor on the CPU.

        If one file has all of it, the result is a view of the mapped file and must not be written to.
        """
        record = self._record(name)
        found = self._pieces.get((key, name), [])
        if len(found) == 1:
            file, piece = found[0]
            region = TensorRegion.of_piece(record, piece)
            if region.elements == record.elements and not piece.whole_object:
                return self._tensor(file, key, name, piece).view(record.shape)
        dtype = self._tensor(found[0][0], key, name, found[0][1]).dtype if found else torch.float32
        tensor = torch.empty(record.shape, dtype=dtype, device="cpu")
        self.fill(tensor, TensorRegion.of(record.shape), key, name)
        return tensor

    def dtype_of(self, key: str, name: str) -> torch.dtype:
        """Return the type in which the tensor was saved."""
        file, piece = self._pieces[key, name][0]
        return self._tensor(file, key, name, piece).dtype

    def is_object(self, key: str, name: str) -> bool:
        """Return whether the key is an object that belongs to the whole parameter, such as a step counter."""
        return self._pieces[key, name][0][1].whole_object

    def object(self, key: str, name: str, bounds: tuple[int, ...] | None = None) -> Any:
        """Return an object that belongs to a whole parameter.

        Args:
            bounds: starts and stops along the tensor parallel axis of the slice that the object should belong to.

        Raises:
            CheckpointError: there are different objects for slices that were split in another way.
        """
        found = [(file, piece) for file, piece in self._pieces[key, name] if piece.whole_object]
        for file, piece in found:
            if piece.tensor is None or piece.tensor == bounds:
                return self._state(file, key, name)
        value = self._state(found[0][0], key, name)
        if not isinstance(value, torch.Tensor) or value.numel() == 1:
            return value
        raise CheckpointError(
            f"the optimizer's {key!r} of {name} belongs to {len(found)} tensor parallel parts as a whole and cannot be divided "
            "otherwise; resume with the same tensor_parallel_degree, or with load_optimizer=False"
        )

    def extra(self, name: str) -> Any:
        """Return a module's extra state by its name in a ``state_dict``; None if there is none."""
        file = next((file for file, keys in self.manifest.pieces.items() if name in keys.get(EXTRA, {})), None)
        if file is None:
            return None
        try:
            return self._content(file)["module"][name]
        except (KeyError, TypeError, IndexError) as error:
            raise self._lacking(file, name, error) from None

    def settings(self) -> list[dict[str, Any]] | None:
        """Return the optimizer's parameter groups with all settings; None without optimizer.

        Their ``"params"`` are global names.

        Raises:
            CheckpointError: the file does not have them.
        """
        file = self._first_file("optimizer_")
        if file is None:
            return None
        content = self._content(file)
        groups: Any = content.get("param_groups") if isinstance(content, dict) else None
        are_groups = isinstance(groups, list) and all(isinstance(group, dict) for group in groups)
        if not are_groups:
            raise self._lacking(file, "param_groups", TypeError(f"it is {kind_of(groups)}"))
        optimizer = self.manifest.optimizer
        saved = [] if optimizer is None else optimizer.groups
        if len(groups) != len(saved):
            raise self._lacking(file, "param_groups", ValueError(f"{len(groups)} instead of {len(saved)} groups"))
        return groups

    def _first_file(self, prefix: str) -> str | None:
        """Return the first file of the checkpoint whose name begins with ``prefix``, or None."""
        names = sorted(name for name in self.manifest.files if name.startswith(prefix))
        return names[0] if names else None

    def loss_scale(self) -> Any:
        """Return the state of the loss scaler; None if there is none.

        Raises:
            CheckpointError: the file contains something else.
        """
        file = self._first_file("fp16_states_")
        if file is None:
            return None
        content = self._content(file)
        found = content.get("loss_scaler") if isinstance(content, dict) else content
        if found is not None and not isinstance(found, dict):
            raise self._lacking(file, "loss_scaler", TypeError(f"it is {kind_of(found)}"))
        return found

    def content(self, file: str) -> Any:
        """Return a file's content, with mapped tensors; None if the checkpoint has no such file."""
        return self._content(file) if file in self.manifest.files else None

    def open(self, files: Iterable[str]) -> None:
        """Map files now, so that they can be read even when their names are gone."""
        for file in files:
            self._content(file)

    def check(self, files: Iterable[str]) -> None:
        """Check that the files contain exactly the states in the manifest, with their sizes; load nothing.

        Raises:
            CheckpointError: a file does not.
        """
        for file in files:
            self._check_states(file)
            for key, found in self.manifest.pieces.get(file, {}).items():
                for name, piece in found.items():
                    if key == EXTRA:
                        self.extra(name)
                    elif piece.whole_object:
                        self._state(file, key, name)
                    else:
                        tensor = self._tensor(file, key, name, piece)
                        expected = TensorRegion.of_piece(self._record(name), piece).elements
                        if tensor.numel() != expected or tensor.is_meta:
                            why = ValueError(f"it has {tensor.numel():,} elements instead of {expected:,}")
                            raise self._lacking(file, f"{key} of {name}", why)

    def _check_states(self, file: str) -> None:
        """Raise CheckpointError if the file has an optimizer state that the manifest does not list.

        An optimizer that receives only some of its states fails in a later step or continues with old ones.
        """
        pieces = self.manifest.pieces.get(file, {})
        content = self._content(file)
        states = content.get("state") if isinstance(content, dict) else None
        if not isinstance(states, dict):
            return
        for name, values in states.items():
            keys = values if isinstance(values, dict) else ()
            for key in keys:
                if name not in pieces.get(key, {}):
                    raise CheckpointError(
                        f"{self.folder / file} has the state {key!r} of {name}, of which its manifest does not know: one of "
                        "them was changed; use another checkpoint"
                    )

    def close(self) -> None:
        """Let the files go."""
        self._files.clear()
        self._opened = None

    def _record(self, name: str) -> TensorRecord:
        record = self.manifest.parameters.get(name) or self.manifest.buffers.get(name)
        if record is None:
            raise CheckpointError(f"the checkpoint {self.folder} has no tensor {name!r}")
        return record

    def _tensor(self, file: str, key: str, name: str, piece: Piece) -> torch.Tensor:
        """Return a piece as a flat tensor.

        Raises:
            CheckpointError: the file does not have it.
        """
        content = self._content(file)
        try:
            if piece.place is not None:
                buffer, offset = piece.place
                length = TensorRegion.of_piece(self._record(name), piece).elements
                found = content[_FLAT][buffer][offset : offset + length]
            else:
                sections = [content.get(section, {}) for section in _SECTIONS.get(key, ())]
                holder = next((section for section in sections if name in section), None)
                found = content["state"][name][key] if holder is None else holder[name]
            flat: torch.Tensor = found.reshape(-1)
        except (KeyError, IndexError, TypeError, AttributeError, RuntimeError, ValueError) as error:
            raise self._lacking(file, f"{key} of {name}", error) from None
        return flat

    def _state(self, file: str, key: str, name: str) -> Any:
        """Return a state that belongs to the whole parameter; raise as :meth:`_tensor`."""
        try:
            return self._content(file)["state"][name][key]
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise self._lacking(file, f"{key} of {name}", error) from None

    def _lacking(self, file: str, what: str, error: Exception) -> CheckpointError:
        said = str(error).splitlines()[0] if str(error) else ""
        why = f"lacks {said}" if isinstance(error, KeyError) else f"{type(error).__name__}: {said}"
        return damaged_file(self.folder / file, ValueError(f"{what} is not there as the manifest says: {why}"))

    def _content(self, file: str) -> Any:
        if file not in self._files:
            self._files[file] = map_file(self.folder / file, self.files)
        return self._files[file]
