"""The command line, called in this process."""

from __future__ import annotations

from typing import Any

from click.testing import CliRunner, Result

from smp_estimator.cli.main import main


def call(*arguments: str, code: int = 0, **more: Any) -> Result:
    """What ``smp-estimator`` says to these words; it must end with ``code``, and with no exception."""
    result = CliRunner().invoke(main, list(arguments), **more)
    assert result.exit_code == code, result.output + repr(result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


def flat(result: Result) -> str:
    """What was said, in one line."""
    return " ".join(result.output.split())
