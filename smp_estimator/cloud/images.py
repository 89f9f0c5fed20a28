"""Facts about a stock training image, from its address: whether it is one, its gaps, and its patch period."""

from __future__ import annotations

import re
from datetime import date
from typing import TYPE_CHECKING, Any

from smp_config import ConfigError
from smp_estimator.cloud import image_table
from smp_estimator.sdk.functions import config_for_framework
from smp_estimator.sdk.installed import SDKMissing

if TYPE_CHECKING:
    from smp_estimator.cloud.image_table import TrainingImage

#: The oldest PyTorch that the runtime works with.
TORCH_FLOOR = (2, 4)

#: The oldest PyTorch with the collectives that the backend ``smddp`` is built on.
DATA_PARALLEL_FLOOR = (2, 6)

#: From this version on, CUDA has no compiler for V100.
_CUDA_WITHOUT_V100 = 13

#: Stock training images, whichever account and region they are in, or in the public gallery.
_STOCK = re.compile(
    r"^(?P<registry>\d{12}\.dkr\.ecr[^/]*|public\.ecr\.aws/deep-learning-containers)/"
    r"(?P<repository>pytorch|(?:huggingface-)?pytorch-training(?:-\w+)?)(?P<sign>[:@])(?P<tag>.+)$"
)

#: Tags of the stock images in the repository ``pytorch``: people call their own repositories like that, too.
_STOCK_TAG = re.compile(r"\d+\.\d+(\.\d+)?-(cpu|cu\d+)-amzn\d+(-sagemaker)?([-@].*)?")


def today() -> date:
    """Return the day used to decide whether patches have ended."""
    return date.today()


def is_stock(image_uri: Any) -> bool:
    """Return whether an image's address is that of a stock PyTorch or Hugging Face training image."""
    if not isinstance(image_uri, str):
        return False
    found = _STOCK.match(image_uri)
    if found is None:
        return False
    registry = found["registry"]
    if found["repository"] != "pytorch" or registry.startswith("public"):
        return True
    # Any account may have a repository "pytorch": only a stock tag, or an account of the SDK's images, shows that it is one.
    if found["sign"] == ":" and _STOCK_TAG.fullmatch(found["tag"]):
        return True
    return registry[:12] in _stock_accounts()


def _stock_accounts() -> frozenset[str]:
    """Return the accounts that the SDK's stock images are in; empty without an SDK."""
    try:
        versions = config_for_framework("pytorch")["training"]["versions"].values()
    except SDKMissing:
        return frozenset()
    accounts: set[str] = set()
    for row in versions:
        accounts.update(row["registries"].values())
    return frozenset(accounts)


def lacks_toolkit(image_uri: Any) -> str | None:
    """Return why the service cannot start a job of SDK v2 in a stock image, judged by its tag; None if it can."""
    if not is_stock(image_uri):
        return None
    words = image_uri.rpartition(":")[2].split("-")
    if "sagemaker" in words or not any(word.startswith("amzn") or word == "ec2" for word in words):
        return None
    return (
        f"image_uri is {image_uri}, the image for EC2, which has no training toolkit to start a job's script; its sibling for the "
        "service has a tag with -sagemaker"
    )


def has_own_data_parallel(image_uri: Any, version: Any) -> bool:
    """Return whether a stock image is too old for this data parallel library but contains AWS's own.

    Args:
        image_uri: as given to the estimator.
        version: the version of PyTorch, if no image is named.
    """
    if is_stock(image_uri):
        version = image_uri.rpartition(":")[2].split("-")[0]
    elif image_uri:
        return False
    old = isinstance(version, str) and version_numbers(version) < DATA_PARALLEL_FLOOR
    if not old:
        return False
    row = image_table.row_of(image_uri)
    if row is not None and row.smddp:  # of an image that is named the SDK asks no version
        return True
    from smp_estimator.sdk.version_2 import DATA_PARALLEL_VERSIONS

    return version in DATA_PARALLEL_VERSIONS["pytorch"]


def check_stock_version(image_uri: Any, floor: tuple[int, int]) -> None:
    """Refuse a stock image if its PyTorch is too old for the runtime that is sent with the code.

    Args:
        floor: :data:`TORCH_FLOOR` or :data:`DATA_PARALLEL_FLOOR`.

    Raises:
        ConfigError: the tag names an older version.
    """
    if not is_stock(image_uri) or "@" in image_uri:
        return
    tag = image_uri.rpartition(":")[2]
    version = re.match(r"\d+\.\d+(\.\d+)?", tag)
    if version is None or version_numbers(version[0]) >= floor:
        return
    what = "the backend smddp" if floor == DATA_PARALLEL_FLOOR else "the runtime"
    oldest, newer = ".".join(map(str, floor)), newest_patched(today())
    example = f", or name a newer one, such as {newer.name}" if newer is not None else ""
    raise ConfigError(
        f"image_uri is {image_uri}, a stock image with PyTorch {version[0]}, but {what} needs PyTorch {oldest} or newer (it is "
        f"shipped with the code and uses the image's PyTorch); leave image_uri out{example}",
        code="SMP112",
    )


def lacks_code_for(image: Any, gpu: str) -> str | None:
    """Return why an image cannot compute on GPUs of this kind; None if it can, or if its CUDA is not known.

    Args:
        image: its address, or the name of a row of the table.
    """
    cuda = _cuda_of(image)
    if cuda is None or not is_too_new(cuda, gpu):
        return None
    return (
        f"the image {image} has CUDA {cuda}, and from CUDA {_CUDA_WITHOUT_V100} on PyTorch has no code for V100 GPUs: name an "
        "image with CUDA 12 by image_uri, such as the stock images up to PyTorch 2.8, or use instances with newer GPUs"
    )


def _cuda_of(image: Any) -> str | None:
    """Return the major version of an image's CUDA, by the table or by its tag; None if neither has it."""
    row = image_table.row_of(image)
    if row is not None and row.cuda:
        return row.cuda.split(".")[0]
    if not isinstance(image, str):
        return None
    tag = re.search(r"cu(\d{2})\d", image)
    if tag is None:
        return None
    return tag[1]


def is_too_new(cuda: str | None, gpu: str | None) -> bool:
    """Return whether PyTorch for this CUDA (``"13.0"``) has no code for this GPU (``"V100"``); False for None."""
    if gpu != "V100" or cuda is None:
        return False
    return int(cuda.split(".")[0]) >= _CUDA_WITHOUT_V100


def newest_patched(day: date, gpu: str | None = None, *, huggingface: bool = False) -> TrainingImage | None:
    """Return the newest GPU image of the table that is patched on a day and supports ``gpu``, or None."""
    rows = []
    for row in image_table.images():
        has_transformers = row.transformers is not None
        if row.processor != "gpu" or has_transformers != huggingface:
            continue
        if row.has_ended(day) or is_too_new(row.cuda, gpu):
            continue
        rows.append(row)
    return max(rows, key=lambda row: version_numbers(row.torch), default=None)


def patches_ended(row: TrainingImage, day: date, argument: str | None = None, gpu: str | None = None) -> str | None:
    """Return a warning if an image is no longer patched, or None if it is.

    Args:
        day: the day of the job.
        argument: the argument that names the image; None if the user did not choose it.
        gpu: the kind of GPU of the instances, if it is known.
    """
    if not row.has_ended(day):
        return None
    name = (
        f"PyTorch {row.torch}"
        if row.transformers is None
        else f"Transformers {row.transformers} and PyTorch {row.torch}"
    )
    ended = f"the stock images with {name} ({row.repository}) were patched {row.until}, and faults found since stay"
    newer = newest_patched(day, gpu, huggingface=row.transformers is not None)
    if newer is not None:
        change = f"leave {argument} out, or name a newer one" if argument else "name a newer one by image_uri"
        return f"{ended}: {change}; {newer.name} is patched {newer.until}"
    if row.transformers is not None:
        newest = newest_patched(day, gpu)
        other = f", such as {newest.name} with transformers in requirements.txt" if newest is not None else ""
        return (
            f"{ended}: no Hugging Face image that is known here is still patched; name another one by image_uri{other}"
        )
    kind = f" with code for {gpu} GPUs" if gpu else ""
    return f"{ended}: no stock image{kind} that is known here is still patched; build one of your own, and name it by image_uri"


def version_numbers(version: str) -> tuple[int, ...]:
    """Return a version as numbers that can be compared, ``(2, 13, 0)``."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
