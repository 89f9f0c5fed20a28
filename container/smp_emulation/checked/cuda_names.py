"""The names of ``torch.cuda`` that mean emulated devices."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from smp_emulation.checked.cuda_runtime import CudaRuntime
from smp_emulation.checked.streams.streams import EmulatedEvent, EmulatedStream
from smp_emulation.gpu_model.memory_calls import memory_calls

if TYPE_CHECKING:
    from smp_emulation.checked.patches import Patches
    from smp_emulation.checked.streams.device import Devices


def install(devices: Devices, patches: Patches) -> None:
    """Replace the names of ``torch.cuda``, and autocast."""
    EmulatedStream.devices = EmulatedEvent.devices = devices
    names: dict[str, Any] = {
        **_devices_and_waits(devices),
        **_streams(devices),
        **memory_calls(devices.model, devices.index),
        "ipc_collect": lambda: None,
        "cudart": lambda: CudaRuntime(devices),
        **_random(devices),
        "Stream": EmulatedStream,
        "Event": EmulatedEvent,
    }
    for name, value in names.items():
        patches.set(torch.cuda, name, value)
    patches.set(torch, "autocast", _autocast(torch.autocast))
    for name in ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled"):
        patches.set(torch, name, _autocast_state(getattr(torch, name)))
    patches.set(torch.amp, "autocast", torch.autocast)
    patches.set(torch.amp.autocast_mode, "autocast", torch.autocast)


def _devices_and_waits(devices: Devices) -> dict[str, Callable[..., Any]]:
    def set_device(device: Any) -> None:
        devices.thread.device = devices.index(device)
        devices.model.contexts.choose(devices.thread.device)

    def exchange(number: int) -> int:
        before = devices.thread.device
        if number >= 0:
            devices.thread.device = number
        return before

    def synchronize(device: Any = None) -> None:
        number = devices.index(device)
        devices.model.contexts.use(number, "torch.cuda.synchronize")
        devices.wait_on_host("torch.cuda.synchronize", devices.lanes[number])

    def properties(device: Any = None) -> Any:
        number = devices.index(device)
        return SimpleNamespace(
            name=f"emulated CUDA device {number}",
            total_memory=devices.model.capacity,
            major=9,
            minor=0,
            multi_processor_count=1,
            uuid=uuid.uuid5(uuid.NAMESPACE_DNS, f"{devices.identity}/{number}"),
        )

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_compiled": lambda: True,
        "device_count": lambda: devices.count,
        "current_device": lambda: devices.thread.device,
        "set_device": set_device,
        "_exchange_device": exchange,
        "_maybe_exchange_device": exchange,
        "synchronize": synchronize,
        "get_device_properties": properties,
        "get_device_name": lambda device=None: properties(device).name,
        "get_device_capability": lambda device=None: (9, 0),
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_current_stream_capturing": lambda: False,
        "can_device_access_peer": lambda one, other: True,
    }


def _streams(devices: Devices) -> dict[str, Callable[..., Any]]:
    @contextlib.contextmanager
    def stream(chosen: EmulatedStream | None) -> Iterator[None]:
        if chosen is None:
            yield
            return
        with chosen:
            yield

    def set_stream(chosen: EmulatedStream | None) -> None:
        if chosen is not None:
            devices.thread.device = chosen.device_index
            devices.thread.current[chosen.device_index] = chosen.lane

    def of(lane_of: Callable[[int], Any]) -> Callable[..., Any]:
        def found(device: Any = None) -> EmulatedStream:
            number = devices.index(device)
            return EmulatedStream(number, lane=lane_of(number))

        return found

    return {
        "stream": stream,
        "set_stream": set_stream,
        "current_stream": of(devices.current),
        "default_stream": of(lambda number: devices.default[number]),
    }


def _random(devices: Devices) -> dict[str, Any]:
    def seed_all(seed: int) -> None:
        for generator in devices.generators:
            generator.manual_seed(int(seed))

    def state(device: Any = "cuda") -> torch.Tensor:
        return devices.generators[devices.index(device)].get_state()

    def set_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
        devices.generators[devices.index(device)].set_state(new_state)

    def set_states(new_states: Any) -> None:
        for number, new_state in enumerate(new_states):
            set_state(new_state, number)

    return {
        "default_generators": tuple(devices.generators),
        "manual_seed": lambda seed: devices.generators[devices.index()].manual_seed(int(seed)) and None,
        "manual_seed_all": seed_all,
        "initial_seed": lambda: devices.generators[devices.index()].initial_seed(),
        "get_rng_state": state,
        "set_rng_state": set_state,
        "get_rng_state_all": lambda: [state(number) for number in range(devices.count)],
        "set_rng_state_all": set_states,
        "_is_in_bad_fork": lambda: False,
    }


def _autocast(own: Any) -> Any:
    """Return an autocast class that treats "cuda" as "cpu", with CUDA's default data type.

    All work is done on CPU tensors.
    """

    class Autocast(own):
        def __init__(
            self, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None
        ) -> None:
            if device_type == "cuda":
                dtype, device_type = dtype or torch.float16, "cpu"
            super().__init__(device_type, dtype, enabled, cache_enabled)

    Autocast.__name__ = "autocast"
    return Autocast


def _autocast_state(own: Callable[..., Any]) -> Callable[..., Any]:
    def asked(device_type: str = "cuda", *args: Any) -> Any:
        return own("cpu" if device_type == "cuda" else device_type, *args)

    return asked
