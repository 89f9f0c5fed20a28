"""Checkpoints as crashes, disks and strangers leave them: every damage follows from a seed."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import random
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from smp_runtime.checkpoint.files.records import DIGEST, digest_of

#: What stands where a number, a name or a list was.
_STRANGE: list[Any] = [
    None, True, -1, 0, 7, 2**31, 2**63, 10**30, 1.5, float("nan"), float("inf"), "", "x", "../../outside/model.pt",
    "/etc/passwd", "\ud800", "a\0b", [], [[]], {}, {"": None}, [1, "2", None], "é" * 300,
    "[/red][bold", "\x1b]0;title\x07\x1b[2J",
]  # fmt: skip


class RunsCode:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self._file),))


@dataclass(frozen=True)
class Damage:
    """What was done to a checkpoint.

    Attributes:
        is_forged: checksums were made to fit, as only a stranger does: then other values are no one's fault.
    """

    what: str
    is_forged: bool = False


def in_older_form(data: Mapping[str, Any], folder: Path, version: int) -> dict[str, Any]:
    """Return a manifest as releases up to 1.16 wrote it, with a checksum of itself that fits.

    Args:
        version: its format: 3 keeps the crc32 of archives; 1 and 2 have the SHA-256 of whole files.
    """
    files = {}
    for name, record in data["files"].items():
        kind, _, value = record["checksum"].partition(":")
        of_headers = version == 3 and kind == "crc32"
        if not of_headers:
            value = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        files[name] = {"bytes": record["bytes"], "sha256": value, "copies": []}
        if version == 3:
            files[name]["of_headers"] = of_headers
    older = {**data, "format": version, "files": files}
    return {**older, DIGEST: digest_of(older)}


def damage(folder: Path, outside: Path, seed: int) -> Damage:
    """Damage a partial checkpoint, or ``newest`` beside it, in one way.

    Args:
        folder: such as ``2_partial``.
        outside: a folder that no checkpoint may reach.
    """
    chance = random.Random(seed)
    kind = chance.choice(_KINDS)
    return kind(folder, outside, chance)


def damage_full(folder: Path, tag: str, outside: Path, seed: int) -> Damage:
    """Damage one of the files of a full checkpoint in one way."""
    chance = random.Random(seed)
    file = folder / chance.choice([tag, f"{tag}_optimizer", f"user_content_{tag}"])
    made = chance.choice([_bytes_changed, _cut, _other_kind, _other_content])(file, outside, chance)
    # These files have no checksum of their own: what still is a file of tensors counts.
    return Damage(f"{file.name}: {made}", is_forged=True)


# -- one file ----------------------------------------------------------------------------------------------------------


def _bytes_changed(file: Path, outside: Path, chance: random.Random) -> str:
    content = bytearray(file.read_bytes())
    place = chance.randrange(max(1, len(content)))
    how = chance.choice(["change", "flip", "insert", "delete", "double"])
    if how == "change" and content:
        content[place] = (content[place] + chance.randrange(1, 256)) % 256
    elif how == "flip" and content:
        content[place] ^= 1 << chance.randrange(8)
    elif how == "insert":
        content.insert(place, chance.randrange(256))
    elif how == "delete" and content:
        del content[place]
    else:
        content += content[place:]
    file.write_bytes(bytes(content))
    return f"{how} at {place}"


def _cut(file: Path, outside: Path, chance: random.Random) -> str:
    content = file.read_bytes()
    length = chance.choice([0, 1, len(content) // 2, len(content) - 1])
    file.write_bytes(content[:length])
    return f"cut to {length}"


def _other_kind(file: Path, outside: Path, chance: random.Random) -> str:
    content = file.read_bytes()
    file.unlink()
    how = chance.choice(["pipe", "folder", "endless", "link out", "broken link", "absent"])
    if how == "pipe":
        os.mkfifo(file)
    elif how == "folder":
        file.mkdir()
    elif how == "endless":
        file.symlink_to("/dev/zero")
    elif how == "link out":
        (outside / "taken.pt").write_bytes(content)
        file.symlink_to(outside / "taken.pt")
    elif how == "broken link":
        file.symlink_to(outside / "nothing")
    return how


def _other_content(file: Path, outside: Path, chance: random.Random) -> str:
    how = chance.choice(["random", "pickle that runs code", "list", "nested", "other tensors", "unpacks", "text"])
    content = io.BytesIO()
    if how == "random":
        content.write(chance.randbytes(chance.randrange(1, 3000)))
    elif how == "pickle that runs code":
        if chance.random() < 0.5:
            torch.save({"module": RunsCode(outside / "ran")}, content)
        else:
            content.write(pickle.dumps(RunsCode(outside / "ran")))
    elif how == "list":
        torch.save([1, "a", torch.ones(2)], content)
    elif how == "nested":
        value: Any = {}
        for _ in range(chance.choice([5, 400])):
            value = {"module": value, "state": [value], "param_groups": value}
        torch.save(value, content)
    elif how == "other tensors":
        names = ["weight", "bias"]
        value = {name: torch.ones(chance.randrange(9)) for name in names}
        torch.save({"module": value, "state": {name: {"exp_avg": 3} for name in names}, "param_groups": []}, content)
    elif how == "unpacks":
        with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a/data.pkl", b"\0" * 50_000_000)
            archive.writestr("a/version", b"3")
    else:
        content.write(b"{}")
    file.write_bytes(content.getvalue())
    return how


# -- a folder ----------------------------------------------------------------------------------------------------------


def _manifest_bytes(folder: Path, outside: Path, chance: random.Random) -> Damage:
    return Damage(f"manifest: {_bytes_changed(folder / 'manifest.json', outside, chance)}")


def _manifest_other(folder: Path, outside: Path, chance: random.Random) -> Damage:
    file = folder / "manifest.json"
    texts = [
        "",
        "{",
        "[]",
        "null",
        "{}",
        "[" * 100_000,
        '{"a":' * 5000,
        '{"format":2,"files":{},"pieces":{}}',
        "\xff",
        "9" * 5_000,
    ]
    how = chance.choice(["text", "cut", "kind"])
    if how == "text":
        text = chance.choice(texts)
        file.write_bytes(text.encode("latin-1"))
        return Damage(f"manifest is {text[:20]!r}")
    return Damage(f"manifest: {(_cut if how == 'cut' else _other_kind)(file, outside, chance)}")


def _manifest_forged(folder: Path, outside: Path, chance: random.Random) -> Damage:
    """Another value, name or number somewhere in the manifest, with a checksum that fits, or in the form without one."""
    file = folder / "manifest.json"
    data = json.loads(file.read_text())
    places = list(_places(data))
    holder, key = chance.choice(places)
    value = chance.choice(_STRANGE)
    how = chance.choice(["value", "number", "name", "gone"])
    where = f"{key!r} of {str(holder)[:60]}"
    if how == "name" and isinstance(holder, dict):
        holder[str(value)] = holder.pop(key)
    elif how == "gone":
        del holder[key]
    elif how == "number" and isinstance(holder[key], int) and not isinstance(holder[key], bool):
        holder[key] += chance.choice([-1, 1, 100, 10**12])
    else:
        holder[key] = value
    if chance.random() < 0.3:
        with contextlib.suppress(
            KeyError, TypeError, AttributeError, OSError, ValueError
        ):  # a forged one need not have the form
            data = in_older_form(data, folder, 1)
        data.pop(DIGEST, None)
        data["format"] = 1
    else:
        data[DIGEST] = digest_of(data)
    file.write_text(json.dumps(data))
    return Damage(f"manifest forged: {how} {where} -> {str(value)[:30]!r}", is_forged=True)


def _places(value: Any) -> Any:
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


def _file_damaged(folder: Path, outside: Path, chance: random.Random) -> Damage:
    file = chance.choice(sorted(p for p in folder.iterdir() if p.name != "manifest.json"))
    how = chance.choice([_bytes_changed, _cut, _other_kind, _other_content])
    return Damage(f"{file.name}: {how(file, outside, chance)}")


def _files_swapped(folder: Path, outside: Path, chance: random.Random) -> Damage:
    one, other = chance.sample(sorted(p for p in folder.iterdir() if p.name != "manifest.json"), 2)
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    return Damage(f"{one.name} and {other.name} swapped")


def _file_forged(folder: Path, outside: Path, chance: random.Random) -> Damage:
    """Another content of a file, with checksums that fit."""
    name = chance.choice(sorted(p.name for p in folder.iterdir() if p.name != "manifest.json"))
    what = chance.choice([_other_content, _bytes_changed, _cut])(folder / name, outside, chance)
    data = json.loads((folder / "manifest.json").read_text())
    content = (folder / name).read_bytes()
    data["files"][name] |= {"bytes": len(content), "checksum": f"sha256:{hashlib.sha256(content).hexdigest()}"}
    data[DIGEST] = digest_of(data)
    (folder / "manifest.json").write_text(json.dumps(data))
    return Damage(f"{name} forged: {what}", is_forged=True)


def _newest(folder: Path, outside: Path, chance: random.Random) -> Damage:
    file = folder.parent / "newest"
    how = chance.choice(["bytes", "kind", "path", "binary"])
    if how == "path":
        file.write_text(chance.choice(["../outside", str(outside), ".", "..", "a\0b", "x" * 10_000]))
        return Damage("newest names another place")
    if how == "binary":
        file.write_bytes(b"\xff\xfe\0")
        return Damage("newest is no text")
    return Damage(f"newest: {(_bytes_changed if how == 'bytes' else _other_kind)(file, outside, chance)}")


_KINDS: list[Callable[[Path, Path, random.Random], Damage]] = [
    _manifest_bytes,
    _manifest_bytes,
    _manifest_other,
    _manifest_forged,
    _manifest_forged,
    _file_damaged,
    _file_damaged,
    _files_swapped,
    _file_forged,
    _file_forged,
    _newest,
]


# -- weights of Transformers -------------------------------------------------------------------------------------------

#: What stands where a type, a shape or a place in the file was.
_STRANGE_FIELDS: dict[str, list[Any]] = {
    "dtype": ["F32", "F64", "F8_E4M3", "BOOL", "X9", "", None, 7, ["F32"]],
    "shape": [[], [0], [3, 2, 1], [2**62, 4], [-1, 6], [10**30], [1.5], "6", None, {}],
    "data_offsets": [[0, 0], [0, 2**62], [8, 0], [-8, 16], [0], [0, 8, 16], [10**30, 10**31], "0-8", None],
}


def damage_safetensors(folder: Path, outside: Path, seed: int) -> Damage:
    """Damage weights that are two shards and their index in one way; nothing but the format itself protects them."""
    chance = random.Random(seed)
    index = folder / "model.safetensors.index.json"
    shard = chance.choice(sorted(folder.glob("*.safetensors")))
    kind = chance.choice(["header", "header", "fields", "fields", "index", "index", "file", "names"])
    if kind == "header":
        what = _header(shard, chance)
    elif kind == "fields":
        what = _field(shard, chance)
    elif kind == "index":
        what = _index(index, shard, outside, chance)
    elif kind == "file":
        what = chance.choice([_bytes_changed, _cut, _other_kind, _other_content])(
            chance.choice([shard, index]), outside, chance
        )
    else:
        one, other = sorted(folder.glob("*.safetensors"))
        content = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(content)
        what = "shards swapped"
    return Damage(f"{shard.name}: {kind}: {what}", is_forged=True)


def _header(file: Path, chance: random.Random) -> str:
    """Another length of the header, or another text in its place."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    how = chance.choice(["length", "text", "nested", "twice", "metadata"])
    if how == "length":
        number = chance.choice([0, 1, length - 1, length + 1, 10**8 + 1, 2**31, 2**63, 2**64 - 1])
        file.write_bytes(number.to_bytes(8, "little") + content[8:])
        return f"{how} {number}"
    header = content[8 : 8 + length]
    if how == "text":
        header = chance.choice([b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"a":1}', b'{"":{}}', b"{}" + b" " * 1000])
    elif how == "nested":
        header = b'{"a":' * 20_000 + b"1" + b"}" * 20_000
    elif how == "twice":
        header = b"{" + header.strip()[1:-1] + b"," + header.strip()[1:]
    else:
        about = json.loads(header)
        about["__metadata__"] = chance.choice([None, 7, {"a": 1}, {"format": "x"}, {"a": {"b": []}}, []])
        header = json.dumps(about).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    return how


def _field(file: Path, chance: random.Random) -> str:
    """Another value in the header's record of a tensor, or another name."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    about = json.loads(content[8 : 8 + length])
    name = chance.choice([name for name in about if name != "__metadata__"])
    if chance.random() < 0.15:
        other = chance.choice(["", "../../x", "a\0b", "x" * 5000, "weight.weight"])
        about[other] = about.pop(name)
        what = f"{name} -> {other[:20]!r}"
    else:
        key = chance.choice(list(_STRANGE_FIELDS))
        about[name][key] = chance.choice(_STRANGE_FIELDS[key])
        what = f"{key} of {name} -> {str(about[name][key])[:30]}"
    header = json.dumps(about).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    return what


def _index(file: Path, shard: Path, outside: Path, chance: random.Random) -> str:
    """Another file in the index, or no index."""
    data = json.loads(file.read_text())
    (outside / "model.safetensors").write_bytes(shard.read_bytes())
    name = chance.choice(list(data["weight_map"]))
    other = chance.choice(
        [
            "../outside/model.safetensors", str(outside / "model.safetensors"), "..", ".", "", "/dev/zero", "a\0b", "pipe",
            "endless", 7, None, [], {}, "x" * 5000, file.name, "model.bin",
        ]
    )  # fmt: skip
    if other == "pipe":
        os.mkfifo(file.with_name("pipe"))
    elif other == "endless":
        file.with_name("endless").symlink_to("/dev/zero")
    elif other == "model.bin":
        torch.save({name: RunsCode(outside / "ran")}, file.with_name("model.bin"))
    how = chance.choice(["one", "all", "map"])
    if how == "map":
        data["weight_map"] = chance.choice([None, [], {}, "x", {"a": "b"}, {"": ""}, other])
    else:
        for each in data["weight_map"] if how == "all" else [name]:
            data["weight_map"][each] = other
    file.write_text(json.dumps(data))
    return f"{how} -> {str(other)[:40]!r}"
