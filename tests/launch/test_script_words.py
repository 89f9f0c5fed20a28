"""Words of a script's command line that its parser may not know."""

from __future__ import annotations

import argparse

import pytest

from smp_launch.ranks.script_words import forgive_parameters

WORDS = ["--lr", "0.5", "--mp_parameters", "ddp=True,partitions=2", "--out", "x"]


@pytest.fixture
def parser(monkeypatch):
    """A parser of a script, in a process with these words."""
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", argparse.ArgumentParser.parse_known_args)
    forgive_parameters(WORDS)
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float)
    return parser


def test_a_parser_that_does_not_know_the_parameters_passes_over_them(parser):
    assert parser.parse_known_args(WORDS) == (argparse.Namespace(lr=0.5), ["--out", "x"])
    parser.add_argument("--out")
    assert parser.parse_args(WORDS) == argparse.Namespace(lr=0.5, out="x")


def test_a_parser_that_knows_them_has_them(parser):
    parser.add_argument("--out")
    parser.add_argument("--mp_parameters")
    assert parser.parse_args(WORDS).mp_parameters == "ddp=True,partitions=2"


def test_so_has_one_of_a_subcommand(parser):
    command = parser.add_subparsers().add_parser("train")
    command.add_argument("--mp_parameters")
    assert parser.parse_args(["train", *WORDS[2:4]]).mp_parameters == "ddp=True,partitions=2"


@pytest.mark.parametrize("wrong", [["--mp_parameters", "other"], ["--mp-parameters", WORDS[3]], ["--mp_parameters"]])
def test_other_unknown_words_are_mistakes(parser, wrong, capsys):
    assert parser.parse_known_args(wrong)[1] == wrong
    with pytest.raises(SystemExit):
        parser.parse_args(wrong)
    assert "unrecognized arguments" in capsys.readouterr().err


def test_a_command_line_without_them_changes_nothing():
    before = argparse.ArgumentParser.parse_known_args
    forgive_parameters(["--lr", "0.5", "--mp_parameters"])
    assert argparse.ArgumentParser.parse_known_args is before
