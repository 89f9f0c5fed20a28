"""Fragments of several ranks put together again, cut at every place."""

from __future__ import annotations

import os
import threading
import time

import pytest

from smp_launch.machine.output import LineAssembler, OutputLine
from smp_launch.supervision.supervise import show

#: What Open MPI 4.1 writes when rank 1 speaks in the middle of rank 0's line.
FRAGMENTS = (
    b"[1,0]<stdout>:aaa[1,1]<stdout>:bbb\n[1,0]<stdout>:ccc\n[1,1]<stderr>:\xc3\xa9 [1, 2] [x\n"
    b"----\nwords of mpirun\n----\n[1,10]<stdout>:\n[1,0]<stdout>:end"
)
FROM_FRAGMENTS = [
    OutputLine("bbb", 1),
    OutputLine("aaaccc", 0),
    OutputLine("é [1, 2] [x", 1),
    OutputLine("----"),
    OutputLine("words of mpirun"),
    OutputLine("----"),
    OutputLine("", 10),
    OutputLine("end", 0),
]

LINES = b"[1,1]<stdout>: bbb\n[1,0]<stdout>: aaa [1,1]<stdout>: no tag\nwords\n[prterun-vm-48@1,0] x\r\n[1,3]<stderr>:  in\n"
FROM_LINES = [
    OutputLine("bbb", 1),
    OutputLine("aaa [1,1]<stdout>: no tag", 0),
    OutputLine("words"),
    OutputLine("[prterun-vm-48@1,0] x"),
    OutputLine(" in", 3),
]

PLAIN = b"[1,0]<stdout>: a\nb\n\nend"
FROM_PLAIN = [OutputLine("[1,0]<stdout>: a"), OutputLine("b"), OutputLine(""), OutputLine("end")]


def assemble(tags, pieces):
    assembler = LineAssembler(tags)
    return [line for piece in pieces for line in assembler.feed(piece)] + assembler.finish()


@pytest.mark.parametrize(
    ("tags", "data", "expected"),
    [("fragments", FRAGMENTS, FROM_FRAGMENTS), ("lines", LINES, FROM_LINES), (None, PLAIN, FROM_PLAIN)],
)
def test_lines_are_the_same_wherever_the_stream_is_cut(tags, data, expected):
    assert assemble(tags, [data]) == expected
    assert assemble(tags, [data[n : n + 1] for n in range(len(data))]) == expected
    for cut in range(len(data)):
        assert assemble(tags, [data[:cut], data[cut:]]) == expected


def test_a_line_is_given_as_soon_as_it_ends():
    assembler = LineAssembler("fragments")
    assert assembler.feed(b"[1,0]<stdout>:whole\n[1,0]<stdout>:part") == [OutputLine("whole", 0)]
    assert assembler.feed(b"[1,0]<stdout>: two\n") == [OutputLine("part two", 0)]
    assert assembler.finish() == []


def test_a_line_without_end_does_not_fill_the_memory():
    assembler = LineAssembler(None)
    lines = [line for _ in range(40) for line in assembler.feed(b"x" * 65536)]
    assert sum(len(line.text) for line in lines + assembler.finish()) == 40 * 65536
    assert len(lines) == 2


@pytest.fixture
def pipe():
    ends = os.pipe()
    os.set_blocking(ends[1], False)
    yield ends
    for end in ends:
        os.close(end)


def test_a_slow_reader_of_a_pipe_that_does_not_block_gets_everything(pipe):
    got = bytearray()

    def read():
        time.sleep(0.2)
        while not got.endswith(b"end\n"):
            got.extend(os.read(pipe[0], 4096))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    show(["x" * 500_000, "end"], pipe[1])
    reader.join(20)
    assert len(got) == 500_005


def test_a_reader_that_takes_nothing_does_not_hold_the_job(pipe):
    began = time.monotonic()
    show(["x" * 500_000], pipe[1], patience=0.3)
    assert 0.2 < time.monotonic() - began < 10
