"""Damaged checkpoints: each is refused with an error of ours or loads what was saved, and nothing else happens."""

from __future__ import annotations

import json
import logging
import random
import re
import shutil
import time
import zipfile
from collections import Counter
from pathlib import Path

import pytest
from support.faults.damaged_checkpoints import damage, damage_full
from support.faults.small_checkpoints import SECONDS, SmallModel, bounded

import smdistributed.modelparallel.torch as smp
from smp_runtime.checkpoint.files import checksums
from smp_runtime.checkpoint.files.manifest import inspect_folder
from smp_runtime.checkpoint.files.verification import problems_of
from smp_runtime.errors import CheckpointError, SMPError
from smp_runtime.job import session


@pytest.fixture
def small(tmp_path):
    logging.getLogger("smp").setLevel(logging.ERROR)  # thousands of warnings
    session.init({})
    try:
        yield SmallModel(tmp_path / "good")
    finally:
        session.shutdown()
        logging.getLogger("smp").setLevel(logging.INFO)


def _tried(small, tmp_path, seed):
    """Damage a copy of the checkpoints and resume from it; returns what was done, and what came out."""
    # Compared with what random seeds do, every eighth seed is of a full checkpoint.
    is_full = seed % 8 == 7
    where, outside = tmp_path / "damaged", tmp_path / "outside"
    for folder in (where, outside):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(tmp_path / "good", where, ignore=shutil.ignore_patterns(".smp-saving"))
    outside.mkdir()
    done = damage_full(where, "full2", outside, seed) if is_full else damage(where / "2_partial", outside, seed)
    before = sorted(p.name for p in outside.iterdir())
    small.fill(0)
    began, refused, content = time.monotonic(), None, None
    try:
        with bounded():
            if is_full:
                content = smp.resume_from_checkpoint(str(where), tag="full2", partial=False)
            else:
                content = smp.resume_from_checkpoint(str(where), tag=(None, "2")[seed % 2])
    except SMPError as error:
        refused = error
    except BaseException as error:
        raise AssertionError(f"seed {seed}, {done.what}: {type(error).__name__}: {error}") from error
    shown = content if isinstance(content, int) else type(content).__name__
    said = f"seed {seed}, {done.what}: {shown}, {small.numbers()}, {refused}"
    assert time.monotonic() - began < SECONDS, said
    assert sorted(p.name for p in outside.iterdir()) == before, said
    if refused is not None:
        assert small.numbers() == {0.0}, f"{said}: something was loaded"
        assert len(str(refused)) > 40, said
    elif not done.is_forged:
        assert content in (1, 2), said
        assert small.numbers() == {float(content)}, said
    return done, refused


@pytest.mark.parametrize("count", [64, pytest.param(600, marks=[pytest.mark.full, pytest.mark.timeout(900)])])
def test_damaged_checkpoints_are_refused_or_load_what_was_saved(small, tmp_path, count):
    outcomes = [_tried(small, tmp_path, seed) for seed in range(count)]
    refused = sum(error is not None for _, error in outcomes)
    print(f"{refused} of {count} refused")
    # Most damage is to what is needed; some is answered by the checkpoint before, or is of what nobody reads.
    assert 0.3 * count < refused < 0.95 * count


def _regions(file: Path) -> dict[str, list[range]]:
    """Return the bytes of a file by what they are: parts of an archive or of a manifest, or all of it."""
    content = file.read_bytes()
    if file.name == "manifest.json":
        kinds = {"a name": rb'"[^"]*":', "a text": rb'"[^"]*"(?!:)', "a number": rb"[0-9.]+", "between": rb"[][{},:]+"}
        return {kind: [range(*match.span()) for match in re.finditer(text, content)] for kind, text in kinds.items()}
    if not zipfile.is_zipfile(file):
        return {"all": [range(len(content))]}
    with zipfile.ZipFile(file) as archive:
        entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
        directory = archive.start_dir
    found: dict[str, list[range]] = {"directory": [range(directory, len(content))]}
    ends = [*(entry.header_offset for entry in entries[1:]), directory]
    for entry, end in zip(entries, ends, strict=True):
        name_ends = entry.header_offset + 30 + len(entry.filename)
        begin = name_ends + int.from_bytes(content[entry.header_offset + 28 : entry.header_offset + 30], "little")
        kind = (
            "tensor" if "/data/" in entry.filename else "pickle" if entry.filename.endswith(".pkl") else "small record"
        )
        found.setdefault("header", []).append(range(entry.header_offset, name_ends))
        found.setdefault("padding", []).append(range(name_ends, begin))
        found.setdefault(kind, []).append(range(begin, begin + entry.file_size))
        found.setdefault("behind a record", []).append(range(begin + entry.file_size, end))
    return found


def _flips(folder: Path, count: int, chance: random.Random):
    """Yield a file, a region of it, and a place in that: every region of every file in turn."""
    places = []
    for file in sorted(folder.iterdir()):
        for region, runs in _regions(file).items():
            filled = [run for run in runs if len(run)]
            if filled:
                places.append((file, region, filled))
    for number in range(count):
        file, region, runs = places[number % len(places)]
        yield file, region, chance.choice(chance.choice(runs))


@pytest.mark.parametrize("hashed", ["xxh3_128", "crc32"])
@pytest.mark.parametrize("count", [80, pytest.param(2000, marks=[pytest.mark.full, pytest.mark.timeout(900)])])
def test_a_flipped_bit_is_found_in_every_region_of_every_file(tmp_path, monkeypatch, count, hashed):
    if hashed == "crc32":
        monkeypatch.setattr(checksums, "_xxhash", lambda: None)
    elif not checksums.has_xxh3():
        pytest.skip("xxhash is not installed")
    session.init({})
    try:
        small = SmallModel(tmp_path)
        folder = tmp_path / "2_partial"
        assert hashed in (folder / "manifest.json").read_text()
        silent, regions = [], Counter()
        for file, region, place in _flips(folder, count, random.Random(count)):
            good = file.read_bytes()
            changed = bytearray(good)
            changed[place] ^= 1 << place % 8
            file.write_bytes(changed)
            regions[file.name.partition("_")[0], region] += 1
            is_same = _says_the_same(file, good, bytes(changed))
            if not is_same and not problems_of(inspect_folder(folder)):
                silent.append((file.name, region, place))
            if not is_same and sum(regions.values()) % 10 == 0:  # a load takes longer
                small.fill(0)
                with pytest.raises(CheckpointError):
                    smp.resume_from_checkpoint(str(tmp_path), tag="2")
                assert small.numbers() == {0.0}
            file.write_bytes(good)
        print(regions)
        assert silent == []
        assert len(regions) >= 12
        assert problems_of(inspect_folder(folder)) == []
        assert smp.resume_from_checkpoint(str(tmp_path), tag="2") == 2
    finally:
        session.shutdown()


def _says_the_same(file: Path, good: bytes, changed: bytes) -> bool:
    """Return whether a manifest has the same content, as with another space."""
    try:
        return file.name == "manifest.json" and json.loads(good) == json.loads(changed)
    except ValueError:
        return False
