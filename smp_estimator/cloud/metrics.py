"""Metric definitions that read the runtime's progress lines out of a job's log."""

from __future__ import annotations

from smp_config.progress import PROGRESS_PREFIX

#: Fields of a progress record that the service records as metrics of the same name.
METRICS = ("loss", "eval_loss", "samples_per_second", "step")

_NUMBER = r"([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)"


def metric_definitions() -> list[dict[str, str]]:
    """The default of ``metric_definitions``; also what a tuner needs to optimise one of them."""
    # The quote before the name keeps "loss" from matching "eval_loss".
    return [{"Name": name, "Regex": rf'{PROGRESS_PREFIX}\{{.*"{name}": ?{_NUMBER}'} for name in METRICS]
