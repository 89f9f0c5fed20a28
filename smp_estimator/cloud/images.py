"""The stock images of the SDK: which of them the runtime can run in, and the one that is taken when none is named."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from smp_config import ConfigError
from smp_estimator.sdk_functions import config_for_framework

#: The oldest PyTorch that the runtime works with.
TORCH_FLOOR = (2, 4)

#: The oldest PyTorch that has what the backend ``smddp`` is made of.
DATA_PARALLEL_FLOOR = (2, 6)

#: From this version on, the Trainer of Transformers no longer works with the library.
TRANSFORMERS_CEILING = (5,)

#: From this version on, CUDA has no compiler for V100.
_CUDA_WITHOUT_V100 = 13

#: Repositories of the stock training images, whichever account and region they are in.
_STOCK_REPOSITORY = re.compile(r"^\d{12}\.dkr\.ecr[^/]*/(huggingface-)?pytorch-training(-\w+)?[:@]")


def is_stock(image_uri: Any) -> bool:
    """Whether an image's address is that of a stock PyTorch or Hugging Face training image."""
    return isinstance(image_uri, str) and _STOCK_REPOSITORY.match(image_uri) is not None


def has_own_data_parallel(image_uri: Any, version: Any) -> bool:
    """Whether a stock image is too old for this data parallel library, and brings the one of its time.

    Args:
        image_uri: as given to the estimator.
        version: of PyTorch, where no image is named.
    """
    if is_stock(image_uri):
        version = image_uri.rpartition(":")[2].split("-")[0]
    elif image_uri:
        return False
    old = isinstance(version, str) and _number(version) < DATA_PARALLEL_FLOOR
    if not old:
        return False
    from smp_estimator.sdk import DATA_PARALLEL_VERSIONS

    return version in DATA_PARALLEL_VERSIONS["pytorch"]


def choose_pytorch(
    framework_version: str | None, py_version: str | None, floor: tuple[int, int] = TORCH_FLOOR
) -> tuple[str, str]:
    """The stock image for a job that names no image.

    Args:
        framework_version: as given to the estimator; None takes the newest that the SDK knows.
        py_version: as given; None takes the one that belongs to the version.
        floor: the oldest PyTorch that the job can use.

    Returns:
        Both, filled in.

    Raises:
        ConfigError: a version below the runtime's floor, or one without an image; names the nearest that has one.
    """
    known, aliases = _training_images("pytorch")
    usable = {version: row for version, row in known.items() if _number(version) >= floor}
    if framework_version is None:
        framework_version = max(usable, key=_number)
    else:
        together = {v: _together({"framework_version": v}, py_version, row) for v, row in usable.items()}
        _require("framework_version", framework_version, usable, aliases, floor, together)
    row = usable[aliases.get(framework_version, framework_version)]
    return framework_version, _python(py_version, row, f"framework_version {framework_version}")


def choose_huggingface(
    transformers_version: str | None,
    pytorch_version: str | None,
    py_version: str | None,
    floor: tuple[int, int] = TORCH_FLOOR,
) -> tuple[str, str, str]:
    """The stock Hugging Face image for a job that names no image.

    Returns:
        ``(transformers_version, pytorch_version, py_version)``, filled in.

    Raises:
        ConfigError: as :func:`choose_pytorch`.
    """
    try:
        return _chosen_huggingface(transformers_version, pytorch_version, py_version, floor)
    except ConfigError as error:
        if [transformers_version, pytorch_version, py_version].count(None) == 2:
            raise
        names = ("transformers_version", "pytorch_version", "py_version")
        fitting = zip(names, _chosen_huggingface(None, None, None, floor), strict=True)
        together = ", ".join(f"{name}={value!r}" for name, value in fitting)
        raise ConfigError(f"{error}. These fit together: {together}") from None


def _chosen_huggingface(
    transformers_version: str | None, pytorch_version: str | None, py_version: str | None, floor: tuple[int, int]
) -> tuple[str, str, str]:
    known, aliases = _training_images("huggingface")
    #: PyTorch version → Transformers version → row; each release of one comes with few of the other.
    by_torch: dict[str, dict[str, Mapping[str, Any]]] = {}
    for transformers, rows in known.items():
        for name, row in rows.items():
            version = name.removeprefix("pytorch")
            if name.startswith("pytorch") and _number(version) >= floor:
                by_torch.setdefault(version, {})[transformers] = row
    if not by_torch:
        raise ConfigError(
            f"this version of the SDK has no Hugging Face training image with PyTorch {_text(floor)} or newer, which the job "
            "needs; install a newer sagemaker, or give image_uri"
        )
    full = aliases.get(transformers_version or "", transformers_version)
    if full is not None:
        by_torch = {torch: {full: rows[full]} for torch, rows in by_torch.items() if full in rows} or by_torch
    if pytorch_version is not None:
        short = {torch.rsplit(".", 1)[0]: torch for torch in sorted(by_torch, key=_number)}
        _require("pytorch_version", pytorch_version, by_torch, short, floor)
        by_torch = {pytorch_version: by_torch[short.get(pytorch_version, pytorch_version)]}
    pairs = sorted(
        ((torch, transformers) for torch, rows in by_torch.items() for transformers in rows),
        key=lambda pair: (_number(pair[1]), _number(pair[0])),
    )
    if full is not None:
        if not any(transformers == full for _, transformers in pairs):
            offered = [transformers for _, transformers in pairs]
            raise ConfigError(
                f"transformers_version is {transformers_version}, and the SDK has no training image of it with PyTorch "
                f"{pytorch_version or _text(floor) + ' or newer'}, which the runtime needs; set transformers_version to "
                f"{_nearest(transformers_version or '', offered)!r}, or give image_uri"
            )
        pairs = [pair for pair in pairs if pair[1] == full]
    else:
        pairs = [pair for pair in pairs if _number(pair[1]) < TRANSFORMERS_CEILING] or pairs
    torch, transformers = pairs[-1]
    row = by_torch[torch][transformers]
    return transformers, torch, _python(py_version, row, f"pytorch_version {torch}")


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
    if not version or _number(version) >= floor:
        return
    known, _ = _training_images("pytorch")
    ask = together or {v: f"{name}={v!r}" for v in known if _number(v) >= floor}
    what = "the backend smddp" if floor == DATA_PARALLEL_FLOOR else "the runtime"
    raise ConfigError(
        f"{name} is {version}, but {what} needs PyTorch {_text(floor)} or newer (it is shipped with the code and uses the "
        f"image's PyTorch); set {ask[min(ask, key=_number)]}, the nearest that the SDK has an image of, or "
        f"{ask[max(ask, key=_number)]}, the newest"
    )


def lacks_code_for(image_uri: Any, gpu: str) -> str | None:
    """Why an image cannot compute on GPUs of this kind, as far as its address tells; None where it does not."""
    cuda = re.search(r"cu(\d{2})\d", image_uri) if isinstance(image_uri, str) else None
    if gpu != "V100" or cuda is None or int(cuda[1]) < _CUDA_WITHOUT_V100:
        return None
    return (
        f"image_uri is {image_uri}, which seems to have CUDA {cuda[1]}: from CUDA {_CUDA_WITHOUT_V100} on PyTorch has no code for "
        "V100 GPUs; use an image with CUDA 12, such as the stock images up to PyTorch 2.8, or instances with newer GPUs"
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
    usable = sorted(usable, key=_number)
    if aliases.get(version, version) in usable:
        return
    check_torch(version, name, floor, together)
    ask = together or {other: f"{name}={other!r}" for other in usable}
    raise ConfigError(
        f"{name} is {version}, and this version of the SDK has no training image of it; it has "
        f"{', '.join(usable)}: set {ask[_nearest(version, usable)]}, or give image_uri"
    )


def _together(chosen: Mapping[str, str], py_version: str | None, row: Mapping[str, Any]) -> str:
    """Arguments for an image, with the Python version where the one given does not fit."""
    offered = _pythons(row)
    fits = py_version is None or py_version == "py3" or py_version in offered
    return ", ".join(
        f"{name}={value!r}" for name, value in {**chosen, **({} if fits else {"py_version": offered[-1]})}.items()
    )


def _pythons(row: Mapping[str, Any]) -> list[str]:
    return [str(version) for version in row.get("py_versions") or ["py3"]]


def _python(given: str | None, row: Mapping[str, Any], what: str) -> str:
    offered = _pythons(row)
    if given is None or given == "py3":
        return offered[-1]
    if given not in offered:
        raise ConfigError(
            f"py_version is {given}, but the image of {what} has {' and '.join(offered)}; set py_version to "
            f"{offered[-1]!r}, or leave it out"
        )
    return given


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _nearest(version: str, offered: Iterable[str]) -> str:
    """The offered version with the least distance, the most significant part first."""
    wanted = _number(version)

    def distance(other: str) -> tuple[int, ...]:
        return tuple(abs(a - b) for a, b in zip(_padded(wanted), _padded(_number(other)), strict=True))

    return min(offered, key=distance)


def _padded(number: tuple[int, ...]) -> tuple[int, ...]:
    return (*number, 0, 0, 0)[:3]


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
