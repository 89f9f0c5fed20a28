"""Functions that are called when a module of another library has been loaded."""

from __future__ import annotations

import inspect
import sys

import pytest

from smp_integrations.import_hook import when_imported


@pytest.fixture
def module(tmp_path, monkeypatch):
    """``module(name, source)``: put a module where it can be imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made = []

    def make(name, source):
        (tmp_path / f"{name}.py").write_text(source)
        made.append(name)
        return name

    yield make
    for name in made:
        sys.modules.pop(name, None)


def test_at_once_where_the_module_is_loaded():
    called = []
    when_imported("inspect", called.append)
    assert called == [inspect]


def test_at_the_end_of_a_later_import_and_once(module):
    name, called, finders = module("hooked_later", "value = 1\ndef f():\n    return value\n"), [], list(sys.meta_path)
    when_imported(name, lambda loaded: called.append(loaded.value))
    when_imported(name, lambda loaded: called.append(loaded.f()))
    assert called == []
    import hooked_later

    assert called == [1, 1]
    assert "return value" in inspect.getsource(hooked_later.f)  # its loader is as ever
    assert sys.meta_path == finders or not any(type(f).__name__ == "_Finder" for f in sys.meta_path)


def test_after_the_import_that_asks_for_it(module):
    name = module(
        "hooked_meanwhile",
        "import sys\n"
        "from smp_integrations.import_hook import when_imported\n"
        "when_imported(__name__, lambda loaded: loaded.calls.append(loaded.last))\n"
        "calls = []\n"
        "assert sys.modules[__name__].calls == []\n"
        "last = 'whole'\n",
    )
    from hooked_meanwhile import calls

    assert calls == ["whole"]
    assert type(sys.modules[name]) is type(sys)


def test_a_module_that_fails_to_load_is_waited_for_no_longer_in_vain(module):
    name, called = module("hooked_failing", "raise ValueError('of its own')\n"), []
    when_imported(name, called.append)
    with pytest.raises(ValueError, match="of its own"):
        __import__(name)
    assert called == []
    module(name, "value = 2\n")
    import importlib

    importlib.invalidate_caches()
    assert __import__(name).value == 2
    assert [loaded.value for loaded in called] == [2]
