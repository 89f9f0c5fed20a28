"""Checksums of archives: every byte counts, and nothing is hashed that the archive has a checksum of."""

import hashlib
import io
import json
import random
import zipfile

import pytest
import torch

import smdistributed.modelparallel.torch as smp
from smp_runtime.checkpoint.files.archive_checksums import checksum_of_archive
from smp_runtime.checkpoint.files.atomic_file import write_recorded
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


def test_without_checksums_of_records_the_file_is_hashed_whole(tmp_path):
    if not hasattr(torch.serialization, "set_crc32_options"):
        pytest.skip("this PyTorch always computes them")
    recorded = write_recorded(CONTENT, tmp_path / "with")
    assert recorded.of_headers
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        recorded = write_recorded(CONTENT, tmp_path / "without")
    finally:
        torch.serialization.set_crc32_options(before)
    content = (tmp_path / "without").read_bytes()
    assert (recorded.of_headers, recorded.bytes) == (False, len(content))
    assert recorded.sha256 == hashlib.sha256(content).hexdigest()


def test_a_weight_that_changed_on_the_disk_is_named(solo, tmp_path):
    solo({})
    model = smp.DistributedModel(torch.nn.Linear(50, 50))
    smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    smp.step(lambda x: model.backward(model(x).sum()))(torch.ones(2, 50))
    smp.save_checkpoint(str(tmp_path), tag="a")
    folder = tmp_path / "a_partial"
    assert json.loads((folder / "manifest.json").read_text())["files"]["model_0.pt"]["of_headers"] is True
    weight = model.module.weight.detach().numpy().tobytes()
    content = bytearray((folder / "model_0.pt").read_bytes())
    content[content.index(weight) + 123] ^= 4
    (folder / "model_0.pt").write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"model_0.pt has other content than was saved \(its record .* has another crc32"
    ):
        smp.resume_from_checkpoint(str(tmp_path))
