"""The trackers that get the numbers of a training, and their needs. The notebook and the ranks read this alike."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping

from smp_config.errors import ConfigError, show_value, suggest
from smp_config.formats.values import parse_count, parse_number
from smp_config.limits import MOST_EVERY

#: Names of trackers joined by commas: ``tensorboard,mlflow``.
LOGGERS_VARIABLE = "SMP_LOGGERS"
#: Updates from one point to the next.
EVERY_VARIABLE = "SMP_LOG_EVERY"
#: Folder for trackers without a server of their own.
FOLDER_VARIABLE = "SMP_LOG_FOLDER"
#: Peak rate of one device of the job, in 10^12 operations per second. The used share of it is the MFU.
PEAK_VARIABLE = "SMP_PEAK_TFLOPS"
#: Seconds from one line of each rank about its time to the next.
RECORDS_VARIABLE = "SMP_RANK_RECORDS"

#: By tracker, the package that it needs, as it is imported and as it is installed.
PACKAGES = {"tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb"}

_MOST_SECONDS = 86_400.0


def loggers_of(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the trackers that a job's environment names, each once.

    Raises:
        ConfigError: a name is not that of a tracker.
    """
    text = environ.get(LOGGERS_VARIABLE, "")
    words = [part.strip().lower() for part in text.split(",")]
    names = tuple(dict.fromkeys(filter(None, words)))
    if names == ("0",):
        return ()
    for name in names:
        if name not in PACKAGES:
            raise ConfigError(
                f"{LOGGERS_VARIABLE} is {show_value(text)}, of which {show_value(name)} is no "
                f"tracker{suggest(name, PACKAGES)}; write some "
                f"of {', '.join(PACKAGES)}, joined by commas",
                code="SMP122",
            )
    return names


def require_packages(names: Iterable[str]) -> None:
    """Raise ConfigError for a tracker with a package that this Python cannot import."""
    missing = [PACKAGES[name] for name in names if not _can_import(PACKAGES[name])]
    if missing:
        raise ConfigError(
            f"{LOGGERS_VARIABLE} names {', '.join(missing)}, which this Python cannot import; install it before the job starts: "
            f"pip install {' '.join(missing)} (in the cloud, a line each in requirements.txt), or name other trackers",
            code="SMP122",
        )


def _can_import(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False  # of a package inside another one that is missing


def log_every(environ: Mapping[str, str]) -> int:
    """Return how many updates lie between two points of a tracker.

    Raises:
        ConfigError: the value is no such number.
    """
    text = environ.get(EVERY_VARIABLE, "") or "1"
    count = parse_count(text, MOST_EVERY)
    if count is None:
        raise ConfigError(
            f"{EVERY_VARIABLE} is {show_value(text)}; it is the number of updates from one point of a tracker to the next: "
            "set a whole "
            f"number from 1 to {MOST_EVERY:,}",
            code="SMP122",
        )
    return count


def peak_tflops(environ: Mapping[str, str]) -> float | None:
    """Return the user's peak of a device in 10^12 operations per second, or None if it is not set.

    Raises:
        ConfigError: the value is no such number.
    """
    return _positive(environ, PEAK_VARIABLE, "the 10^12 operations per second that a device of the job can do", 1e9)


def seconds_between_records(environ: Mapping[str, str]) -> float | None:
    """Return the seconds from one line of a rank to the next, or None for no lines.

    Raises:
        ConfigError: the value is no such number.
    """
    if environ.get(RECORDS_VARIABLE) == "0":
        return None
    return _positive(environ, RECORDS_VARIABLE, "the seconds between two lines of a rank about its time", _MOST_SECONDS)


def _positive(environ: Mapping[str, str], name: str, what: str, most: float) -> float | None:
    text = environ.get(name, "")
    if not text:
        return None
    value = parse_number(text)
    if value is None or not 0 < value <= most:
        raise ConfigError(
            f"{name} is {show_value(text)}; it is {what}: set a number above 0, and of at most {most:,.0f}",
            code="SMP122",
        )
    return value


def check(environ: Mapping[str, str]) -> None:
    """Raise ConfigError for variables that the ranks would refuse."""
    loggers_of(environ)
    log_every(environ)
    peak_tflops(environ)
    seconds_between_records(environ)
