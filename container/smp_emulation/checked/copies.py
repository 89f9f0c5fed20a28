"""Copies between the host, pinned or not, and emulated devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from smp_emulation.checked.streams.memory import StoragePlace, view_of

if TYPE_CHECKING:
    from smp_emulation.checked.streams.device import Devices

#: PyTorch's own operations.
_aten = torch.ops.aten


class Copies:
    """Copies of tensors; those that wait for nothing are work of a stream, and the host waits for the others."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices

    def run(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        """Run ``copy_`` or ``_to_copy`` if at least one of the two tensors is on a device."""
        if func is _aten.copy_.default:
            waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            self._copy(args[0], args[1], waits=waits)
            return args[0]
        source, asked = args[0], kwargs.get("device")
        number = self._devices.device_of(source)
        if asked is not None and torch.device(asked).type == "cuda":
            number = self._devices.index(asked)
        return self.moved(source, number, dtype=kwargs.get("dtype"), memory_format=kwargs.get("memory_format"))

    def moved(
        self,
        source: torch.Tensor,
        number: int | None,
        *,
        dtype: torch.dtype | None = None,
        waits: bool = True,
        memory_format: Any = None,
    ) -> torch.Tensor:
        """Return a copy of ``source`` on device ``number``, or in host memory if ``number`` is None."""
        form = torch.empty_like(
            torch.empty_strided(source.size(), source.stride(), dtype=source.dtype, device="meta"),
            dtype=dtype or source.dtype,
            memory_format=memory_format or torch.preserve_format,
        )
        if number is None:
            made = torch.empty_strided(form.size(), form.stride(), dtype=form.dtype)
        else:
            made = self._devices.new_tensor(form, number, self._devices.current(number))
        self._copy(made, source, waits=waits)
        return made

    def _copy(self, target: torch.Tensor, source: torch.Tensor, *, waits: bool) -> None:
        devices = self._devices
        to, of = devices.memory.place_of(target), devices.memory.place_of(source)
        into = None if to is None else to.device
        out_of = None if of is None else of.device
        number = out_of if into is None else into
        if number is None:
            raise AssertionError("a copy on the host")
        lane = devices.current(number)
        what = _name_of_copy(into, out_of)
        devices.model.count_copy(on_one_device=into == out_of, bytes_moved=2 * target.nbytes)
        to = to or self._tracked(target)
        if of is not None and (of.device is not None or of.pinned):
            reads, came = [(source, of)], elements_of(source, of)
        else:  # of other host memory the system takes a copy first
            if of is not None:
                devices.host_touches(source, of, what, writes=False)
            reads, came = [], source.detach().clone()
        devices.touch(lane, what, reads, [(target, to)])
        goes = elements_of(target, to)
        devices.queue(lane, lambda: _copied(goes, came), what)
        if waits and into != out_of:
            devices.wait_on_host(what, [lane])

    def _tracked(self, tensor: torch.Tensor) -> StoragePlace:
        place = StoragePlace(None)
        self._devices.memory.register(tensor, place)
        return place


def _name_of_copy(into: int | None, out_of: int | None) -> str:
    if into == out_of:
        return "copy"
    return "copy to the device" if out_of is None else "copy to the host"


def elements_of(tensor: torch.Tensor, place: StoragePlace) -> torch.Tensor:
    """Return the host tensor that has the elements of ``tensor``; on a device, that is the emulated memory itself."""
    if place.device is None:
        return tensor.detach()
    if place.block is None:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    view = view_of(place.block, tensor)
    # The memory holds the elements without the changes that these flags of a tensor stand for.
    view = view.conj() if tensor.is_conj() else view
    return view._neg_view() if tensor.is_neg() else view


def _copied(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)
