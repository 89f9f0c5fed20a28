"""The table of the public pages: every row names a place that is there; and what the pages print works as printed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

import pytest

from smp_config import ConfigError, Group, ModelParallelParameters, Topology
from smp_config.machine.instances import instance
from smp_estimator.planning.batches import batches
from smp_estimator.settings import distribution as strategies

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "docs" / "compatibility.md"

#: The pages, and how many rows each has at least.
PAGES = {"B": 50, "D": 60, "I": 35, "S": 90}
KINDS = {"works", "differs", "absent"}
#: Nothing but these may be absent.
ABSENT = ("TensorFlow", "MXNet", "Horovod")


def _rows():
    """Number, statement, kind, why, and the places of each row."""
    for line in TABLE.read_text().splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 5 and re.fullmatch(r"[BDIS]\d+", cells[0]):
            yield cells


def _anchors(document):
    """What headings of a document can be linked to, as GitHub names them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", h).lower()).replace(" ", "-") for h in headings}


def test_every_statement_of_the_pages_has_a_row():
    numbers = [row[0] for row in _rows()]
    for page, least in PAGES.items():
        of_page = [int(number[1:]) for number in numbers if number[0] == page]
        assert len(of_page) >= least
        assert sorted(of_page) == list(range(1, len(of_page) + 1)), page
    assert len(numbers) >= 170


def test_rows_say_whether_and_why():
    for number, statement, kind, why, _ in _rows():
        assert statement, number
        assert kind in KINDS, number
        assert kind == "works" or len(why) > 9, number
        assert kind != "absent" or any(name in why for name in ABSENT), number


def test_rows_name_places_that_are_there():
    for number, _, _, _, places in _rows():
        found = re.findall(r"\[[^\]]+\]\(([^)#]+)(?:#([^)]+))?\)(?: `(\w+)`)?", places)
        assert len(found) == places.count("](") > 0, number
        for path, anchor, test in found:
            file = (TABLE.parent / path).resolve()
            assert file.is_file(), f"{number} names {path}"
            assert not anchor or anchor in _anchors(file), f"{number} names {path}#{anchor}"
            assert not test or f"def test_{test}(" in file.read_text(), f"{number} names {test} in {path}"


def test_links_of_the_page_lead_somewhere():
    text = TABLE.read_text()
    for path, anchor in re.findall(r"\]\(([\w./-]*\.md)?#([\w-]+)\)", text):
        assert anchor in _anchors(TABLE.parent / path if path else TABLE), f"{path}#{anchor}"
    assert "compatibility.md" in (ROOT / "README.md").read_text()


def test_the_tables_of_clients_are_those_of_their_tests():
    program = ROOT / "tests" / "support" / "documents" / "client_table.py"
    found = subprocess.run([sys.executable, program, "--check"], capture_output=True, text=True, timeout=100)
    assert found.returncode == 0, found.stderr


def test_a_table_of_clients_says_what_became_of_all_tests_of_a_case(tmp_path):
    from support.documents import client_table
    from support.documents.client_cases import Case, versions

    train, alone = Case("Transformers", "train", "tp 2"), Case("Transformers", "train", "one process")
    tests = {train: {"a", "b"}, alone: {"c"}}

    def run(*lines):
        major = versions("Transformers")["transformers"][0]
        pins = {name: client_table.pinned()[major][name] for name in versions("Transformers")}
        case_of = {"a": train, "b": train, "c": alone}
        path = tmp_path / "run.jsonl"
        records = [
            {**asdict(case_of[test]), "test": test, "outcome": outcome, "reason": reason, "versions": pins}
            for test, outcome, reason in lines
        ]
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        client_table.take_over(outcomes, tests, [path])
        return major

    outcomes: client_table.Outcomes = {}
    major = run(("a", "passed", ""))
    assert outcomes == {}  # of two tests one has run
    run(("a", "passed", ""), ("b", "failed", "why not"), ("c", "skipped", "no other rank"))
    assert outcomes == {train: {major: ("failed", "why not")}, alone: {major: ("skipped", "no other rank")}}
    other = next(each for each in client_table.MAJORS if each != major)
    outcomes[train][other] = ("passed", "")
    outcomes[alone][other] = ("skipped", "no other rank")
    text = client_table.tables(list(tests), outcomes)
    assert "|  | one process | tp 2 |" in text
    assert f"| train | not applicable | only with {other} |" in text
    assert f"- train, tp 2 with Transformers {major}: does not work: why not" in text
    assert "- train, one process: not applicable: no other rank" in text
    run(("a", "passed", ""), ("b", "passed", ""))
    assert "| not applicable | works |" in client_table.tables(list(tests), outcomes)


def test_every_documented_symbol_is_in_the_table():
    text = TABLE.read_text()
    short = {"smdistributed.modelparallel.torch.": "smp.", "smdistributed.dataparallel.": "sdp."}
    lines = (ROOT / "tests" / "interface" / "documented.txt").read_text().splitlines()
    symbols = {line.partition("(")[0].partition("=")[0].strip() for line in lines if line and not line.startswith("#")}
    assert len(symbols) > 150
    lacking = []
    for symbol in sorted(symbols):
        name = symbol
        for long, prefix in short.items():
            name = name.replace(long, prefix, 1)
        if not re.search(rf"`({re.escape(name)}|{re.escape(symbol)})(\(|`|=)", text):
            lacking.append(name)
    assert not lacking


#: As printed on the page about sharded data parallelism: parameters, MPI options, instance type and number, processes.
PRINTED = {
    "sharding": (
        {
            "ddp": True,
            "sharded_data_parallel_degree": 2,
            "sdp_reduce_bucket_size": int(5e8),
            "sdp_param_persistence_threshold": int(1e6),
            "sdp_max_live_parameters": int(1e9),
            "sdp_hierarchical_allgather": True,
            "sdp_gradient_clipping": 1.0,
        },
        None,
        ("ml.p3.16xlarge", 1),
    ),
    "collectives": (
        {
            "partitions": 1,
            "ddp": True,
            "sharded_data_parallel_degree": 64,
            "bf16": True,
            "ddp_dist_backend": "auto",
        },
        None,
        ("ml.p4d.24xlarge", 8),
    ),
    "buffers": (
        {"ddp": True, "sharded_data_parallel_degree": 64},
        " -x SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES=8192 -x SMDDP_AG_SORT_BUFFER_SIZE_BYTES=8192",
        ("ml.p4d.24xlarge", 8),
    ),
    "fp16": ({"ddp": True, "sharded_data_parallel_degree": 2, "fp16": True}, None, ("ml.p4d.24xlarge", 1)),
    "bf16": ({"ddp": True, "sharded_data_parallel_degree": 2, "bf16": True}, None, ("ml.p4d.24xlarge", 1)),
    "with tensor parallelism": (
        {
            "ddp": True,
            "fp16": True,
            "prescaled_batch": True,
            "sharded_data_parallel_degree": 4,
            "tensor_parallel_degree": 4,
        },
        "-verbose --mca orte_base_help_aggregate 0 ",
        ("ml.p4d.24xlarge", 4),
    ),
}


@pytest.mark.parametrize("name", PRINTED)
def test_configurations_of_the_pages_are_accepted_as_printed(name, caplog):
    parameters, options, (kind, hosts) = PRINTED[name]
    mpi = {"enabled": True, "processes_per_host": 8} | ({"custom_mpi_options": options} if options else {})
    given = {"smdistributed": {"modelparallel": {"enabled": True, "parameters": parameters}}, "mpi": mpi}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        settings = strategies.read(given, instance_type=kind, hosts=hosts, process_mode=False).settings
    assert not caplog.messages
    assert settings.model_parallel.model_dump(by_alias=True, include=set(parameters) - {"partitions"}) == {
        key: value for key, value in parameters.items() if key != "partitions"
    }
    if options:
        for word in options.split():
            assert word in settings.mpi.custom_mpi_options.split()


def test_two_instances_of_four_gpus_are_eight_processes():
    def read(stages):
        parameters = {"ddp": True, "pipeline_parallel_degree": stages}
        given = {
            "smdistributed": {"modelparallel": {"enabled": True, "parameters": parameters}},
            "mpi": {"enabled": True, "processes_per_host": instance("ml.p3.8xlarge").gpus},
        }
        strategies.read(given, instance_type="ml.p3.8xlarge", hosts=2, process_mode=False)

    read(8)
    with pytest.raises(ConfigError, match="8 processes = mpi.processes_per_host 4 × instance_count 2"):
        read(16)


def test_the_worked_example_of_batches():
    """Two replicas of four stages, a global batch of 64."""
    found = batches(Topology(8, pipeline=4), 32, microbatches=4)
    assert (found.replicas, found.batch, found.global_batch) == (2, 32, 64)


def test_two_way_tensor_parallelism_on_eight_gpus_is_eight_way_data_parallelism():
    topology = ModelParallelParameters.from_mp_parameters({"tensor_parallel_degree": 2, "ddp": True}).topology(8)
    assert (topology.size(Group.DP), topology.size(Group.TP), topology.size(Group.RDP)) == (8, 2, 4)


def test_a_tensor_parallel_group_over_two_hosts_is_warned_of(caplog):
    given = {
        "smdistributed": {
            "modelparallel": {"enabled": True, "parameters": {"ddp": True, "tensor_parallel_degree": 16}}
        },
        "mpi": {"enabled": True, "processes_per_host": 8},
    }
    strategies.read(given, instance_type="ml.p4d.24xlarge", hosts=2, process_mode=False)
    assert "tensor parallel group of 16 processes is spread over 2 hosts" in caplog.text
