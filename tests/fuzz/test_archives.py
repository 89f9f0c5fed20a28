"""1,000 hostile archives: nothing of them comes to lie outside the folder, and what is refused leaves nothing inside."""

from __future__ import annotations

import gzip
import io
import os
import random
import stat
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest
from support.faults import hostile

from smp_config import ConfigError
from smp_estimator.cloud import entry
from smp_estimator.local.files import archives
from smp_estimator.timeline.files import read_timeline
from smp_records.timeline import FILE_PREFIX, RankTimeline, StepTimeline

pytestmark = pytest.mark.filterwarnings("ignore:Duplicate name")

SEED = 22
COUNT = 1000
SAMPLE = 60

#: Of all files of an archive of these tests; the real limit takes long to reach.
LIMIT = 1 << 20

#: AWAY stands for a folder of the test's own, so that a fault does no harm outside of it.
_NAMES = (
    "train.py",
    "lib/a.py",
    "lib/deep/b.py",
    "./c.py",
    "a/../d.py",
    "../outside.py",
    "lib/../../outside.py",
    "AWAY/outside.py",
    "/AWAY/outside.py",
    "..",
    ".",
    "",
    "link/inside.py",
    "link",
    "lib",
    "x" * 254,
    "x" * 300,
    "y/" * 200 + "z.py",
    "y/" * 3000 + "z.py",
    "with\nbreak.py",
    "-x.py",
    "a\\..\\b.py",
    "ä.py",
    "timeline-rank0.json",
    "timeline-rank0.json",
    "output/timeline-rank1.json",
)
_TARGETS = (
    "train.py",
    "..",
    "../..",
    "AWAY/secret",
    "lib",
    "link",
    ".",
    "lib/../..",
    "../secret",
    "nowhere",
    "deep/../../x",
    "a/b",
)
_KINDS = (
    *[tarfile.REGTYPE] * 8,
    *[tarfile.SYMTYPE] * 4,
    *[tarfile.LNKTYPE] * 2,
    *[tarfile.DIRTYPE] * 2,
    tarfile.FIFOTYPE,
    tarfile.CHRTYPE,
    tarfile.BLKTYPE,
    tarfile.CONTTYPE,
    tarfile.GNUTYPE_SPARSE,
    b"Z",
)


def tar(source: random.Random, away: str) -> bytes:
    """An archive of a few members, each of which may be anything."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=source.choice((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT))) as archive:
        if source.random() < 0.7:
            _add(archive, tarfile.TarInfo("train.py"), b"print('trained')\n")
        for _ in range(source.choice((0, 1, 1, 2, 3, 6))):
            member = tarfile.TarInfo(
                source.choice(_NAMES).replace("AWAY", away)
                if source.random() < 0.8
                else f"plain-{source.randrange(9)}.py"
            )
            member.type = source.choice(_KINDS) if source.random() < 0.6 else tarfile.REGTYPE
            member.mode = source.choice((0o644, 0o777, 0o6777, 0))
            member.uid = source.choice((0, 1000))
            if member.type in (tarfile.SYMTYPE, tarfile.LNKTYPE):
                member.linkname = source.choice(_TARGETS).replace("AWAY", away)
            _add(archive, member, b"x" * source.choice((0, 1, 1000, LIMIT // 2, LIMIT + 1)))
    data = raw.getvalue()
    way = source.randrange(12)
    if way == 0:
        data = data[: source.randrange(len(data))]
    elif way == 1:
        data = bytearray(data)
        for _ in range(source.choice((1, 5, 200))):
            data[source.randrange(len(data))] = source.randrange(256)
        data = bytes(data)
    elif way == 2:
        # A header that promises more than follows, up to what its twelve digits can say.
        header = tarfile.TarInfo("huge.bin")
        header.size = source.choice((LIMIT + 1, 1 << 32, 1 << 40, 1 << 62))
        header.type = source.choice((tarfile.REGTYPE, tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.XGLTYPE))
        data = header.tobuf(tarfile.GNU_FORMAT) + data
    elif way == 3:
        data = source.randbytes(3000)
    packed = gzip.compress(data, 1) if source.random() < 0.8 else data
    if source.random() < 0.05:
        packed = packed[: source.randrange(len(packed) + 1)]
    return packed


def _add(archive: tarfile.TarFile, member: tarfile.TarInfo, content: bytes) -> None:
    if member.isreg() and PurePosixPath(member.name).name.startswith(FILE_PREFIX) and len(content) < LIMIT:
        rank = int(member.name[-6])
        step = StepTimeline(number=1, start=0.0, stop=1.0, actions=[(0, "F", 0, 0, 0.0, 1.0)])
        timeline = RankTimeline(job="a", rank=rank, stage=rank, names=["forward"], paths=["layer"], steps=[step])
        content = timeline.model_dump_json().encode()
    if member.isreg() and member.type != tarfile.GNUTYPE_SPARSE:
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    else:
        archive.addfile(member)


def wheel(source: random.Random, away: str) -> bytes:
    """A zip file of a few members, each of which may be anything."""
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("smp_config/__init__.py", "")
        for _ in range(source.choice((0, 1, 2, 4))):
            member = zipfile.ZipInfo(source.choice(_NAMES).replace("AWAY", away) or "empty")
            member.external_attr = source.choice((0o644, 0o120777, 0o010644, 0o060644)) << 16
            archive.writestr(member, b"x" * source.choice((0, 10, LIMIT + 1)))
    data = bytearray(raw.getvalue())
    if source.random() < 0.3:
        for _ in range(source.choice((1, 20))):
            data[source.randrange(len(data))] = source.randrange(256)
    return bytes(data[: source.randrange(len(data))] if source.random() < 0.1 else data)


def _harmless(folder: Path) -> None:
    """Only files, folders, and links that stay inside; not more than the limit, and nothing that others may write."""
    size = 0
    for path in folder.rglob("*"):
        about = path.lstat()
        kind = stat.S_IFMT(about.st_mode)
        assert kind in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK), path
        if kind == stat.S_IFLNK:
            assert Path(os.path.realpath(path)).is_relative_to(folder), (path, os.readlink(path))
        else:
            assert not about.st_mode & 0o6002, (path, oct(about.st_mode))
        size += about.st_size if kind == stat.S_IFREG else 0
    assert size <= LIMIT


def _unpack_source(content: bytes, folder: Path) -> None:
    (folder / "source.tar.gz").write_bytes(content)
    target = folder / "code"
    target.mkdir()
    try:
        archives.unpack(folder / "source.tar.gz", target, "s3://bucket/source.tar.gz")
    except ConfigError:
        assert not list(target.iterdir()), "refused, and nothing is left"
        raise
    _harmless(target)


def _read_output(content: bytes, folder: Path) -> None:
    (folder / "output.tar.gz").write_bytes(content)
    read_timeline(str(folder))


def _unpack_wheel(content: bytes, folder: Path) -> None:
    (folder / "runtime.whl").write_bytes(content)
    try:
        site = entry.unpack_wheel(str(folder / "runtime.whl"))
    except RuntimeError as error:
        assert [path.name for path in folder.iterdir()] == ["runtime.whl"], "refused, and nothing is left"
        raise ConfigError(str(error)) from error
    assert Path(site).parent == folder
    _harmless(Path(site))


_READERS: dict[str, tuple[Callable[[random.Random, str], bytes], Callable[[bytes, Path], None]]] = {
    "source": (tar, _unpack_source),
    "output": (tar, _read_output),
    "runtime": (wheel, _unpack_wheel),
}


@pytest.mark.parametrize("kind", list(_READERS))
@pytest.mark.parametrize("count", [SAMPLE, pytest.param(COUNT, marks=pytest.mark.full)])
@pytest.mark.timeout(900)
def test_hostile_archives(
    kind: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(archives, "MOST_BYTES", LIMIT)
    monkeypatch.setattr(entry, "_MOST_BYTES", LIMIT)
    make, read = _READERS[kind]
    tally = hostile.Tally((ConfigError,))
    (tmp_path / "secret").write_text("as it was")
    for number in range(count):
        source = random.Random(f"{SEED}-{kind}-{number}")
        content = make(source, str(tmp_path))
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(folder))
        tally.judge((number, content[:100]), lambda content=content, folder=folder: read(content, folder))
        archives._empty(folder)
        folder.rmdir()
        assert [path.name for path in tmp_path.iterdir()] == ["secret"], number
    with capsys.disabled():
        if count > SAMPLE:
            print(f"\narchives, {kind}: {tally}")
    assert (tmp_path / "secret").read_text() == "as it was"
    assert not tally.wrong, str(tally)
    assert tally.counts["refused"] > count / 4
    assert tally.counts["accepted"] > count / 20


def test_what_is_refused_says_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MOST_BYTES", LIMIT)

    def refused(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 1) -> str:
        raw = io.BytesIO()
        with tarfile.open(fileobj=raw, mode="w:gz") as archive:
            _add(archive, tarfile.TarInfo("first.py"), b"")
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, link
            _add(archive, member, bytes(size))
        path = tmp_path / "a.tar.gz"
        path.write_bytes(raw.getvalue())
        (tmp_path / "code").mkdir(exist_ok=True)
        with pytest.raises(ConfigError) as caught:
            archives.unpack(path, tmp_path / "code", "the source")
        return str(caught.value)

    assert "'../x', which lies outside" in refused("../x")
    assert f"'{tmp_path}/x', which lies outside" in refused(f"{tmp_path}/x")
    assert "'f', which is neither a file, a folder nor a link" in refused("f", tarfile.FIFOTYPE)
    assert "'d', which is neither" in refused("d", tarfile.CHRTYPE)
    assert "'first.py', a second time" in refused("first.py")
    assert "'l', a link to '../x', which lies outside" in refused("l", tarfile.SYMTYPE, "../x")
    assert "'l', a link to 'other', which is no earlier file" in refused("l", tarfile.LNKTYPE, "other")
    assert f"the source holds {LIMIT + 1:,} bytes or more" in refused("big", size=LIMIT + 1)


def test_a_bomb_is_refused_by_its_headers(tmp_path: Path) -> None:
    bomb = tarfile.TarInfo("bomb")
    bomb.size = archives.MOST_BYTES + 1
    (tmp_path / "bomb.tar.gz").write_bytes(gzip.compress(bomb.tobuf() + bytes(1 << 20)))
    (tmp_path / "code").mkdir()
    with hostile.alarm(), pytest.raises(ConfigError, match="put data into a channel"):
        archives.unpack(tmp_path / "bomb.tar.gz", tmp_path / "code", "the source")


def test_a_header_that_would_fill_the_memory(tmp_path: Path) -> None:
    named = tarfile.TarInfo("././@LongLink")
    named.type, named.size = tarfile.GNUTYPE_LONGNAME, 1 << 30
    (tmp_path / "long.tar.gz").write_bytes(gzip.compress(named.tobuf(tarfile.GNU_FORMAT) + bytes(1 << 20)))
    (tmp_path / "code").mkdir()
    with pytest.raises(ConfigError, match=r"a header says that 1,073,742,336 bytes belong to it|1,073,741,824 bytes"):
        archives.unpack(tmp_path / "long.tar.gz", tmp_path / "code", "the source")


def test_what_is_in_order_is_unpacked(tmp_path: Path) -> None:
    (tmp_path / "src" / "lib").mkdir(parents=True)
    (tmp_path / "src" / "train.py").write_text("train")
    (tmp_path / "src" / "lib" / "a.py").write_text("a")
    (tmp_path / "src" / "lib" / "latest.py").symlink_to("a.py")
    (tmp_path / "src" / "lib" / "up.py").symlink_to("../train.py")
    (tmp_path / "code").mkdir()
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "src", arcname=".")
    archives.unpack(tmp_path / "a.tar.gz", tmp_path / "code", "the source")
    assert (tmp_path / "code" / "lib" / "latest.py").read_text() == "a"
    assert (tmp_path / "code" / "lib" / "up.py").read_text() == "train"
