"""Finds the packages of both halves; everything else is declared in setup.cfg."""

from setuptools import find_packages, setup

setup(
    packages=find_packages(include=["smp_estimator", "smp_estimator.*"]) + find_packages("container"),
    package_dir={"": "container", "smp_estimator": "smp_estimator"},
    package_data={
        "": ["py.typed", "*.pyi"],
        "smp_config": ["data/*.json"],
        "smp_launch": ["discovery*/*/*"],
        "smp_estimator": ["cloud/data/*.json", "models/*.json", "sdk_v3/driver/*.sh"],
    },
)
