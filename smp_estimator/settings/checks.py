"""Checks of a notebook's settings besides the distribution, before anything is started or paid for."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smp_config import ConfigError
from smp_config.errors import kind_of, show_value, suggest
from smp_config.formats import strict_json
from smp_config.formats.secrets import shown_value
from smp_config.formats.values import is_integer
from smp_config.job import SCRIPT_SUFFIXES
from smp_config.limits import MOST_RANKS
from smp_config.machine.instances import instance, instances
from smp_estimator.local.files.channels import require_existing
from smp_estimator.local.files.uris import is_file_uri, is_s3_uri, path_of, require_address, require_nameable
from smp_estimator.settings.plain_values import check_variables
from smp_estimator.settings.variables import is_variable
from smp_records import tracking
from smp_records.numerics import EVERY_VARIABLE, GUARDS_VARIABLE, Guards, every_steps
from smp_records.profiling import Profile
from smp_records.timeline import TIMELINE_VARIABLE, steps_to_keep

if TYPE_CHECKING:
    from smp_config import ModelParallelParameters

#: What the launchers of images hand to pip.
REQUIREMENTS = "requirements.txt"


def check_arguments(given: dict[str, Any], known: Collection[str], former: Mapping[str, str], kind: str) -> list[str]:
    """Rename arguments with older names to their present names, in place.

    Args:
        given: of the constructor, by name.
        known: names that it takes.
        former: older name → present one.
        kind: the estimator's class.

    Returns:
        Sentences about older names.

    Raises:
        ConfigError: unknown arguments, with the nearest name of each; or two names of one.
    """
    unknown = [name for name in given if name not in known and name not in former]
    if unknown:
        hints = "; ".join(f"{name}={shown_value(name, given[name])}{suggest(name, known)}" for name in unknown)
        raise ConfigError(
            f"{kind} got {hints}; the SDK would drop what it does not know without a word: correct or remove it. "
            f"help({kind}) lists all arguments",
            code="SMP123",
        )
    said = []
    # A list, since the loop changes ``given``.
    for old in [name for name in given if name in former and name not in known]:
        new = former[old]
        if given.get(new) is not None:
            raise ConfigError(f"{old} and {new} are two names of one argument; remove {old}", code="SMP123")
        given[new] = given.pop(old)
        said.append(f"{old} is the name of SDK v1 for {new}; write {new}={given[new]!r}")
    return said


def require_instance_type(value: Any, has_groups: bool) -> None:
    """Raise ConfigError where an instance type is missing, or one that neither this machine nor the cloud has."""
    if is_variable(value) or (value is None and has_groups):
        return
    if not value:
        raise ConfigError(
            'instance_type is missing; it says where the job runs: "local" starts processes of this machine, without an '
            'account, and a name such as "ml.p4d.24xlarge" instances of the cloud',
            code="SMP123",
        )
    if value in ("local", "local_gpu") or value.startswith("ml."):
        return
    if instance(value) is not None:
        hint = f", did you mean 'ml.{value}'?"
    else:
        hint = suggest(value, ["local", "local_gpu", *(known.name for known in instances())])
    raise ConfigError(
        f'instance_type is {value!r}{hint or ";"} "local" starts processes of this machine, and types of the cloud begin with '
        '"ml.", for example "ml.p4d.24xlarge"',
        code="SMP123",
    )


def require_text(value: Any, name: str, example: str) -> Any:
    """Return a name or path argument as text; values that are known only when a pipeline runs are returned unchanged.

    Raises:
        ConfigError: neither text nor a path.
    """
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if value is None or is_variable(value):
        return value
    if not isinstance(value, str):
        raise ConfigError(
            f"{name} is {show_value(value)}, {kind_of(value)}; it must be text or a path: write for example {name}={example!r}",
            code="SMP123",
        )
    why = strict_json.why_unusable(value)
    if why:
        raise ConfigError(
            f"{name} {why}; it begins with {value[:60]!r}: remove that character, as in {name}={example!r}",
            code="SMP123",
        )
    return value


def refuse_remote_script(entry_point: Any) -> None:
    """Raise ConfigError if ``entry_point`` is an S3 address."""
    if isinstance(entry_point, str) and entry_point.lower().startswith("s3://"):
        raise ConfigError(
            f"entry_point is {show_value(entry_point)}; the script is one of the files that are shipped to the job, which S3 "
            "has as an "
            "archive: give that as source_dir, and entry_point relative to it, or a local script",
            code="SMP123",
        )


def require_paths(value: Any, name: str) -> None:
    """Raise ConfigError unless an argument is left out or a list of paths."""
    if value is None:
        return
    is_list = isinstance(value, list | tuple)
    if not is_list or not all(_is_path(each) for each in value):
        raise ConfigError(
            f"{name} is {show_value(value)}, {kind_of(value)}; it lists paths of what is shipped beside the script: write "
            f'{name}=["lib"]',
            code="SMP123",
        )


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike) and bool(str(value))


def require_count(value: Any, name: str) -> None:
    """Raise ConfigError unless an argument is left out or a whole number of at least 1."""
    if value is None or is_variable(value):
        return
    if not is_integer(value) or value < 1:
        raise ConfigError(
            f"{name} is {show_value(value)} ({type(value).__name__}); it is a number of hosts: write {name}=1 or more",
            code="SMP123",
        )
    if value > MOST_RANKS:
        raise ConfigError(
            f"{name} is {show_value(value)}; it is a number of hosts, and no job has more than {MOST_RANKS:,}: lower it",
            code="SMP123",
        )


def require_mapping(value: Any, name: str) -> None:
    """Raise ConfigError unless an argument is left out or a dictionary."""
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(
            f"{name} is {shown_value(name, value)}, {kind_of(value)}; names and values are read from it: write a "
            "dictionary such "
            f'as {name}={{"steps": 300}}',
            code="SMP123",
        )


def check_environment(environment: Mapping[str, Any] | None) -> None:
    """Raise ConfigError for an environment variable that no process can have, and for those that the ranks would refuse."""
    check_variables(environment)
    if not environment:
        return
    if not is_variable(environment.get(TIMELINE_VARIABLE)):
        steps_to_keep(environment)
    if not is_variable(environment.get(EVERY_VARIABLE)):
        every_steps(environment)
    guards = environment.get(GUARDS_VARIABLE, "")
    if not is_variable(guards):
        Guards.of(guards)
    tracking.check(_settled(environment))
    Profile.of(_settled(environment))


def check_trackers(environment: Mapping[str, Any] | None) -> None:
    """Raise ConfigError for a tracker if its package is not installed for the processes of this machine."""
    tracking.require_packages(tracking.loggers_of(_settled(environment or {})))


def _settled(environment: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment without pipeline variables: their values are not known yet."""
    return {name: str(value) for name, value in environment.items() if not is_variable(value)}


def check_code(entry_point: Any, source_dir: Any, dependencies: Iterable[Any], *, own_launcher: bool = False) -> None:
    """Check that the script and its shipped files exist.

    Args:
        own_launcher: this package starts the script, which it does for Python and shell scripts only.

    Raises:
        ConfigError: a file is missing; the message has the path that was tried and similar file names.
    """
    require_paths(dependencies, "dependencies")
    is_elsewhere = is_variable(entry_point) or is_variable(source_dir) or is_s3_uri(source_dir)
    if not is_elsewhere:
        _check_files(entry_point, source_dir, dependencies)
    has_script = bool(entry_point) and not is_variable(entry_point)
    if own_launcher and has_script:
        _require_suffix(entry_point)


def _check_files(entry_point: Any, source_dir: Any, dependencies: Iterable[Any]) -> None:
    for what, path in [
        ("source_dir", source_dir),
        ("entry_point", entry_point),
        *(("a dependency", d) for d in dependencies),
    ]:
        if path and not is_variable(path):
            require_nameable(os.fspath(path), what)
    if source_dir:
        directory = Path(source_dir).expanduser().absolute()
        require_existing(directory, f"source_dir={str(source_dir)!r}")
        if not directory.is_dir():
            raise ConfigError(
                f"source_dir is {directory}, which is a file; the whole directory is shipped to the job: give the directory "
                f"{directory.parent} and entry_point={directory.name!r}",
                code="SMP123",
            )
        if entry_point:
            _require_inside(entry_point, directory)
            _require_script(directory / entry_point, entry_point, f"source_dir {directory}")
    elif entry_point:
        _require_script(Path(entry_point).expanduser().absolute(), entry_point, "the working directory")
    for dependency in dependencies:
        require_existing(Path(dependency).expanduser().absolute(), f"the dependency {str(dependency)!r}")


def check_upload(source_dir: Any) -> None:
    """Check that the code can be put into an archive.

    Raises:
        ConfigError: a link that leads nowhere or in a circle, or a folder where pip expects a file.
    """
    if not source_dir or is_variable(source_dir) or is_s3_uri(source_dir):
        return
    directory = Path(source_dir).expanduser().absolute()
    _require_targets(directory, directory, frozenset((directory.resolve(),)))
    if (directory / REQUIREMENTS).is_dir():
        raise ConfigError(
            f"{directory / REQUIREMENTS} is a folder, and the image's launcher installs what a file of that name lists: rename it",
            code="SMP123",
        )


def _require_targets(folder: Path, directory: Path, around: frozenset[Path]) -> None:
    """Raise ConfigError for links below ``folder`` that cannot be followed to their end, and folders that cannot be read.

    Args:
        directory: all of the code, for the message.
        around: the folders that were gone through, as they really are.
    """
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise ConfigError(
            f"source_dir {directory} holds the folder {folder.relative_to(directory)}, which cannot be read ({error.strerror}), so "
            "it cannot be put into the archive of the code: let this user read it, or move it elsewhere",
            code="SMP123",
        ) from None
    for path in paths:
        try:
            target, why = path.resolve(strict=True), ""
        except FileNotFoundError:
            target, why = path, "which does not exist"
        except (OSError, RuntimeError):  # the latter before Python 3.13
            target, why = path, "which leads in a circle"
        # The archive gets what a link leads to: a folder around the link would have no end.
        if path.is_symlink() and (why or target in around or target in folder.resolve().parents):
            raise ConfigError(
                f"source_dir {directory} holds the link {path.relative_to(directory)} to {os.readlink(path)}, "
                f"{why or 'a folder that it lies in'}, so it cannot be put into the archive of the code: remove or correct it",
                code="SMP123",
            )
        if target.is_dir():
            _require_targets(path, directory, around | {target})


def _require_suffix(entry_point: str) -> None:
    path = Path(entry_point)
    if path.suffix not in SCRIPT_SUFFIXES:
        raise ConfigError(
            f"entry_point is {entry_point!r}, whose ending is {path.suffix or 'empty'!r}; the job starts .py files with Python "
            f"and .sh files with bash: rename it, for example to {path.stem + '.py'!r}",
            code="SMP123",
        )


def _require_inside(entry_point: str, directory: Path) -> None:
    # A source_dir such as ../scripts is not normalized, so both sides are.
    directory, path = (Path(os.path.normpath(each)) for each in (directory, directory / entry_point))
    if not path.is_relative_to(directory):
        raise ConfigError(
            f"entry_point {entry_point!r} is {path}, outside source_dir {directory}; only source_dir is shipped to the job: "
            "give the directory that holds the script as source_dir, or leave source_dir out",
            code="SMP123",
        )
    if os.path.isabs(entry_point):
        raise ConfigError(
            f"entry_point {entry_point!r} is absolute; with source_dir it is looked up inside the job's copy of "
            f"{directory}: write entry_point={str(path.relative_to(directory))!r}",
            code="SMP123",
        )


def _require_script(path: Path, given: str, relative_to: str) -> None:
    if path.is_file():
        return
    if path.is_dir():
        raise ConfigError(
            f"entry_point is {given!r}, but {path} is a directory; the job runs one script: name the file, and give the "
            "directory as source_dir",
            code="SMP123",
        )
    folder = path.parent
    entries = list(folder.iterdir()) if folder.is_dir() else []
    scripts = sorted(entry.name for entry in entries if entry.suffix in SCRIPT_SUFFIXES)
    hint = suggest(path.name, scripts)
    if folder.is_dir():
        listed = f"{folder} holds {', '.join(scripts[:8])}" if scripts else f"{folder} holds no scripts"
    else:
        listed = f"{folder} does not exist"
    raise ConfigError(
        f"entry_point {given!r} does not exist{hint}; tried {path} (relative to {relative_to}), and {listed}: correct "
        "entry_point or source_dir",
        code="SMP123",
    )


def check_partition_file(
    parameters: ModelParallelParameters, entry_point: Any, source_dir: Any, checkpoints: Any
) -> None:
    """Check that a job on this machine finds the partition that it is to load, where its ranks look for it.

    Args:
        checkpoints: ``checkpoint_s3_uri``; an ``s3://`` address is not looked into.

    Raises:
        ConfigError: there is no such file, or it is not for this number of stages.
    """
    name, stages = parameters.partition_file, parameters.pipeline_parallel_degree
    if stages == 1 or not name or is_s3_uri(source_dir) or is_variable(source_dir) or is_variable(entry_point):
        return
    if not parameters.load_partition:
        _require_writable(Path(name))
        return
    code = Path(source_dir) if source_dir else Path(entry_point).parent
    folders = [path_of(checkpoints)] if is_file_uri(checkpoints) else []
    places = [folder.expanduser().absolute() / name for folder in (*folders, code)]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        # The ranks may find it in what they download with their checkpoints.
        if is_s3_uri(checkpoints) and not Path(name).is_absolute():
            return
        raise ConfigError(
            f"load_partition is true, and partition_file {name!r} does not exist; looked for "
            f"{' and '.join(dict.fromkeys(map(str, places)))}: give the path of a file that a job with the same model wrote, a "
            "checkpoint_s3_uri that both jobs have, or set load_partition to false",
            code="SMP123",
        )
    try:
        held = json.loads(found.read_text(encoding="utf-8"))["stages"]
    except (OSError, ValueError, TypeError, KeyError):
        raise ConfigError(
            f"partition_file is {found}, which is no partition that a job wrote; write one with partition_file and "
            "load_partition off",
            code="SMP123",
        ) from None
    if held != stages:
        raise ConfigError(
            f"partition_file {found} is for {held} stages, but pipeline_parallel_degree is {stages}; set it to {held}, or "
            "let the model be partitioned anew",
            code="SMP123",
        )


def _require_writable(path: Path) -> None:
    """Raise ConfigError if an absolute path cannot be written.

    A relative path is in the job's own folders, which are writable.
    """
    if not path.is_absolute():
        return
    there = next(folder for folder in path.parents if folder.exists())
    is_writable = there.is_dir() and os.access(there, os.W_OK)
    if not is_writable:
        raise ConfigError(
            f"partition_file is {path}, and {there} is {'not writable' if there.is_dir() else 'no directory'}; the rank that "
            "traces the model writes it: name a file in a folder that it can write to, or leave partition_file out",
            code="SMP123",
        )


def check_inputs(inputs: Any) -> None:
    """Raise ConfigError for a channel of a job on this machine that is no address, or a directory that does not exist."""
    for name, value in inputs.items() if isinstance(inputs, Mapping) else [("training", inputs)]:
        if isinstance(value, os.PathLike):
            raise ConfigError(
                f"channel {name!r} is the path {str(value)!r}; channels are addresses: write "
                f"'file://{Path(value).expanduser().absolute()}'",
                code="SMP123",
            )
        if isinstance(value, str):
            uri = require_address(value, f"channel {name!r}")
            if is_file_uri(uri):
                require_existing(path_of(uri), f"channel {name!r}")


def check_output_path(output_path: Any) -> None:
    """Raise ConfigError where the model cannot go: not an address, or a file."""
    if not output_path or is_variable(output_path):
        return
    uri = require_address(output_path, "output_path")
    if is_file_uri(uri) and path_of(uri).is_file():
        raise ConfigError(
            f"output_path is {uri!r}, and {path_of(uri)} is a file; model.tar.gz is written into a directory: give a "
            f"directory, for example 'file://{path_of(uri).parent}'",
            code="SMP123",
        )
