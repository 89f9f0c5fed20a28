"""Numbers are recorded and guarded under every feature of the engine: they change no bit, and compare with one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.matrix import sampled

from smp_estimator.numerics.comparison import compare
from smp_estimator.numerics.recorded_run import RecordedRun
from smp_estimator.numerics.report import write_verdict

PP = {"pipeline_parallel_degree": 2, "microbatches": 4}
PP_DP = {"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True}
SDP = {
    "ddp": True,
    "sharded_data_parallel_degree": 2,
    "sdp_param_persistence_threshold": 0,
    "sdp_gradient_clipping": 1e9,
}
CP = {"ddp": True, "context_parallel_degree": 2}
COMPILED = {"compile": True, "compile_backend": "aot_eager"}

#: By name: number of ranks, parameters, and those that a reshape changes after the first update.
FEATURES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "zero bubble": (2, {**PP, "pipeline": "zero_bubble"}, {}),
    "zero bubble, dp": (4, {**PP_DP, "pipeline": "zero_bubble"}, {}),
    "virtual stages": (2, {**PP, "virtual_stages": 2}, {}),
    "virtual stages, dp": (4, {**PP_DP, "virtual_stages": 2}, {}),
    "compiled pp": (2, {**PP, **COMPILED}, {}),
    "compiled sdp": (2, {**SDP, **COMPILED}, {}),
    "fast_mode false": (2, {**PP, "fast_mode": False}, {}),
    "offloaded pp": (2, {**PP, "offload_activations": True}, {}),
    "offloaded sdp": (2, {**SDP, "offload_activations": True}, {}),
    "cp": (2, CP, {}),
    "cp, dp": (4, CP, {}),
    "cp, sdp": (2, {**CP, **SDP}, {}),
    "cp, pp": (4, {**PP_DP, **CP}, {}),
    "cp, then dp": (2, CP, {"context_parallel_degree": 1}),
    "dp, then cp": (2, {"ddp": True}, CP),
    "pp dp, then sdp": (4, PP_DP, {"pipeline_parallel_degree": 1, **SDP}),
    "dp, then pp": (2, {"ddp": True}, PP),
    "dp, then tp": (2, {"ddp": True}, {"tensor_parallel_degree": 2}),
    "tp, then dp": (2, {"ddp": True, "tensor_parallel_degree": 2}, {"tensor_parallel_degree": 1}),
}


def _trained(folder: str, changed: dict[str, Any], offloads: bool, spoils: bool) -> tuple[list[float], str]:
    """Losses, and what a guard has said."""
    from support.models.models import part
    from support.training.numerics_training import Fault, Training, batch_of, train

    import smdistributed.modelparallel.torch as smp
    from smp_runtime.errors import NumericsError

    def batch(step: int, reader: int, readers: int) -> Any:
        if step == 1 and changed:
            smp.reshape(changed)
        return part(batch_of(step), smp.dp_rank(), smp.dp_size())

    def wrapped(training: Training) -> None:
        if offloads:
            smp.set_activation_checkpointing(training.module.blocks)

    def spoil(training: Training, step: int) -> None:
        if spoils and step == 1:  # the third step is the first that has it
            training.module.waves.frequencies.mul_(float("nan"))

    try:
        return train(folder, Fault((), batch=batch, wrapped=wrapped, step=spoil)), ""
    except NumericsError as error:
        return [], str(error)


GUARDS = {"SMP_NUMERICS_GUARDS": "finite,spike=50,replicas=1"}


@pytest.mark.parametrize(
    "name", sampled(FEATURES, ["zero bubble", "cp, dp", "virtual stages, dp", "pp dp, then sdp", "dp, then tp"])
)
def test_a_recorded_training_is_the_same_and_equal_to_one_process(
    ranks: Callable[..., list[Any]], tmp_path: Path, name: str
) -> None:
    world, config, changed = FEATURES[name]
    offloads = "offloaded" in name
    plain = ranks(_trained, world, "", changed, offloads, False, config=config)
    recorded = ranks(_trained, world, str(tmp_path / "a"), changed, offloads, False, config=config, env=GUARDS)
    assert recorded == plain
    ranks(_trained, 1, str(tmp_path / "one"), {}, False, False, config={})
    found = compare(RecordedRun.read(str(tmp_path / "one")), RecordedRun.read(str(tmp_path / "a")))
    assert found.is_equal, write_verdict(found)
    for phase in ("weight", "buffer", "input", "output", "loss", "output gradient", "gradient", "update"):
        assert {each.step for each in found.compared if each.key.phase == phase} == {0, 1, 2}, phase


def _gathered(folder: str) -> set[str]:
    """Operations that gather sequences."""
    from smp_runtime.context.exchange import ContextGroup
    from smp_runtime.job.session import current_session

    _trained(folder, {}, False, False)
    return set(ContextGroup.of(current_session().ranks).gathered)


def test_a_sequence_is_gathered_once_to_be_recorded(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    plain = ranks(_gathered, 2, "", config=CP)[0]
    assert ranks(_gathered, 2, str(tmp_path), config=CP)[0] - plain == {"record_numerics"}


def test_results_are_guarded_at_other_degrees(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    world, config, changed = FEATURES["pp dp, then sdp"]
    env = {**GUARDS, "SM_OUTPUT_DATA_DIR": str(tmp_path)}
    found = ranks(_trained, world, "", changed, False, True, config=config, env=env)
    assert all(
        "the first number that is not is in the output of waves, microbatch 0 on rank" in said for _, said in found
    )


@pytest.mark.parametrize(("environment", "steps"), [({}, [0, 2]), ({"SMP_RECORD_NUMERICS": "0"}, None)])
def test_a_parameter_of_the_library_records(
    ranks: Callable[..., list[Any]], tmp_path: Path, environment: dict[str, str], steps: list[int] | None
) -> None:
    env = {"SM_OUTPUT_DATA_DIR": str(tmp_path), **environment}
    ranks(_trained, 1, "", {}, False, False, config={"record_numerics": 2}, env=env)
    if steps is None:
        assert not list(tmp_path.iterdir())
    else:
        assert sorted({step for step, _ in RecordedRun.read(str(tmp_path / "numerics")).moments}) == steps
