"""What GPUs compute and send, and what instances cost: figures of the data sheets and of EC2's list, with their sources."""

from __future__ import annotations

import re

import pytest

from smp_config import ConfigError
from smp_config.machine.gpus import gpu, gpus
from smp_config.machine.instances import instance, instances, price_source, refuse_neuron, require_usable


def test_every_gpu_of_an_instance_is_known_and_no_other() -> None:
    assert {known.gpu for known in instances()} == {known.name for known in gpus()}
    for known in instances():
        assert known.gpu_facts.name == known.gpu
        assert not known.nvlink or known.gpu_facts.nvlink_gb_per_s, f"{known.name} is joined by a link of no bandwidth"


@pytest.mark.parametrize(
    ("name", "capability", "fp32", "fp16", "bf16", "nvlink", "pcie"),
    [
        ("V100", (7, 0), 15.7, 125, None, 150, 15.75),
        ("T4", (7, 5), 8.1, 65, None, None, 15.75),
        ("A10G", (8, 6), 35, 70, 70, None, 31.5),
        ("L4", (8, 9), 30.3, 121, 121, None, 31.5),
        ("L40S", (8, 9), 91.6, 362, 362, None, 31.5),
        ("A100", (8, 0), 19.5, 312, 312, 300, 31.5),
        ("H100", (9, 0), 67, 989, 989, 450, 63),
        ("B200", (10, 0), 75, 2250, 2250, 900, 63),
    ],
)
def test_figures_of_the_data_sheets(
    name: str,
    capability: tuple[int, int],
    fp32: float,
    fp16: float,
    bf16: float | None,
    nvlink: float | None,
    pcie: float,
) -> None:
    known = gpu(name)
    assert known.capability == capability
    assert (known.fp32_tflops, known.fp16_tflops, known.bf16_tflops) == (fp32, fp16, bf16)
    assert (known.nvlink_gb_per_s, known.pcie_gb_per_s) == (nvlink, pcie)


def test_a_type_without_units_has_the_peak_of_float32() -> None:
    assert gpu("V100").tflops("bf16") == gpu("V100").tflops("fp32") == 15.7
    assert gpu("K80").tflops("fp16") == 4.37
    assert gpu("A100").tflops("bf16") == 312
    assert gpu("RTX PRO 4500").tflops("bf16") is None  # nothing is published


def test_what_cannot_be_true_is_not_there() -> None:
    for known in gpus():
        assert re.search(r"\d{4}|none is known", known.source), known
        assert known.has_bf16 == (known.name not in ("K80", "V100", "T4")), known
        if known.fp32_tflops is not None:
            assert known.has_bf16 == (known.bf16_tflops is not None), known
            assert known.fp16_tflops is None or known.fp16_tflops > known.fp32_tflops, known
        assert (known.nvlink_gb_per_s or 999) > known.pcie_gb_per_s, known


def test_a_link_is_nvlink_where_there_is_one() -> None:
    links = {
        name: known.link_gb_per_s
        for name in ("ml.p4d.24xlarge", "ml.p5.4xlarge", "ml.g5.12xlarge")
        if (known := instance(name))
    }
    assert links == {"ml.p4d.24xlarge": 300, "ml.p5.4xlarge": 63, "ml.g5.12xlarge": 31.5}


def test_rows_name_their_source_and_its_date() -> None:
    for known in instances():
        assert re.search(r"EC2's .*, 2026-\d\d-\d\d$", known.source), known
    assert price_source() == "EC2 on demand, Linux, us-east-1, 2026-07-20"


def test_what_is_sustained_of_a_network_is_less_only_where_it_bursts() -> None:
    for known in instances():
        if known.network_gbps is None or known.network_baseline_gbps is None:
            assert known.network_gbps is known.network_baseline_gbps is None
        else:
            assert (known.network_baseline_gbps < known.network_gbps) == known.network_burst, known
    small = instance("ml.g5.xlarge")
    assert small is not None
    assert (small.network_gbps, small.network_baseline_gbps) == (10, 2.5)


@pytest.mark.parametrize(
    ("name", "usd"),
    [
        ("ml.g4dn.xlarge", 0.526),
        ("ml.g5.48xlarge", 16.288),
        ("ml.p4d.24xlarge", 21.957642),
        ("ml.p5.48xlarge", 55.04),
        ("ml.p5en.48xlarge", 63.296),
        ("ml.p5e.48xlarge", None),
    ],
)
def test_prices_of_ec2(name: str, usd: float | None) -> None:
    known = instance(name)
    assert known is not None
    assert known.usd_per_hour == usd


def test_prices_are_of_the_right_order() -> None:
    """A price in another unit or of another column would stand out: larger instances of a family cost more."""
    without = set()
    for known in instances():
        if known.usd_per_hour is None:
            without.add(known.name)
        else:
            assert 0.1 < known.usd_per_hour / known.gpus < 20, known
    assert without == {"ml.p5e.48xlarge", "ml.p6e-gb200.36xlarge"}  # sold as blocks of capacity only
    for one in instances():
        for other in instances():
            if one.name.split(".")[1] != other.name.split(".")[1] or not one.usd_per_hour or not other.usd_per_hour:
                continue
            if one.gpus <= other.gpus and one.host_memory_bytes < other.host_memory_bytes:
                assert one.usd_per_hour < other.usd_per_hour, (one, other)


@pytest.mark.parametrize("name", ["ml.trn2.48xlarge", "trn2.3xlarge", "ml.trn1n.32xlarge", "ml.inf2.xlarge"])
def test_neuron_devices_are_refused(name: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"instance_type is {re.escape(name)}, whose accelerators are AWS Neuron devices"
    ):
        refuse_neuron(name)
    for other in ("ml.p4d.24xlarge", "g7.2xlarge", "local"):
        refuse_neuron(other)


def test_gpus_that_are_too_old_are_refused_and_v100_is_not() -> None:
    with pytest.raises(ConfigError, match=r"K80 GPUs have compute capability 3\.7"):
        require_usable("ml.p2.xlarge")
    assert require_usable("ml.p3.16xlarge") is instance("ml.p3.16xlarge")
