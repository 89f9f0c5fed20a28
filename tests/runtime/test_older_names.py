"""Names of the oldest scripts: they work, or say what to call."""

from __future__ import annotations

import logging

import pytest

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.test.torch.utils import dump_model, verify
from smdistributed.modelparallel.torch.utils import rmsg


def test_a_message_with_its_rank(solo):
    assert rmsg("begins") == "begins"
    solo({})
    assert rmsg("begins") == "[0] begins"
    assert smp.utils.rmsg is rmsg


def test_gradients_that_are_averaged_already(solo, caplog):
    solo({"ddp": True})
    logging.getLogger("smp").propagate = True
    with caplog.at_level(logging.WARNING, logger="smp"):
        smp.hvd_average_grads()
        smp.hvd_average_grads()
    (said,) = (record.getMessage() for record in caplog.records)
    assert "the gradients are averaged when the step ends" in said


def test_nobody_averages_them(ranks):
    def run():
        with pytest.raises(ValueError, match='average gradients over 2 ranks by Horovod.*set "ddp": True'):
            smp.hvd_average_grads()

    ranks(run, 2, config={})


def test_what_scripts_import_without_calling_it():
    for function in (verify, dump_model):
        with pytest.raises(ValueError, match=f"^{function.__name__} belonged to the tests"):
            function()
