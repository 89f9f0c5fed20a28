"""The user's mpirun options as data."""

from __future__ import annotations

import pytest

from smp_config.errors import ConfigError
from smp_config.mpi_options import MpiOption, check_mpi_options, exported_variables, merge, parse_mpi_options

SINGLE_COPY = MpiOption("mca", "btl_vader_single_copy_mechanism", "none")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("-bind-to none", [MpiOption("bind-to", "", "none")]),
        ("--bind-to none", [MpiOption("bind-to", "", "none")]),
        ("--map-by=slot", [MpiOption("map-by", "", "slot")]),
        ("-mca btl ^openib", [MpiOption("mca", "btl", "^openib")]),
        ("--mca coll_tuned_priority -1", [MpiOption("mca", "coll_tuned_priority", "-1")]),
        ("-x A=1", [MpiOption("x", "A", "1")]),
        ("-x A=", [MpiOption("x", "A", "")]),
        ("-x A", [MpiOption("x", "A")]),
        ("-x 'A=b c=d'", [MpiOption("x", "A", "b c=d")]),
        (
            "-verbose --mca orte_base_help_aggregate 0 ",
            [MpiOption("verbose"), MpiOption("mca", "orte_base_help_aggregate", "0")],
        ),
        ("--report-bindings -q", [MpiOption("report-bindings"), MpiOption("q")]),
    ],
)
def test_parse(text, expected):
    assert parse_mpi_options(text) == expected


@pytest.mark.parametrize(
    "text", ["-bind-to none", "-mca btl ^openib -x 'A=b c' -x B -verbose", "--mca coll_tuned_priority -1"]
)
def test_what_is_written_can_be_read_again(text):
    options = parse_mpi_options(text)
    assert parse_mpi_options(" ".join(map(str, options))) == options


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("-x 'A=1", "close the quote"),
        ("none --bind-to core", "the word 'none'"),
        ("-x A=1 B=2", "the word 'B=2' after 'A=1'"),
        ("--mca btl", "1 of the two follow"),
        ("-x", "write '-x NAME=VALUE'"),
        ("-x --mca btl self", "write '-x NAME=VALUE'"),
        ("-np 4", "processes_per_host"),
        ("--host a,b", "instance_count"),
        ("--hostfile hosts", "instance_count"),
    ],
)
def test_what_cannot_be_read_is_an_error_that_says_what_to_do(text, part):
    with pytest.raises(ConfigError) as caught:
        parse_mpi_options(text)
    assert part in str(caught.value)


def test_custom_options_win_over_defaults():
    defaults = [MpiOption("bind-to", "", "none"), SINGLE_COPY]
    merged = merge(defaults, parse_mpi_options("--bind-to core -x A=1"))
    assert merged.options == (SINGLE_COPY, MpiOption("bind-to", "", "core"), MpiOption("x", "A", "1"))
    assert merged.replaced == ((defaults[0], MpiOption("bind-to", "", "core")),)
    assert merged.arguments() == [
        *["--mca", "btl_vader_single_copy_mechanism", "none"],
        *["--bind-to", "core", "-x", "A=1"],
    ]


def test_the_default_may_be_repeated_without_harm():
    twice = f"{SINGLE_COPY} -mca btl_vader_single_copy_mechanism none"
    merged = merge([SINGLE_COPY], parse_mpi_options(twice))
    assert (merged.options, merged.replaced, merged.conflicts) == ((SINGLE_COPY,), (), ())


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("--mca btl self -mca btl tcp", ["'--mca btl self'", "'--mca btl tcp'"]),
        ("-x A=1 -x B=1 -x A=2", ["'-x A=1'", "'-x A=2'"]),
        ("-bind-to none --bind-to core", ["'--bind-to none'", "'--bind-to core'"]),
    ],
)
def test_different_values_for_one_thing_are_refused(text, named):
    with pytest.raises(ConfigError) as caught:
        check_mpi_options(text)
    assert all(name in str(caught.value) for name in named)


def test_variables():
    assert exported_variables(parse_mpi_options("-x A=1 -x B -x C=x=y --mca btl self")) == {"A": "1", "C": "x=y"}
