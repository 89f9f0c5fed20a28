"""Checksums of files and archives: every byte counts, and each names its hash; a reader without it reports that."""

import hashlib
import io
import json
import logging
import random
import zipfile

import pytest
import torch
from support.faults.damaged_checkpoints import in_older_form

import smdistributed.modelparallel.torch as smp
from smp_runtime.checkpoint.files import checksums
from smp_runtime.checkpoint.files.archive_checksums import checksum_of_archive
from smp_runtime.checkpoint.files.atomic_file import write_recorded
from smp_runtime.checkpoint.files.manifest import inspect_folder, read_manifest
from smp_runtime.checkpoint.files.records import digest_of
from smp_runtime.checkpoint.files.verification import problems_of
from smp_runtime.errors import CheckpointError

CONTENT = {"a": torch.arange(1000.0), "b": [torch.ones(3, dtype=torch.bfloat16), "text"], "c": torch.zeros(0)}


def saved(content=CONTENT):
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def test_it_is_of_all_bytes_but_the_contents():
    content = saved()
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        rest = bytearray()
        at = 0
        for entry in sorted(archive.infolist(), key=lambda entry: entry.header_offset):
            with archive.open(entry) as record:
                begin = record._orig_compress_start
            rest += content[at:begin]
            at = begin + entry.file_size
        rest += content[at:]
    assert len(rest) < len(content) - 4000
    expected = hashlib.sha256(rest).hexdigest()
    assert checksum_of_archive(io.BytesIO(content), reads_contents=False) == expected
    assert checksum_of_archive(io.BytesIO(content), reads_contents=True) == expected


def test_no_changed_byte_is_overlooked():
    content = saved({"a": torch.arange(30.0)})
    good = checksum_of_archive(io.BytesIO(content), reads_contents=True)
    overlooked = []
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        try:
            if checksum_of_archive(io.BytesIO(changed), reads_contents=True) == good:
                overlooked.append(place)
        except ValueError:
            pass
    assert overlooked == []


@pytest.mark.parametrize("what", ["cut", "empty", "text", "compressed", "records swapped"])
def test_what_is_no_such_archive_is_a_value_error(what):
    content = saved()
    if what == "cut":
        content = content[: len(content) // 2]
    elif what == "empty":
        content = b""
    elif what == "text":
        content = random.Random(1).randbytes(5000)
    elif what == "compressed":
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("x", b"0" * 5000)
        content = buffer.getvalue()
    else:
        content = content.replace(b"PK\x03\x04", b"PK\x03\x05", 1)
    with pytest.raises(ValueError, match="it is no archive|is compressed|has no header"):
        checksum_of_archive(io.BytesIO(content), reads_contents=True)


@pytest.fixture
def no_xxhash(monkeypatch):
    """The library of XXH3 is not installed."""
    monkeypatch.setattr(checksums, "_xxhash", lambda: None)


def test_without_xxhash_the_crc32_of_records_count_and_without_them_the_file_is_hashed_whole(tmp_path, no_xxhash):
    recorded = write_recorded(CONTENT, tmp_path / "with")
    assert recorded.checksum.startswith("crc32:")
    assert write_recorded(b"text", tmp_path / "bytes").checksum == f"sha256:{hashlib.sha256(b'text').hexdigest()}"
    if not hasattr(torch.serialization, "set_crc32_options"):
        pytest.skip("this PyTorch always computes them")
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        recorded = write_recorded(CONTENT, tmp_path / "without")
    finally:
        torch.serialization.set_crc32_options(before)
    content = (tmp_path / "without").read_bytes()
    assert recorded.bytes == len(content)
    assert recorded.checksum == f"sha256:{hashlib.sha256(content).hexdigest()}"


def test_with_xxhash_all_bytes_are_hashed_as_they_are_written_and_the_setting_of_torch_stays(tmp_path):
    xxhash = pytest.importorskip("xxhash")
    large = {"large": torch.arange(300_000.0), **CONTENT}  # more than one chunk
    for content in (large, b"x" * 700_000, b""):
        recorded = write_recorded(content, tmp_path / "file")
        written = (tmp_path / "file").read_bytes()
        assert recorded.checksum == f"xxh3_128:{xxhash.xxh3_128_hexdigest(written)}"
        with open(tmp_path / "file", "rb") as file:
            assert checksums.checksum_of(file, "xxh3_128") == recorded.checksum
    if hasattr(torch.serialization, "get_crc32_options"):
        assert torch.serialization.get_crc32_options()
    with pytest.raises(OSError, match="Is a directory"):
        write_recorded(large, tmp_path)
    with pytest.raises((RuntimeError, AttributeError, TypeError)):
        write_recorded({"a": (each for each in ())}, tmp_path / "file")  # fails before the first byte
    torch.save(CONTENT, tmp_path / "of the script")
    with zipfile.ZipFile(tmp_path / "of the script") as archive:
        assert archive.testzip() is None
    loaded = torch.load(tmp_path / "of the script", weights_only=True)
    assert torch.equal(loaded["a"], CONTENT["a"])


def _save(path, tag):
    model = smp.DistributedModel(torch.nn.Linear(50, 50))
    smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    smp.step(lambda x: model.backward(model(x).sum()))(torch.ones(2, 50))
    smp.save_checkpoint(str(path), tag=tag, user_content=1)
    return model, path / f"{tag}_partial"


def _damage(folder, model):
    weight = model.module.weight.detach().numpy().tobytes()
    content = bytearray((folder / "model_0.pt").read_bytes())
    content[content.index(weight) + 123] ^= 4
    (folder / "model_0.pt").write_bytes(content)


def test_a_weight_that_changed_on_the_disk_is_named(solo, tmp_path):
    solo({})
    model, folder = _save(tmp_path, "a")
    kind = "xxh3_128" if checksums.has_xxh3() else "crc32"
    assert json.loads((folder / "manifest.json").read_text())["files"]["model_0.pt"]["checksum"].startswith(kind)
    _damage(folder, model)
    with pytest.raises(CheckpointError, match=r"model_0.pt has other content than was saved"):
        smp.resume_from_checkpoint(str(tmp_path))


def test_without_xxhash_a_changed_weight_is_named_by_its_record(solo, tmp_path, no_xxhash):
    solo({})
    model, folder = _save(tmp_path, "a")
    _damage(folder, model)
    with pytest.raises(
        CheckpointError, match=r"model_0.pt has other content than was saved \(its record .* has another crc32"
    ):
        smp.resume_from_checkpoint(str(tmp_path))


@pytest.mark.parametrize("version", [1, 2, 3])
def test_checkpoints_of_older_releases_load_and_their_damage_is_found(solo, tmp_path, no_xxhash, version):
    solo({})
    model, folder = _save(tmp_path, "a")
    file = folder / "manifest.json"
    older = in_older_form(json.loads(file.read_text()), folder, version)
    assert older["files"]["model_0.pt"].get("of_headers", False) is (version == 3)
    file.write_text(json.dumps(older))
    assert problems_of(inspect_folder(folder)) == []
    assert smp.resume_from_checkpoint(str(tmp_path)) == 1
    _damage(folder, model)
    assert "model_0.pt has other content than was saved" in problems_of(inspect_folder(folder))[0]
    with pytest.raises(CheckpointError, match="model_0.pt has other content than was saved"):
        smp.resume_from_checkpoint(str(tmp_path))


def test_a_reader_without_xxhash_reports_that_it_cannot_compare(solo, tmp_path, monkeypatch, caplog):
    solo({})
    _, folder = _save(tmp_path, "a")
    file = folder / "manifest.json"
    data = json.loads(file.read_text())
    for record in data["files"].values():
        record["checksum"] = f"xxh3_128:{'0' * 32}"
    data["digest"] = digest_of(data)
    file.write_text(json.dumps(data))
    monkeypatch.setattr(checksums, "_xxhash", lambda: None)
    assert "install xxhash" in problems_of(inspect_folder(folder))[0]
    with caplog.at_level(logging.WARNING, "smp"):
        assert smp.resume_from_checkpoint(str(tmp_path)) == 1
    assert "only their lengths were compared; install xxhash here" in caplog.text


def test_a_copy_of_another_host_may_have_another_hash(solo, tmp_path):
    solo({})
    _, folder = _save(tmp_path, "a")
    file = folder / "manifest.json"
    data = json.loads(file.read_text())
    record = data["files"]["model_0.pt"]
    record["checksum"], record["copies"] = f"sha256:{'0' * 64}", [f"crc32:{'1' * 64}", record["checksum"]]
    data["digest"] = digest_of(data)
    file.write_text(json.dumps(data))
    assert problems_of(inspect_folder(folder)) == []
    record["copies"].pop()
    data["digest"] = digest_of(data)
    file.write_text(json.dumps(data))
    assert "model_0.pt has other content than was saved" in problems_of(inspect_folder(folder))[0]


@pytest.mark.parametrize("checksum", ["md5:00", "xxh3_128:0", f"sha256:{'0' * 32}", "0" * 64, 7, None])
def test_a_checksum_without_a_known_hash_is_refused(solo, tmp_path, checksum):
    solo({})
    _, folder = _save(tmp_path, "a")
    file = folder / "manifest.json"
    data = json.loads(file.read_text())
    data["files"]["model_0.pt"]["checksum"] = checksum
    data["digest"] = digest_of(data)
    file.write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match="files.model_0.pt.checksum cannot be"):
        read_manifest(folder)
