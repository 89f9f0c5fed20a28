"""``smp-estimator checkpoint``: look at checkpoints, prove them whole, turn them into plain weights. No job is needed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from smp_config import ConfigError
from smp_config.machine.extras import install_command
from smp_estimator.cli.console import console, escape_text

if TYPE_CHECKING:  # the commands import the runtime when they run, so that this package stays light
    from smp_runtime.checkpoint.files.manifest import FoundCheckpoint, Manifest

#: Folders below PATH in which checkpoints are looked for.
_DEPTH = 6


class _RuntimeCheckingGroup(click.Group):
    """Command group that reports how to install the runtime's packages if they are missing."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ImportError as error:
            raise ConfigError(
                f"this command reads tensors, but the package {error.name} is not installed here; install it with "
                f"{install_command('runtime')}",
                code="SMP402",
            ) from None


@click.group(cls=_RuntimeCheckingGroup)
def checkpoint() -> None:
    """Look at the checkpoints of a job, verify them, convert them. Works without the job and without MPI."""


def _with_path(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the ``PATH`` argument and the ``--tag`` option that the commands share."""
    command = click.option("--tag", help="Which checkpoint; a tag or a folder's name. Default: the newest whole one.")(
        command
    )
    return click.argument("path", metavar="PATH")(command)


# -- inspect -----------------------------------------------------------------------------------------------------------


@checkpoint.command()
@_with_path
@click.option("--tensors", is_flag=True, help="List parameters and buffers too.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect(path: str, tag: str | None, tensors: bool, as_json: bool) -> None:
    """Show the checkpoints in PATH: the newest one, their contents, and whether all of their files exist.

    The files' sizes are compared with the saved ones. Their contents are not read: verify does that.

    PATH is a folder of checkpoints, one of them (TAG_partial), or a folder above, such as a job's output.
    """
    from smp_runtime.checkpoint.files.manifest import newest_name

    parent, found = _find(path)
    chosen = _choose(parent, found, tag, may_be_broken=True)
    newest = newest_name(parent)
    if as_json:
        about = {
            "path": str(parent),
            "newest": newest,
            "resumes": next((c.name for c in found if c.is_whole), None),
            "checkpoints": [_as_json(c, tensors=tensors and c is chosen) for c in found],
        }
        click.echo(json.dumps(about, indent=2))
        return
    out = console()
    out.print(_list_of(parent, found, newest))
    out.print(
        f"complete: all files are there in their size. What is in them was not read: "
        f"smp-estimator checkpoint verify {escape_text(path)}",
        soft_wrap=True,
    )
    for each in found:
        for problem in each.problems:
            out.print(f"[yellow]not complete[/yellow] {escape_text(each.name)}: {escape_text(problem)}", soft_wrap=True)
    if newest is not None and newest not in {c.name for c in found if c.is_whole}:
        out.print(
            f"[yellow]warning[/yellow] the file newest names {escape_text(newest)}, which is not complete or not here"
        )
    if chosen is None or chosen.manifest is None:
        return
    out.print(_about(chosen.name, chosen.manifest))
    out.print(_files_table(chosen.manifest))
    if tensors:
        out.print(_tensors_table(chosen.manifest))


def _list_of(parent: Path, found: list[FoundCheckpoint], newest: str | None) -> Table:
    table = Table(title=f"checkpoints in {parent}", title_justify="left")
    for column in ("name", "saved", "complete", "topology", "precision"):
        table.add_column(column, overflow="fold")
    table.add_column("parameters", justify="right")
    table.add_column("size", justify="right")
    for each in found:
        manifest = each.manifest
        name = f"[bold]{escape_text(each.name)}[/bold] (newest)" if each.name == newest else escape_text(each.name)
        complete = "[green]yes[/green]" if each.is_whole else "[red]no[/red]"
        if manifest is None:
            table.add_row(name, "", complete, "", "", "", "")
            continue
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.saved)) if manifest.saved else ""
        table.add_row(
            name,
            saved,
            complete,
            escape_text(_topology(manifest)),
            escape_text(manifest.precision),
            f"{_elements(manifest):,}",
            _size(_bytes(manifest)),
        )
    return table


def _about(name: str, manifest: Manifest) -> str:
    lines = [
        f"[bold]{escape_text(name)}[/bold]: tag {escape_text(manifest.tag)}, written by smp-estimator "
        f"{escape_text(manifest.library or '?')}"
    ]
    optimizer = manifest.optimizer
    if optimizer is None:
        lines.append("no optimizer")
    else:
        trained = sum(len(group.get("params", ())) for group in optimizer.groups)
        lines.append(
            f"optimizer {escape_text(optimizer.type)} of {trained} parameters in {len(optimizer.groups)} groups; states: "
            f"{escape_text(', '.join(optimizer.states)) or 'none'}"
        )
    if manifest.translations:
        lines.append(f"distributed models of Transformers: {escape_text(', '.join(manifest.translations))}")
    return "\n".join(lines)


def _files_table(manifest: Manifest) -> Table:
    table = Table(title=f"{len(manifest.files)} files, {_size(_bytes(manifest))}", title_justify="left")
    table.add_column("file", overflow="fold")
    table.add_column("size", justify="right")
    table.add_column("tensors it has parts of", overflow="fold")
    for name, record in sorted(manifest.files.items()):
        held = manifest.pieces.get(name, {})
        table.add_row(
            escape_text(name),
            _size(record.bytes),
            escape_text(", ".join(f"{key} {len(names)}" for key, names in held.items())),
        )
    return table


def _tensors_table(manifest: Manifest) -> Table:
    table = Table(title=f"{len(manifest.parameters)} parameters, {len(manifest.buffers)} buffers", title_justify="left")
    for column in ("name", "shape", "type", "stage", "split along", "files"):
        table.add_column(column, overflow="fold")
    for records in (manifest.parameters, manifest.buffers):
        for name, record in records.items():
            aliases = "".join(f"\n= {alias}" for alias in record.aliases)
            files = {file for file, keys in manifest.pieces.items() if any(name in found for found in keys.values())}
            table.add_row(
                escape_text(name + aliases),
                " × ".join(map(str, record.shape)) or "scalar",
                escape_text(record.dtype),
                str(record.stage),
                "" if record.tensor_axis is None else f"dim {record.tensor_axis}",
                str(len(files)),
            )
    return table


def _as_json(found: FoundCheckpoint, *, tensors: bool) -> dict[str, Any]:
    about: dict[str, Any] = {
        "name": found.name,
        "folder": str(found.folder),
        "complete": found.is_whole,
        "problems": list(found.problems),
    }
    manifest = found.manifest
    if manifest is None:
        return about
    optimizer = manifest.optimizer
    about |= {
        "tag": manifest.tag,
        "saved": manifest.saved,
        "library": manifest.library,
        "topology": manifest.topology,
        "precision": manifest.precision,
        "parameters": _elements(manifest),
        "bytes": _bytes(manifest),
        "translations": manifest.translations,
        "optimizer": None if optimizer is None else {"type": optimizer.type, "states": optimizer.states},
        "files": {
            name: {"bytes": record.bytes, "checksum": record.checksum} for name, record in manifest.files.items()
        },
    }
    if tensors:
        about["tensors"] = {
            name: {
                "shape": list(record.shape),
                "dtype": record.dtype,
                "aliases": list(record.aliases),
                "stage": record.stage,
                "tensor_axis": record.tensor_axis,
                "buffer": name in manifest.buffers,
            }
            for records in (manifest.parameters, manifest.buffers)
            for name, record in records.items()
        }
    return about


# -- verify ------------------------------------------------------------------------------------------------------------


@checkpoint.command()
@_with_path
def verify(path: str, tag: str | None) -> None:
    """Read the checkpoints in PATH completely and report problems. Exit code 1 if there are any.

    Three things are checked. All files exist, with the lengths and checksums that were saved. Their pieces make up every
    weight and every optimizer state exactly once. The tensors in them have the sizes in the manifest. With --tag, only
    that checkpoint is checked, else all of them. PATH: as for inspect. Of full checkpoints in PATH, or if PATH is one, and of
    sharded ones of version 2, lengths and checksums are compared.
    """
    from smp_runtime.checkpoint.files.manifest import newest_name
    from smp_runtime.checkpoint.files.verification import problems_of
    from smp_runtime.checkpoint.full.full_manifest import find_full

    out = console()
    full, is_all = find_full(Path(path.removeprefix("file://")), tag)
    broken = [file.name for file in full if not _is_whole(file)]
    parent, found = _find(path) if not is_all else (Path(path).parent, [])
    chosen = _choose(parent, found, tag, may_be_broken=True) if tag is not None and not is_all else None
    for each in found if chosen is None else [chosen]:
        problems = problems_of(each)
        if problems:
            broken.append(each.name)
        size = "" if each.manifest is None else f" ({len(each.manifest.files)} files, {_size(_bytes(each.manifest))})"
        out.print(f"{'[red]broken[/red]' if problems else '[green]whole[/green]'} {escape_text(each.name)}{size}")
        for problem in problems:
            out.print(f"  {escape_text(problem)}", soft_wrap=True)
    newest = newest_name(parent)
    if tag is None and newest is not None and newest not in {c.name for c in found}:
        broken.append(newest)
        out.print(
            f"[red]broken[/red] the file newest names {escape_text(newest)}, which is not in {escape_text(str(parent))}"
        )
    whole = [c.name for c in found if c.name not in broken]
    if broken:
        if chosen is None:
            out.print(f"resuming takes {escape_text(whole[0])}" if whole else "there is nothing to resume from")
        raise click.exceptions.Exit(1)


def _is_whole(file: Path) -> bool:
    """Verify a full checkpoint, print what is wrong with it, and return whether nothing is."""
    from smp_runtime.checkpoint.full.full_manifest import problems_of_full

    problems = list(problems_of_full(file))
    kind = "version 2" if (file.parent / ".metadata").is_file() else "full"
    console().print(f"{'[red]broken[/red]' if problems else '[green]whole[/green]'} {escape_text(file.name)} ({kind})")
    for problem in problems:
        console().print(f"  {escape_text(problem)}", soft_wrap=True)
    return not problems


# -- convert -----------------------------------------------------------------------------------------------------------


@checkpoint.command()
@_with_path
@click.argument("out", metavar="OUT", type=click.Path())
@click.option(
    "--to",
    "form",
    type=click.Choice(["transformers", "safetensors", "full", "version2", "flat_groups"]),
    required=True,
    help="A folder for from_pretrained; one file of safetensors; one file of torch.save; a folder for torch.sagemaker; a folder "
    "for tools that read fp32_flat_groups.",
)
@click.option("--config", type=click.Path(exists=True, dir_okay=False), help="config.json of the model.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="Default: as they were trained.")
@click.option("--largest-file", default="5GB", show_default=True, help="Weights of Transformers beyond it are cut.")
def convert(
    path: str, tag: str | None, out: str, form: str, config: str | None, dtype: str | None, largest_file: str
) -> None:
    """Assemble whole weights from the checkpoint in PATH, whatever its topology, and write them to OUT.

    transformers: a folder with model.safetensors and config.json, which AutoModel…from_pretrained(OUT) loads. full: a
    state under the module's names, for load_state_dict or resume_from_checkpoint(partial=False). PATH may also be full
    weights: a file of torch.save or safetensors, or a folder of Transformers; or a sharded checkpoint of version 2 of the
    library. version2: such a checkpoint, {"model": …}. flat_groups: the files of sharded data parallelism, optimizer_<rank>.pt
    with partition_count and fp32_flat_groups. One tensor at a time is in memory, but with full, version2 and flat_groups all
    are.
    """
    target = Path(out)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError(
            f"OUT is {out}, which exists: nothing is overwritten; give a new name or remove it first", code="SMP402"
        )
    try:
        if form == "flat_groups":
            files, count = _write_flat_groups(path, tag, target)
        else:
            files, count = _write_weights(path, tag, target, form, config, dtype, largest_file)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or out} cannot be written or read: {error.strerror}", code="SMP402"
        ) from None
    except ValueError as error:
        raise ConfigError(str(error), code="SMP402") from None
    written = sum(file.stat().st_size for file in files)
    click.echo(f"{count} tensors, {_size(written)}: {', '.join(str(file) for file in files)}")


def _write_flat_groups(path: str, tag: str | None, target: Path) -> tuple[list[Path], int]:
    """Write the checkpoint in PATH for tools that read flat groups; return the files and the number of parameters."""
    from smp_runtime.checkpoint.full.flat_groups import write_flat_groups

    folder, manifest = _whole(path, tag)
    return write_flat_groups(folder, manifest, target)


def _write_weights(
    path: str, tag: str | None, target: Path, form: str, config: str | None, dtype: str | None, largest_file: str
) -> tuple[list[Path], int]:
    """Write the weights in PATH; return the files and the number of tensors."""
    from smp_runtime.checkpoint.files.transformers_format import bytes_in
    from smp_runtime.checkpoint.full import conversion

    size = bytes_in(largest_file)
    source = conversion.full_weights(Path(path), config) if tag is None else None
    if source is None and tag is None and _has_files_of_version_2(Path(path)):
        from smp_version2.checkpoint.conversion import read_weights_of_version_2

        source = read_weights_of_version_2(Path(path), config)
    if source is None:
        folder, manifest = _whole(path, tag)
        source = conversion.assemble_weights(folder, manifest, config, dtype)
    if form == "version2":
        from smp_version2.checkpoint.conversion import write_as_version_2

        return write_as_version_2(source, target, dtype)
    return conversion.write(source, target, form, dtype=dtype, largest_file=size)


def _whole(path: str, tag: str | None) -> tuple[Path, Manifest]:
    """Return the checkpoint in PATH that is converted, and its manifest."""
    parent, found = _find(path)
    chosen = _choose(parent, found, tag, may_be_broken=False)
    if chosen is None or chosen.manifest is None:
        raise AssertionError("a whole checkpoint has a manifest")
    click.echo(f"from {chosen.folder}")
    return chosen.folder, chosen.manifest


# -- PATH --------------------------------------------------------------------------------------------------------------


def _find(path: str) -> tuple[Path, list[FoundCheckpoint]]:
    """Return the checkpoint folder that PATH refers to, and its checkpoints, newest first.

    Raises:
        ConfigError: PATH is not a folder on this machine, or it does not lead to exactly one folder of checkpoints.
    """
    from smp_runtime.checkpoint.files.manifest import MANIFEST, PARTIAL, checkpoints_in, inspect_folder

    if path.startswith("s3://"):
        raise ConfigError(
            f"PATH is {path}, but checkpoints are read from this machine: copy them first, for example with "
            f"aws s3 cp --recursive {path} ./checkpoints",
            code="SMP402",
        )
    folder = Path(path.removeprefix("file://"))
    if not folder.is_dir():
        raise ConfigError(
            f"PATH is {path}, and there is no such folder ({folder.absolute()}): give a folder with checkpoints",
            code="SMP402",
        )
    if (folder / MANIFEST).is_file() or folder.name.endswith(PARTIAL):
        return folder.parent, [inspect_folder(folder)]
    if found := checkpoints_in(folder):
        return folder, found
    if _has_files_of_version_2(folder):
        raise ConfigError(
            f"PATH is {path}, which has sharded checkpoints of version 2 of the library (torch.sagemaker); convert reads them, "
            "without --tag, and the other commands are for version 1",
            code="SMP402",
        )
    partial = (p for p in folder.rglob(f"*{PARTIAL}") if p.is_dir() and len(p.relative_to(folder).parts) <= _DEPTH)
    below = sorted({p.parent for p in partial})
    if len(below) > 1:
        raise ConfigError(
            f"PATH is {path}, below which {len(below)} folders have checkpoints: give one of them, such as "
            f"{', '.join(map(str, below[:4]))}",
            code="SMP402",
        )
    if not below:
        raise ConfigError(
            f"PATH is {path}, and neither it nor a folder below has a partial checkpoint (a folder TAG{PARTIAL}), or a full one "
            "with checksums: give the path that the script hands to smp.save_checkpoint, or the estimator's checkpoint_s3_uri",
            code="SMP402",
        )
    return below[0], checkpoints_in(below[0])


def _has_files_of_version_2(path: Path) -> bool:
    """Return whether a folder has sharded checkpoints of version 2 of the library, or of the original's."""
    if not path.is_dir():
        return False
    patterns = (".metadata", ".local.metadata")
    return any(any(path.rglob(pattern)) for pattern in patterns)


def _choose(
    parent: Path, found: list[FoundCheckpoint], tag: str | None, *, may_be_broken: bool
) -> FoundCheckpoint | None:
    """Return the checkpoint with this tag, or the newest complete one.

    With ``may_be_broken``, fall back to the newest checkpoint if none is complete.
    """
    if tag is not None:
        chosen = _with_tag(found, tag)
        if chosen is None:
            names = ", ".join(c.name for c in found)
            raise ConfigError(f"--tag is {tag}, but {parent} has {names}: use one of these", code="SMP402")
    else:
        chosen = next((c for c in found if c.is_whole), None)
    if may_be_broken:
        return chosen or found[0]
    if chosen is None or not chosen.is_whole:
        whole = ", ".join(c.name for c in found if c.is_whole) or "none"
        raise ConfigError(
            f"there is no whole checkpoint to convert ({_problems_of(found, chosen)}); whole ones in {parent}: {whole}",
            code="SMP402",
        )
    return chosen


def _problems_of(found: list[FoundCheckpoint], chosen: FoundCheckpoint | None) -> str:
    broken = found if chosen is None else [chosen]
    return "; ".join(f"{c.name}: {c.problems[0]}" for c in broken if c.problems)


def _with_tag(found: list[FoundCheckpoint], tag: str) -> FoundCheckpoint | None:
    for checkpoint in found:
        names = (checkpoint.name, checkpoint.name.removesuffix("_partial"))
        if tag in names:
            return checkpoint
    return None


# -- words -------------------------------------------------------------------------------------------------------------


def _elements(manifest: Manifest) -> int:
    return sum(record.elements for record in manifest.parameters.values())


def _bytes(manifest: Manifest) -> int:
    return sum(record.bytes for record in manifest.files.values())


def _topology(manifest: Manifest) -> str:
    about = manifest.topology
    details = []
    for key, short in _DEGREES.items():
        if about.get(key, 1) > 1:
            details.append(f"{short} {about[key]}")
    if about.get("shard_optimizer_state"):
        details.append("state sharded")
    ranks = about.get("world_size", "?")
    size = "1 rank" if ranks == 1 else f"{ranks} ranks"
    return f"{size}: {', '.join(details)}" if details else size


_DEGREES = {"pipeline": "pp", "tensor": "tp", "sharded": "sharded"}


def _size(count: int) -> str:
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"
