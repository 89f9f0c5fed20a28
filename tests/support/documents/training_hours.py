"""Hours and price of one training over cluster sizes: the plans, their table, and their picture."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from smp_estimator.figures.svg import box, legend, picture, text
from smp_estimator.planning import Plan, plan

#: Samples of 8,192 tokens in a step, whatever the cluster; and the steps of 10¹² tokens.
GLOBAL_BATCH, SEQUENCE = 2048, 8192
STEPS = 10**12 // (GLOBAL_BATCH * SEQUENCE)
INSTANCES = (32, 64, 128, 256, 512, 1024, 2048)
_BLUE, _ORANGE, _GREY = "#0072b2", "#e69f00", "#8c8c8c"


@lru_cache
def planned(instances: int) -> Plan:
    """Return the plan of Llama 3.1 70B on so many ml.p5.48xlarge, sharded over 32 of the groups of 8 GPUs."""
    each = GLOBAL_BATCH // instances
    batch = min(each, 8)
    settings = {"ddp": True, "bf16": True, "tensor_parallel_degree": 8, "prescaled_batch": True}
    return plan(
        "llama-3.1-70b",
        "ml.p5.48xlarge",
        instances,
        {**settings, "sharded_data_parallel_degree": 32},
        batch,
        sequence=SEQUENCE,
        accumulation=each // batch,
        activation_checkpointing="each",
        dropout=False,
        engine="fsdp2",
        compiled=True,
        steps=STEPS,
    )


def table() -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| GPUs | without failures | with failures, and the range | million USD | failures | a checkpoint every | progress |"
    yield "|---" * 7 + "|"
    for instances in INSTANCES:
        found = planned(instances).goodput
        assert found is not None
        assert found.usd_per_hour is not None
        days = [each / 86_400 for each in (found.work, found.seconds, found.low, found.high)]
        price = found.usd_per_hour * 24e-6
        cells = [f"{8 * instances:,}", f"{days[0]:,.1f} days", f"{days[1]:,.1f} ({days[2]:,.1f} to {days[3]:,.1f})"]
        cells += [f"{days[1] * price:.2f} ({days[2] * price:.2f} to {days[3] * price:.2f})", f"{found.failures:,.0f}"]
        cells += [f"{found.model.interval:,.0f} s", f"{found.part:.1%}"]
        yield f"| {' | '.join(cells)} |"


def drawing() -> str:
    """Return the picture: a bar of days and one of the price for each number of GPUs, with their ranges."""
    parts = []
    goods = {count: good for count in INSTANCES if (good := planned(count).goodput) is not None}
    most_days = max(good.high for good in goods.values())
    most_usd = max(good.high * (good.usd_per_hour or 0.0) for good in goods.values())
    for number, (count, good) in enumerate(goods.items()):
        y = 34 + 44 * number
        parts.append(text(70, y + 20, f"{8 * count:,}", anchor="end"))
        price = (good.usd_per_hour or 0.0) / 3600
        bars = [(good.seconds, good.low, good.high, most_days, _BLUE, f"{good.seconds / 86_400:,.1f} days")]
        usd = [each * good.usd_per_hour for each in (good.seconds, good.low, good.high) if good.usd_per_hour]
        bars.append((usd[0], usd[1], usd[2], most_usd, _ORANGE, f"{good.seconds * price / 1e6:.2f} million USD"))
        for row, (mean, low, high, most, fill, words) in enumerate(bars):
            top, scale = y + 17 * row, 430 / most
            parts += [
                box(80, top, mean * scale, 14, fill, words),
                box(80 + low * scale, top + 6, (high - low) * scale, 2, _GREY),
            ]
            parts.append(text(90 + high * scale, top + 11, words, size=11))
    parts += legend(50 + 44 * len(goods), [(_BLUE, "time"), (_ORANGE, "price"), (_GREY, "range")], 80)
    return picture("Training Llama 3.1 70B on 10¹² tokens, by GPUs", 62 + 44 * len(goods), parts, 700)
