"""Whoever reaches the ports of a job: what it writes is neither run nor believed, and it gets no secret."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import os
import pathlib
import pickle
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from smp_config import ConfigError, Group
from smp_records.records import FailureRecord
from smp_runtime.comm import authentication, plain_data, rendezvous
from smp_runtime.comm.authentication import ForgedError, Seal, SecretKeeper, secret_from_keeper
from smp_runtime.comm.control_transports import LAST_PART
from smp_runtime.comm.messages import CommGroup
from smp_runtime.comm.waiting import WaitingPlace
from smp_runtime.errors import SMPRuntimeError, SMPUserError
from smp_runtime.pipeline.transport.messages import Fail

SECRET = {"SMP_JOB_SECRET": "a text that only the ranks of this job know"}
#: Ranks on several hosts, of whom no launcher has told a secret.
APART = {"LOCAL_WORLD_SIZE": "1"}


class _RunsCode:
    def __init__(self, folder) -> None:
        self._folder = str(folder)

    def __reduce__(self):
        return (os.mkdir, (self._folder,))


def _meets_a_stranger(kind, folder):
    """Rank 1 is a stranger that writes in the place of its message; what rank 0 says of it."""
    import smdistributed.modelparallel.torch as smp
    from smp_runtime.job import session

    carrier = session.current_session().ranks.control._carrier
    key = f"{carrier._joined}/1/1/0/0/0"
    said = ""
    if smp.rank() == 1:
        written = {
            "pickle": LAST_PART + pickle.dumps(_RunsCode(folder)),
            "sealed by another": Seal(b"guess").close(key, LAST_PART + pickle.dumps(_RunsCode(folder))),
            "empty": b"",
            "data": LAST_PART + plain_data.to_bytes([1, 2]),
        }[kind]
        carrier._store.set(key, written)
    else:
        try:
            said = str(smp.recv_from(1, smp.RankType.WORLD_RANK))
        except SMPRuntimeError as error:
            said = str(error)
    smp.barrier()
    return said


@pytest.mark.parametrize("environment", [{}, SECRET, APART], ids=["one machine", "secret", "no secret"])
@pytest.mark.parametrize("kind", ["pickle", "sealed by another", "empty"])
def test_a_pickle_in_the_store_is_not_run(ranks, tmp_path, environment, kind):
    said, _ = ranks(_meets_a_stranger, 2, kind, tmp_path / "ran", env=environment)
    assert "in the place of a message from rank 1 to rank 0" in said
    assert "another process writes to the store" in said
    assert "SMP_JOB_SECRET" in said
    assert list(tmp_path.iterdir()) == []


def test_only_without_a_secret_is_a_stranger_s_data_believed(ranks, tmp_path):
    assert ranks(_meets_a_stranger, 2, "data", tmp_path, env=APART)[0] == "[1, 2]"
    assert "is not from a rank of this job" in ranks(_meets_a_stranger, 2, "data", tmp_path)[0]


def _overheard():
    """What goes over the store for a message from rank 1 to rank 0."""
    from smp_runtime.job import session

    carrier = session.current_session().ranks.control._carrier
    key = f"{carrier._joined}/1/1/0/0/0"
    message = LAST_PART + pickle.dumps("heard")
    return key, carrier.seal.close(carrier._place_of_message(key, 0), message)


def _replayed(key, sealed):
    import smdistributed.modelparallel.torch as smp
    from smp_runtime.job import session

    said = ""
    if smp.rank() == 0:
        session.current_session().ranks.control._carrier._store.set(key, sealed)
        try:
            said = smp.recv_from(1, smp.RankType.WORLD_RANK)
        except SMPRuntimeError as error:
            said = str(error)
    smp.barrier()
    return said


def _overheard_and_replayed():
    """In the job itself the same bytes are a message."""
    key, sealed = _overheard()
    return _replayed(key, sealed)


def test_a_message_of_a_former_job_with_the_same_secret_is_refused(ranks):
    assert ranks(_overheard_and_replayed, 2, env=SECRET)[0] == "heard"
    key, sealed = ranks(_overheard, 2, env=SECRET)[1]
    assert "is not from a rank of this job" in ranks(_replayed, 2, key, sealed, env=SECRET)[0]


def _lies_about_a_rank():
    """A stranger says in the store that rank 1 has left, while rank 0 waits for it."""
    import smdistributed.modelparallel.torch as smp
    from smp_runtime.job import session

    carrier = session.current_session().ranks.control._carrier
    if smp.rank() == 1:
        for lie in (b'{"call": "", "left": "failed"}', pickle.dumps(_RunsCode("/nowhere"))):
            carrier._store.set(carrier._place(1), lie)
            time.sleep(0.5)
        smp.send("there", 0, smp.RankType.WORLD_RANK)
        return ""
    return smp.recv_from(1, smp.RankType.WORLD_RANK)


def test_what_a_stranger_says_of_a_rank_is_not_believed(ranks):
    assert ranks(_lies_about_a_rank, 2)[0] == "there"


@dataclasses.dataclass
class _OfTheScript:
    value: int


def _sends_all_kinds():
    import smdistributed.modelparallel.torch as smp

    sent = [1, None, {"a": (2.5, "é", b"x")}, torch.arange(4, dtype=torch.bfloat16), np.float32(2.0)]
    got = smp.allgather(sent, CommGroup.WORLD)[1]
    refused = ""
    if smp.rank() == 0:
        try:
            smp.send(dataclasses.make_dataclass("Own", [])(), 1, smp.RankType.WORLD_RANK)
        except SMPUserError as error:
            refused = str(error)
        smp.send("data", 1, smp.RankType.WORLD_RANK)
    elif smp.recv_from(0, smp.RankType.WORLD_RANK) != "data":
        raise AssertionError
    return got, refused


def test_without_a_secret_data_comes_through_and_other_objects_are_refused(ranks):
    found = ranks(_sends_all_kinds, 2, env=APART)
    for got, _ in found:
        assert got[:3] == [1, None, {"a": (2.5, "é", b"x")}]
        assert torch.equal(got[3], torch.arange(4, dtype=torch.bfloat16))
        assert got[4].dtype == np.float32
    for words in ("cannot be sent to another rank", "SMP_JOB_SECRET", "docs/security.md"):
        assert words in found[0][1]


# -- what is data ------------------------------------------------------------------------------------------------------

DATA = [
    None,
    [1, 2.5, 3 + 1j, True, "é", b"\0", {1, 2}, frozenset("a"), range(3), slice(1, 2), (1, (2,))],
    collections.OrderedDict(b=1, a=2),
    collections.defaultdict(list, a=[1]),
    collections.deque([1, 2], maxlen=3),
    [datetime.datetime(2024, 1, 2), datetime.timedelta(3), pathlib.Path("/a/b"), pathlib.PurePosixPath("c")],
    [torch.float16, torch.device("cpu"), torch.Size([1, 2])],
    [WaitingPlace("smp.init", ""), Fail(1, 2, "here", None), Group.PP],
    [FailureRecord(rank=1, error_type="E", message="m", traceback="t", when=1.0)],
]


@pytest.mark.parametrize("value", DATA, ids=lambda value: type(value).__name__)
def test_data_stays_what_it_is(value):
    got = plain_data.from_bytes(plain_data.to_bytes(value))
    assert got == value
    assert type(got) is type(value)


def test_tensors_and_parameters_stay_what_they_are():
    sent = [
        torch.randn(2, 3).t(),
        torch.nn.Parameter(torch.ones(2)),
        torch.tensor(1j),
        torch.empty(0),
        np.arange(6).reshape(2, 3),
    ]
    got = plain_data.from_bytes(plain_data.to_bytes(sent))
    for theirs, ours in zip(got, sent, strict=True):
        assert type(theirs) is type(ours)
        assert (theirs == ours).all()
    assert got[1].requires_grad


@pytest.mark.parametrize(
    "value",
    [_OfTheScript(1), len, os.system, _OfTheScript, threading.Lock, np.array([object()])],
    ids=["object", "function", "system", "class", "lock", "array"],
)
def test_other_objects_are_refused_where_they_are_sent(value):
    with pytest.raises(SMPUserError, match="cannot be sent to another rank"):
        plain_data.to_bytes({"deep": [value]})


class _Calls:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    "hostile",
    [
        lambda folder: _Calls(os.mkdir, folder),
        lambda folder: _Calls(eval, f"__import__('os').mkdir({folder!r})"),
        lambda folder: _Calls(getattr, str, "join"),
        lambda folder: _Calls(subprocess.Popen, ["mkdir", folder]),
        lambda folder: _Calls(torch.load, folder),
        lambda folder: _Calls(plain_data._record, "os", "mkdir", {}),
        lambda folder: _Calls(plain_data._record, "smp_runtime.comm.plain_data", "np", {}),
        lambda folder: _Calls(plain_data._record, "smp_runtime.comm.control_transports", "StoreTransport", {}),
        lambda folder: _Calls(
            plain_data._record, "smp_runtime.comm.waiting", "WaitingPlace", {"call": "", "left": "", "more": 1}
        ),
        lambda folder: _Calls(plain_data._tensor, pickle.dumps(_Calls(os.mkdir, folder))),
    ],
)
def test_hostile_pickles_are_no_data(hostile, tmp_path):
    data = pickle.dumps(hostile(str(tmp_path / "ran")))
    with pytest.raises(ValueError, match="no message of plain data"):
        plain_data.from_bytes(data)
    assert list(tmp_path.iterdir()) == []


def test_no_class_that_is_taken_by_name_can_be_changed():
    for kind in plain_data._CLASSES.values():
        with pytest.raises(TypeError):
            kind.changed = 1


# -- seals and secrets -------------------------------------------------------------------------------------------------


def test_a_seal_holds_for_one_place_and_one_secret():
    sealed = Seal(b"a").close("place", b"body")
    assert Seal(b"a").open("place", sealed) == b"body"
    for seal, place, given in [
        (Seal(b"b"), "place", sealed),
        (Seal(b"a"), "place2", sealed),
        (Seal(b"a"), "place", sealed + b"x"),
        (Seal(b"a"), "place", sealed[:-1]),
        (Seal(b"a"), "place", b""),
    ]:
        with pytest.raises(ForgedError):
            seal.open(place, given)


def _keys_of_stages():
    """The nonce that ranks told one another over the store, and the key by which stages know each other."""
    from smp_runtime.job import session
    from smp_runtime.pipeline.transport import connections

    control, told = session.current_session().ranks.control, []
    before = connections._HELLO

    class Hello:
        size = before.size
        unpack = staticmethod(before.unpack)

        @staticmethod
        def pack(token, position):
            told.append(token)
            return before.pack(token, position)

    connections._HELLO = Hello
    gathered, allgather = [], control.allgather
    control.allgather = lambda *words: gathered.append(allgather(*words)) or gathered[-1]
    try:
        for connection in connections.connect_all(control, [0, 1], 30.0).values():
            connection.close()
    finally:
        connections._HELLO = before
        del control.allgather
    return gathered[0][0][-1], told[0]


@pytest.mark.parametrize("environment", [{}, SECRET], ids=["one machine", "secret"])
def test_the_key_of_stages_never_goes_over_the_store(ranks, environment):
    (nonce, key), (nonce_too, key_too) = ranks(_keys_of_stages, 2, env=environment)
    assert (nonce, key) == (nonce_too, key_too)
    assert key != nonce


def test_a_short_secret_is_refused():
    with pytest.raises(ConfigError, match=r"SMP_JOB_SECRET has 6 characters, which can be guessed.*openssl rand"):
        authentication.secret_of({"SMP_JOB_SECRET": "secret"})
    assert authentication.secret_of({}) is None


@pytest.mark.parametrize(
    ("environment", "is_one"),
    [
        ({"LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node1"}, True),
        ({"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, False),
        ({"MASTER_ADDR": "127.0.0.1"}, True),
        ({"MASTER_ADDR": "localhost"}, True),
        ({"MASTER_ADDR": "127.example.com"}, False),
        ({"MASTER_ADDR": "node1"}, False),
        ({}, False),
    ],
)
def test_ranks_of_one_machine_are_known_by_the_environment(environment, is_one):
    assert authentication.on_one_machine(environment, 4) is is_one


linux = pytest.mark.skipif(
    not authentication.has_credentials(), reason="the system does not tell the user behind a socket"
)


@linux
def test_the_keeper_gives_the_secret_to_this_user_s_ranks():
    keeper, got = SecretKeeper(2), {}
    threads = [
        threading.Thread(target=lambda rank=rank: got.update({rank: secret_from_keeper(keeper.name, rank, 5.0)}))
        for rank in (1, 2)
    ]
    for thread in threads:
        thread.start()
    assert keeper.serve(5.0) == keeper.secret
    for thread in threads:
        thread.join()
    assert got == {1: keeper.secret, 2: keeper.secret}


@linux
def test_another_user_s_process_gets_nothing(monkeypatch):
    keeper, got = SecretKeeper(1), []
    monkeypatch.setattr(authentication, "_user_behind", lambda connection: os.geteuid() + 1)

    def call():
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(b"\0" + keeper.name.encode())
            got.append(stranger.recv(100))

    thread = threading.Thread(target=call)
    thread.start()
    with pytest.raises(SMPRuntimeError, match="1 of 2 ranks"):
        keeper.serve(0.3)
    thread.join()
    assert got == [b""]
    impostor = SecretKeeper(1)
    with pytest.raises(SMPRuntimeError, match=r"is a process of user \d+, while rank 1 belongs to user"):
        secret_from_keeper(impostor.name, 1, 1.0)


@linux
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_the_system_tells_who_calls(tmp_path):
    """A process of another user, which says that it is rank 1."""
    keeper = SecretKeeper(1)
    code = f"""
import os, socket
os.setuid(65533)
s = socket.socket(socket.AF_UNIX)
s.connect(b"\\0" + {keeper.name.encode()!r})
try:
    s.sendall(bytes([0, 0, 0, 1]))
    print(len(s.recv(100)))
except OSError:
    print(0)
"""
    stranger = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with pytest.raises(SMPRuntimeError, match="1 of 2 ranks"):
        keeper.serve(2.0)
    assert stranger.communicate(timeout=20)[0].strip() == "0"


# -- where the store listens -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("called", "environment", "listens"),
    [
        ("127.0.0.1", {}, "127.0.0.1"),
        ("localhost", {}, "127.0.0.1"),
        ("10.0.0.5", {}, "10.0.0.5"),
        ("10.9.9.9", {}, ""),  # of no interface, such as a service's
        ("no-such-host.invalid", {}, ""),
        ("node1", {}, ""),
        ("node1", {"GLOO_SOCKET_IFNAME": "eth0"}, "10.0.0.5"),
        ("node1", {"GLOO_SOCKET_IFNAME": "eth1"}, ""),
        ("debian", {}, ""),  # others reach this name at another address
        ("debian", {"LOCAL_WORLD_SIZE": "4"}, "127.0.1.1"),
    ],
)
def test_the_store_listens_where_it_is_called(monkeypatch, called, environment, listens):
    known = {"node1": "10.0.0.5", "debian": "127.0.1.1"}

    def look_up(name, *_):
        if name.endswith(".invalid"):
            raise OSError
        return [(2, 1, 6, "", (known.get(name, name), 0))]

    monkeypatch.setattr(
        rendezvous, "list_addresses", lambda: {"lo": "127.0.0.1", "eth0": "10.0.0.5", "eth1": "10.1.0.5"}
    )
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert rendezvous.listening_address(called, environment, 4) == listens


def _listeners():
    """The addresses at which this process listens for connections of the network."""
    import smdistributed.modelparallel.torch as smp

    smp.barrier()
    mine = {
        os.readlink(f"/proc/self/fd/{name}")
        for name in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{name}")
    }
    found = []
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for row in pathlib.Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *rest = row.split()
            if state == "0A" and f"socket:[{rest[5]}]" in mine:
                found.append(local.partition(":")[0])
    smp.barrier()
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_of_one_machine_listen_on_loopback_only(ranks):
    for listening in ranks(_listeners, 2, config={"pipeline_parallel_degree": 2}):
        assert listening  # gloo's, at least
        assert set(listening) == {"0100007F"}, listening


@pytest.mark.parametrize("any_kind", [True, False], ids=["any kind", "only the older kind takes a socket"])
def test_a_kept_store_listens_at_one_address(monkeypatch, any_kind):
    made, kinds = rendezvous.dist.TCPStore, []

    def store(*words, **more):
        kinds.append(more.get("use_libuv", True))
        return made(*words, **more)

    monkeypatch.setattr(rendezvous.dist, "TCPStore", store)
    monkeypatch.setattr(rendezvous, "_ANY_KIND_TAKES_A_SOCKET", any_kind)
    timeout = datetime.timedelta(seconds=20)
    kept = rendezvous.kept_store("127.0.0.1", 0, timeout, calls="127.0.0.1", wait_for_workers=False)
    kept.set("key", "value")
    assert made("127.0.0.1", kept.port, is_master=False, timeout=timeout).get("key") == b"value"
    assert kinds == [any_kind]
    with pytest.raises(OSError, match="refused"), socket.create_connection(("127.0.0.2", kept.port), timeout=5):
        pass
