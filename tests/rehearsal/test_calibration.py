"""Cards of rates that are measured here, and the plans that read them."""

import json

import pytest
from click.testing import CliRunner

from smp_config import ConfigError
from smp_emulation.installing import emulated
from smp_estimator.cli.main import main
from smp_estimator.planning import plan
from smp_estimator.planning.rates.fitted import FITTED
from smp_records.rate_card import Link, RateCard
from smp_tools.calibration import measure
from smp_tools.calibration.measure import calibrate


def made(**given):
    rates = {"float32": 5e13, "float16": 6e14, "bfloat16": 5e14}
    figures = {"name": "one", "flops_per_second": rates, "matrix_part": 1.0, "memory_part": 1.0}
    return RateCard(
        **{
            **figures,
            "memory_bytes_per_second": 2e12,
            "host": Link(bytes_per_second=5e10),
            "attention_part": 0.5,
            **given,
        }
    )


def test_every_kernel_is_measured_under_emulation_too(monkeypatch):
    monkeypatch.setenv("SMP_EMULATE_CUDA", "1")
    with emulated():
        card = calibrate(1.0, "ml.p5.48xlarge")
    assert card.device_bytes  # that of the emulated GPU
    assert set(card.flops_per_second) == {"float32", "float16", "bfloat16"}
    assert 0 < card.attention_part <= 1
    assert card.inside == RateCard.of_instance("ml.p5.48xlarge").inside
    assert "without a GPU" in card.sources[0]
    assert RateCard.from_json(card.to_json()) == card


def test_the_command_runs_emulated_where_the_environment_asks_for_it(tmp_path, monkeypatch):
    """The card has the memory of the emulated GPU, and says that its figures are not those of one."""
    monkeypatch.setenv("SMP_EMULATE_CUDA", "1")
    said = CliRunner().invoke(main, ["calibrate", str(tmp_path / "card.json"), "--quick"])
    assert said.exit_code == 0, said.output
    card = json.loads((tmp_path / "card.json").read_text())
    assert card["device_bytes"] > 1e9
    assert "without a GPU" in card["sources"][0]


def test_a_variable_that_turns_the_emulation_off_leaves_a_gpu_real(monkeypatch):
    """Ranks beside a GPU have the variable with 0: their kernels are measured at full size."""
    asked = []
    monkeypatch.setenv("SMP_EMULATE_CUDA", "0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(measure, "_product_rate", lambda watch, sizes, *_: asked.append(sizes) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        calibrate(1.0)
    assert asked == [measure.ON_GPU]


def test_the_command_writes_a_card_that_a_plan_reads(tmp_path):
    path = tmp_path / "card.json"
    said = CliRunner().invoke(main, ["calibrate", str(path), "--quick"])
    assert said.exit_code == 0, said.output
    assert json.loads(path.read_text())["inside"] is None
    words = ["plan", "gpt2", "--instance-type", "ml.p5.48xlarge", "--parameters", '{"bf16": true, "ddp": true}']
    said = CliRunner().invoke(main, [*words, "--rates", str(path)])
    assert "by the rates of kernels: the card of" in " ".join(said.output.split())


def test_a_plan_takes_its_rates_from_a_card(tmp_path):
    settings = {"bf16": True, "ddp": True, "sharded_data_parallel_degree": 8}
    whole = plan("llama-3.1-8b", "ml.p5.48xlarge", 1, settings, 1, rates=made())
    rates = whole.request.workload.rates
    assert rates.matrix == pytest.approx(500 / 989)
    assert rates.attention == pytest.approx(250 / 989)
    assert rates.memory == pytest.approx(2 / 3.35)
    assert rates.matrix_float8 == pytest.approx(FITTED.matrix_float8 / FITTED.matrix * rates.matrix)
    slow = made(flops_per_second={"bfloat16": 2.5e14}, attention_part=None)
    (tmp_path / "slow.json").write_text(slow.to_json())
    other = plan("llama-3.1-8b", "ml.p5.48xlarge", 1, settings, 1, rates=tmp_path / "slow.json")
    assert other.time.arithmetic > 1.5 * whole.time.arithmetic
    assert other.time.uncertainty == FITTED.uncertainty


def test_rates_that_cannot_be_used_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^rates is '.*gone.json', which cannot be read"):
        plan("gpt2", "ml.p5.48xlarge", 1, rates=str(tmp_path / "gone.json"))
    with pytest.raises(ConfigError, match=r"^rates is 3, .*give KernelRates"):
        plan("gpt2", "ml.p5.48xlarge", 1, rates=3)
    with pytest.raises(ConfigError, match=r"has no flops_per_second of bfloat16"):
        plan("gpt2", "ml.p5.48xlarge", 1, rates=made(flops_per_second={"float32": 1e13}))
