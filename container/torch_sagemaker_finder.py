"""Lets ``import torch.sagemaker`` find this library's version 2, beside any PyTorch and whether that is imported or not.

Then ``import transformer_engine`` finds a stand-in, where that is not installed.

A line of ``smp_estimator_torch_sagemaker.pth`` imports it when Python starts; ``sitecustomize.py`` does where the packages are on
``PYTHONPATH``. It imports nothing itself.
"""

import sys

_NAME = "torch.sagemaker"

#: Folders of packages that scripts import under another name.
_FOLDERS = {_NAME: "torch_sagemaker", "transformer_engine": "smp_transformer_engine"}


class Finder:
    """Finds the packages after all others: a PyTorch that has such a package of its own keeps it."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        """Return the package's spec, or None for any other name."""
        if name not in _FOLDERS:
            return None
        if name != _NAME and _NAME not in sys.modules:  # scripts of other libraries look whether it is there
            return None
        import importlib.util
        from pathlib import Path

        folder = Path(__file__).parent / _FOLDERS[name]
        return importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )


def install():
    """Add the finder, once."""
    if not any(getattr(finder, "__module__", None) == __name__ for finder in sys.meta_path):
        sys.meta_path.append(Finder)


def run_hidden(file):
    """Run the ``sitecustomize`` that the one in ``file`` hides, such as that of a distribution.

    Python imports one ``sitecustomize``, the first on its path.
    """
    import os
    from importlib.machinery import PathFinder

    own = os.path.dirname(os.path.abspath(file))
    spec = PathFinder.find_spec("sitecustomize", [entry for entry in sys.path if os.path.abspath(entry or ".") != own])
    if spec is not None and spec.loader is not None and spec.origin != file:
        import importlib.util

        spec.loader.exec_module(importlib.util.module_from_spec(spec))


install()
