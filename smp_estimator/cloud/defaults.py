"""Defaults of a model parallel job in the cloud, among them the metrics that the service reads out of its log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from smp_config.records import PROGRESS_PREFIX

#: Fields of a progress record that the service records as metrics of the same name.
METRICS = ("loss", "eval_loss", "samples_per_second", "step")

_NUMBER = r"([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)"


def metric_definitions() -> list[dict[str, str]]:
    """The default of ``metric_definitions``; also what a tuner needs to optimise one of them."""
    # The quote before the name keeps "loss" from matching "eval_loss".
    return [{"Name": name, "Regex": rf'{PROGRESS_PREFIX}\{{.*"{name}": ?{_NUMBER}'} for name in METRICS]


def fill_in_cloud(sdk: dict[str, Any], say: Callable[[str], None], *, ships_runtime: bool) -> None:
    """Fill in the defaults among the arguments for the SDK's class.

    Args:
        sdk: changed in place.
        say: told about what is allowed but unwise, one sentence each.
        ships_runtime: the runtime travels with the code, into a stock image.
    """
    if sdk.get("debugger_hook_config") is None:
        sdk["debugger_hook_config"] = False
    elif sdk["debugger_hook_config"]:
        say(
            "debugger_hook_config is on, but the debugger's hooks do not know distributed models and may fail the job; "
            "debugger_hook_config=False is the default for model parallel jobs"
        )
    if sdk.get("metric_definitions") is None:
        sdk["metric_definitions"] = metric_definitions()
    if ships_runtime and sdk.get("enable_network_isolation") is True:
        say(
            "enable_network_isolation is True, and the stock image must install the runtime's requirements from a package "
            "index; give image_uri, an image that has the runtime, unless the stock image has pydantic and safetensors"
        )
