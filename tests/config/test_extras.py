"""What messages tell users to install."""

from __future__ import annotations

import importlib.metadata

import pytest

from smp_config.machine.extras import install_command


@pytest.mark.parametrize(
    ("extra", "command"),
    [("plots", "pip install matplotlib"), ("sagemaker", "pip install 'sagemaker<3,>=2.254' boto3")],
)
def test_the_packages_of_an_extra(extra, command):
    assert install_command(extra) == command


def test_a_local_job_needs_the_runtime_too():
    assert set(install_command("runtime").split()) < set(install_command("local").split())


def test_without_the_distribution_the_extra_is_named(monkeypatch):
    def requires(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    assert install_command("plots") == "pip install 'smp-estimator[plots]'"
