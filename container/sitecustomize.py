"""Lets ``import torch.sagemaker`` find version 2 where these packages are on ``PYTHONPATH`` instead of being installed.

Python imports one ``sitecustomize``, the first on its path. This one runs the next one too.
"""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

import torch_sagemaker_finder  # noqa: F401

_HERE = Path(__file__).parent


def _run_next() -> None:
    """Run the ``sitecustomize`` that this one hides, such as that of a distribution."""
    others = [entry for entry in sys.path if Path(entry or ".").absolute() != _HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None and spec.origin != __file__:
        import importlib.util

        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_run_next()
