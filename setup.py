"""Finds the packages of both halves, and installs the line by which Python finds ``torch.sagemaker``.

Everything else is declared in setup.cfg.
"""

import base64
import hashlib
import shutil
import zipfile
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

#: Read by Python when it starts; it lies beside the packages.
PATH_FILE = "smp_estimator_torch_sagemaker.pth"


class BuildWithPathFile(build_py):
    """Puts the path file beside the packages of a wheel."""

    def run(self):
        """Copy the packages, and the path file."""
        super().run()
        if not self.editable_mode:
            shutil.copy(Path("container", PATH_FILE), Path(self.build_lib, PATH_FILE))

    def get_outputs(self, include_bytecode=1):
        """Return the files of the wheel."""
        return [*super().get_outputs(include_bytecode), str(Path(self.build_lib, PATH_FILE))]


class EditableWithPathFile(editable_wheel):
    """Adds the path file to the wheel of an editable installation, which has no packages."""

    def run(self):
        """Make the wheel, and add the path file."""
        super().run()
        for wheel in Path(self.dist_dir).glob("*editable*.whl"):
            add_file(wheel, PATH_FILE, Path("container", PATH_FILE).read_bytes())


def add_file(wheel: Path, name: str, content: bytes) -> None:
    """Add a file to a wheel, with its line in the record."""
    with zipfile.ZipFile(wheel) as given:
        files = {each: given.read(each) for each in given.namelist()}
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    record = next(each for each in files if each.endswith(".dist-info/RECORD"))
    files[record] = f"{name},sha256={digest},{len(content)}\n".encode() + files[record]
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as made:
        for each, data in {name: content, **files}.items():
            made.writestr(each, data)


setup(
    packages=find_packages(include=["smp_estimator", "smp_estimator.*"]) + find_packages("container"),
    py_modules=["torch_sagemaker_finder"],
    package_dir={"": "container", "smp_estimator": "smp_estimator"},
    package_data={
        "": ["py.typed", "*.pyi"],
        "smp_config": ["data/*.json"],
        "smp_launch": ["discovery*/*/*"],
        "smp_estimator": ["cloud/data/*.json", "models/*.json", "sdk_v3/driver/*.sh"],
    },
    cmdclass={"build_py": BuildWithPathFile, "editable_wheel": EditableWithPathFile},
)
