"""The choice of a stock image for a job that names none, and the image's address."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from smp_config import ConfigError
from smp_estimator.cloud import image_table, images
from smp_estimator.cloud.image_table import TrainingImage
from smp_estimator.cloud.images import DATA_PARALLEL_FLOOR, TORCH_FLOOR, version_numbers
from smp_estimator.sdk.functions import config_for_framework, retrieve_image

#: From this version on, the Trainer of Transformers no longer works with the library.
TRANSFORMERS_CEILING = (5,)

#: What newer versions of the SDK call the images of PyTorch 2.11 and later, which are in a repository of their own.
_NEWER_IMAGES = "pytorch-amzn2023"

#: What the SDK calls the images with version 2 of the original library, by PyTorch's version.
_IMAGES_OF_ORIGINAL = "pytorch-smp"


@dataclass(frozen=True)
class PyTorchImage:
    """The images of one version of PyTorch, for CPUs and for GPUs.

    Attributes:
        version: of PyTorch, as ``framework_version`` names it.
        pythons: the Pythons that it is there with, as ``py_version`` names them; empty where none is known.
        of_sdk: whether the SDK that is installed knows it.
        by_name: whether the SDK forms its address from ``framework_version`` and ``py_version``.
        rows: of the table, by processor; empty where it lacks the version.
        regions: those in which the SDK knows it; None where the SDK does not know it.
    """

    version: str
    pythons: tuple[str, ...]
    of_sdk: bool
    by_name: bool
    rows: Mapping[str, TrainingImage]
    regions: frozenset[str] | None

    def has_ended(self, day: date) -> bool:
        """Return whether patches for the image are known to have ended."""
        return any(row.has_ended(day) for row in self.rows.values())

    def suits(self, gpus: Collection[str], region: str | None) -> bool:
        """Return whether the image supports these kinds of GPUs and is available in the region; None means any region."""
        if region is not None and self.regions is not None and region not in self.regions:
            return False
        for row in self.rows.values():
            if not row.is_in(region):
                return False
            if any(images.is_too_new(row.cuda, gpu) for gpu in gpus):
                return False
        return True


@dataclass(frozen=True)
class ImageChoice:
    """The stock PyTorch image of a job.

    Attributes:
        framework_version, py_version: of the image, filled in.
        image: what is known of it.
    """

    framework_version: str
    py_version: str
    image: PyTorchImage

    def address(self, region: str, instance_type: Any) -> str:
        """Return the image's address in a region, for the processors of an instance type.

        A pipeline's parameter counts as its default. Repository and tag come from the table. AWS keeps all these
        images in one registry per region. So the registry comes from the address that the SDK returns for the newest
        image it knows. That address also shows whether the instances have GPUs.

        Raises:
            ValueError: the SDK does not know the region or the instance type.
        """
        if self.image.by_name:
            version, python = self.framework_version, self.py_version
            return retrieve_image("pytorch", region, version=version, py_version=python, instance_type=instance_type)
        known, _ = _training_images("pytorch")
        there = [version for version, row in known.items() if region in row["registries"]]
        version = max(there or known, key=version_numbers)
        python = _pythons(known[version])[-1]
        found = retrieve_image("pytorch", region, version=version, py_version=python, instance_type=instance_type)
        registry, _, name = found.partition("/")
        processor = "cpu" if "-cpu-" in name else "gpu"
        return f"{registry}/{self.image.rows[processor].name}"


def choose_pytorch(
    framework_version: str | None,
    py_version: str | None,
    floor: tuple[int, int] = TORCH_FLOOR,
    *,
    day: date | None = None,
    gpus: Collection[str] = (),
    region: str | None = None,
    by_name: bool = False,
) -> ImageChoice:
    """Return the stock image for a job that names no image.

    Args:
        framework_version: as given to the estimator. None selects the newest version that the SDK knows and that is
            still patched. If there is none, it selects the newest patched version of the table. If there is none
            either, it selects the newest version that the SDK knows.
        py_version: as given to the estimator; None selects the Python that belongs to the version.
        floor: the oldest PyTorch that the job can use.
        day: the day of the job; None is today.
        gpus: kinds of GPUs of the job's instances that are known, such as ``"V100"``.
        region: the region of the job's session, if it is known.
        by_name: consider only images that the SDK selects by ``framework_version``.

    Raises:
        ConfigError: the version is below the runtime's floor or has no image; names the nearest version with an
            image.
    """
    known, aliases = _pytorch_images()
    usable = {v: image for v, image in known.items() if version_numbers(v) >= floor and (image.by_name or not by_name)}
    if framework_version is None:
        fitting = [image for image in usable.values() if image.suits(gpus, region)] or list(usable.values())
        image = _newest(fitting, day or images.today())
        framework_version = image.version
    else:
        together = {v: _together({"framework_version": v}, py_version, each.pythons) for v, each in usable.items()}
        _require("framework_version", framework_version, usable, aliases, floor, together)
        image = usable[aliases.get(framework_version, framework_version)]
    return ImageChoice(
        framework_version, _python(py_version, image.pythons, f"framework_version {framework_version}"), image
    )


def stock_version_for_original(framework_version: Any, floor: tuple[int, int] = TORCH_FLOOR) -> str | None:
    """Return the version of the stock image nearest to an image that only the original library has.

    Args:
        framework_version: as given to the estimator.

    Returns:
        None if the version is not one of the original's images, or has a stock image that the job can use.
    """
    try:
        versions, aliases = _training_images(_IMAGES_OF_ORIGINAL)
    except FileNotFoundError:  # newer than the SDK
        return None
    known, short = _pytorch_images()
    usable = [version for version in known if version_numbers(version) >= floor]
    if framework_version not in {*versions, *aliases} or short.get(framework_version, framework_version) in usable:
        return None
    return _nearest(framework_version, usable)


def _newest(fitting: Iterable[PyTorchImage], day: date) -> PyTorchImage:
    """Return the newest image, preferring patched images over others, then images that the SDK knows."""
    return max(fitting, key=lambda each: (not each.has_ended(day), each.of_sdk, version_numbers(each.version)))


def _pytorch_images() -> tuple[dict[str, PyTorchImage], dict[str, str]]:
    """Return the images of the SDK and the table by full version, and the full version of each short version.

    If both have an image of a version, the SDK's image is used.
    """
    known, aliases = _training_images("pytorch")
    found = {
        version: PyTorchImage(
            version, tuple(_pythons(row)), True, True, image_table.rows_of(version), frozenset(row["registries"])
        )
        for version, row in known.items()
    }
    # A copy: the table is the SDK's own.
    aliases = dict(aliases)
    for version, row in _newer_images().items():
        rows = image_table.rows_of(version) or _rows_of_sdk(row)
        _add(found, aliases, rows, frozenset(row["registries"]))
    for torch in dict.fromkeys(row.torch for row in image_table.images() if row.transformers is None):
        _add(found, aliases, image_table.rows_of(torch), None)
    return found, aliases


def _add(
    found: dict[str, PyTorchImage],
    aliases: dict[str, str],
    rows: Mapping[str, TrainingImage],
    regions: frozenset[str] | None,
) -> None:
    """Add a version that is selected by address, unless one with the same first two numbers exists."""
    row = next(iter(rows.values()))
    short = _text(version_numbers(row.torch)[:2])
    if aliases.get(short, short) in found:
        return
    pythons = (row.python,) if row.python is not None else ()
    found[row.torch] = PyTorchImage(row.torch, pythons, regions is not None, False, rows, regions)
    aliases[short] = row.torch


def _newer_images() -> Mapping[str, Mapping[str, Any]]:
    """Return the SDK's table of the newer repository; empty if the SDK does not have it."""
    try:
        return dict(config_for_framework(_NEWER_IMAGES)["training"]["versions"])
    except FileNotFoundError:  # before 3.27, and in version 2
        return {}


def _rows_of_sdk(row: Mapping[str, Any]) -> dict[str, TrainingImage]:
    """Return rows for a version of the newer repository that the table lacks, from the SDK's own data only."""
    made = {}
    for processor, rest in row["container_version"].items():
        cuda = re.match(r"cu(\d+)(\d)-", rest)
        made[processor] = TrainingImage(
            repository=row["repository"],
            torch=row["tag_prefix"],
            transformers=None,
            processor=processor,
            tag=f"{row['tag_prefix']}-{rest}",
            python=None,
            cuda=f"{cuda[1]}.{cuda[2]}" if cuda else None,
            released=None,
            patched_until=None,
            listed=None,
            mpi4py=None,
            smddp=None,
            regions_without=frozenset(),
            sources=(),
        )
    return made


def choose_huggingface(
    transformers_version: str | None,
    pytorch_version: str | None,
    py_version: str | None,
    floor: tuple[int, int] = TORCH_FLOOR,
) -> tuple[str, str, str]:
    """Return the versions of the stock Hugging Face image for a job that names no image.

    Returns:
        ``(transformers_version, pytorch_version, py_version)``, filled in.

    Raises:
        ConfigError: as :func:`choose_pytorch`.
    """
    try:
        return _chosen_huggingface(transformers_version, pytorch_version, py_version, floor)
    except ConfigError as error:
        # A single version has no other that it could fail to fit.
        if [transformers_version, pytorch_version, py_version].count(None) == 2:
            raise
        names = ("transformers_version", "pytorch_version", "py_version")
        fitting = zip(names, _chosen_huggingface(None, None, None, floor), strict=True)
        together = ", ".join(f"{name}={value!r}" for name, value in fitting)
        raise ConfigError(f"{error}. These fit together: {together}").of_the_kind_of(error) from None


def _chosen_huggingface(
    transformers_version: str | None, pytorch_version: str | None, py_version: str | None, floor: tuple[int, int]
) -> tuple[str, str, str]:
    known, aliases = _training_images("huggingface")
    #: PyTorch version → Transformers version → row; each release of one comes with few of the other.
    by_torch: dict[str, dict[str, Mapping[str, Any]]] = {}
    for transformers, rows in known.items():
        for name, row in rows.items():
            version = name.removeprefix("pytorch")
            if name.startswith("pytorch") and version_numbers(version) >= floor:
                by_torch.setdefault(version, {})[transformers] = row
    if not by_torch:
        raise ConfigError(
            f"this version of the SDK has no Hugging Face training image with PyTorch {_text(floor)} or newer, which the job "
            "needs; install a newer sagemaker, or give image_uri",
            code="SMP112",
        )
    full = aliases.get(transformers_version or "", transformers_version)
    if full is not None:
        by_torch = {torch: {full: rows[full]} for torch, rows in by_torch.items() if full in rows} or by_torch
    if pytorch_version is not None:
        short = {torch.rsplit(".", 1)[0]: torch for torch in sorted(by_torch, key=version_numbers)}
        _require("pytorch_version", pytorch_version, by_torch, short, floor)
        by_torch = {pytorch_version: by_torch[short.get(pytorch_version, pytorch_version)]}
    pairs = sorted(
        ((torch, transformers) for torch, rows in by_torch.items() for transformers in rows),
        key=lambda pair: (version_numbers(pair[1]), version_numbers(pair[0])),
    )
    if full is not None:
        if not any(transformers == full for _, transformers in pairs):
            offered = [transformers for _, transformers in pairs]
            raise ConfigError(
                f"transformers_version is {transformers_version}, and the SDK has no training image of it with PyTorch "
                f"{pytorch_version or _text(floor) + ' or newer'}, which the runtime needs; set transformers_version to "
                f"{_nearest(transformers_version or '', offered)!r}, or give image_uri",
                code="SMP112",
            )
        pairs = [pair for pair in pairs if pair[1] == full]
    else:
        pairs = [pair for pair in pairs if version_numbers(pair[1]) < TRANSFORMERS_CEILING] or pairs
    torch, transformers = pairs[-1]
    row = by_torch[torch][transformers]
    return transformers, torch, _python(py_version, _pythons(row), f"pytorch_version {torch}")


def row_of_huggingface(transformers_version: str | None, pytorch_version: str | None) -> TrainingImage | None:
    """Return the table's row of the Hugging Face image of these versions, or None if the table lacks it.

    The versions may be short ones.
    """
    _, aliases = _training_images("huggingface")
    full = aliases.get(transformers_version or "", transformers_version)
    return image_table.rows_of(pytorch_version or "", full).get("gpu") if full else None


def check_torch(
    version: str | None, name: str, floor: tuple[int, int] = TORCH_FLOOR, together: Mapping[str, str] | None = None
) -> None:
    """Refuse a version of PyTorch that is too old for the runtime.

    Args:
        name: of the argument.
        together: by usable version, how to ask for it with all that must change.

    Raises:
        ConfigError: naming the nearest version that has an image.
    """
    if not version or version_numbers(version) >= floor:
        return
    known, _ = _training_images("pytorch")
    ask = together or {v: f"{name}={v!r}" for v in known if version_numbers(v) >= floor}
    what = "the backend smddp" if floor == DATA_PARALLEL_FLOOR else "the runtime"
    raise ConfigError(
        f"{name} is {version}, but {what} needs PyTorch {_text(floor)} or newer (it is shipped with the code and uses the "
        f"image's PyTorch); set {ask[min(ask, key=version_numbers)]}, the nearest that there is an image of, or "
        f"{ask[max(ask, key=version_numbers)]}, the newest",
        code="SMP112",
    )


def _training_images(framework: str) -> tuple[dict[str, Mapping[str, Any]], dict[str, str]]:
    training = config_for_framework(framework)["training"]
    return training["versions"], training.get("version_aliases", {})


def _require(
    name: str,
    version: str,
    usable: Iterable[str],
    aliases: Mapping[str, str],
    floor: tuple[int, int],
    together: Mapping[str, str] | None = None,
) -> None:
    """Refuse a version of PyTorch that no usable image has; arguments as of :func:`check_torch`."""
    usable = sorted(usable, key=version_numbers)
    if aliases.get(version, version) in usable:
        return
    check_torch(version, name, floor, together)
    ask = together or {other: f"{name}={other!r}" for other in usable}
    raise ConfigError(
        f"{name} is {version}, and no training image of it is known to this version of the SDK, nor to this package; known are "
        f"{', '.join(usable)}: set {ask[_nearest(version, usable)]}, or give image_uri",
        code="SMP112",
    )


def _together(chosen: Mapping[str, str], py_version: str | None, pythons: Sequence[str]) -> str:
    """Return the arguments that select an image; they include ``py_version`` if the one given does not fit."""
    fits = py_version is None or py_version == "py3" or not pythons or py_version in pythons
    return ", ".join(
        f"{name}={value!r}" for name, value in {**chosen, **({} if fits else {"py_version": pythons[-1]})}.items()
    )


def _pythons(row: Mapping[str, Any]) -> list[str]:
    versions = row.get("py_versions") or ["py3"]
    return [str(version) for version in versions]


def _python(given: str | None, pythons: Sequence[str], what: str) -> str:
    """Return the Python version of an image; raise ConfigError if the image lacks the one given.

    If no Python is known for the image, any version given is accepted, because the address does not contain it.
    """
    if not pythons:
        return given or "py3"
    # The SDK calls any version of Python 3 so.
    if given is None or given == "py3":
        return pythons[-1]
    if given not in pythons:
        raise ConfigError(
            f"py_version is {given}, but the image of {what} has {' and '.join(pythons)}; set py_version to "
            f"{pythons[-1]!r}, or leave it out",
            code="SMP112",
        )
    return given


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _nearest(version: str, offered: Iterable[str]) -> str:
    """Return the offered version nearest to ``version``, comparing the most significant part first."""
    wanted = version_numbers(version)

    def distance(other: str) -> tuple[int, ...]:
        return tuple(abs(a - b) for a, b in zip(_padded(wanted), _padded(version_numbers(other)), strict=True))

    return min(offered, key=distance)


def _padded(numbers: tuple[int, ...]) -> tuple[int, ...]:
    return (*numbers, 0, 0, 0)[:3]
