"""Histories of GPUs for the table tests of judges: a healthy machine, and what differs from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from everstep.agent.checks.check import AnyCheck, Here, History, Stamped
from everstep.agent.checks.gpu import CHECKS
from everstep.agent.checks.gpu.samples import Gpu, NvmlSample, Signal
from everstep.diagnosis.words import Verdict
from everstep.health import Result

EVERY_S = 10.0
START_S = 100_000.0
HEALTHY: dict[Signal, float] = {
    Signal.UTIL_PERCENT: 98,
    Signal.TEMPERATURE_C: 55,
    Signal.SLOWDOWN_AT_C: 87,
    Signal.SHUTDOWN_AT_C: 92,
    Signal.CLOCK_REASONS: 4,
    Signal.SM_CLOCK_MHZ: 1755,
    Signal.SM_CLOCK_MAX_MHZ: 1980,
    Signal.POWER_W: 620,
    Signal.POWER_LIMIT_W: 700,
    Signal.POWER_LIMIT_DEFAULT_W: 700,
    Signal.PCIE_GENERATION: 5,
    Signal.PCIE_GENERATION_MAX: 5,
    Signal.PCIE_WIDTH: 16,
    Signal.PCIE_WIDTH_MAX: 16,
    Signal.PCIE_REPLAYS: 3,
    Signal.ECC_CORRECTED: 10,
    Signal.ECC_UNCORRECTED: 2,
    Signal.SRAM_THRESHOLD: 0,
    Signal.REMAPPED_UNCORRECTED: 4,
    Signal.REMAP_PENDING: 0,
    Signal.REMAP_FAILED: 0,
    Signal.RETIRED_CORRECTED: 0,
    Signal.RETIRED_UNCORRECTED: 0,
    Signal.RETIRED_PENDING: 0,
    Signal.RECOVERY_ACTION: 0,
    Signal.NVLINKS: 0x3FFFF,
    Signal.NVLINK_REPLAYS: 7,
    Signal.NVLINK_RECOVERIES: 1,
    Signal.NVLINK_CRC_ERRORS: 100,
    Signal.MEMORY_USED_MIB: 500,
    Signal.FABRIC_STATE: 3,
    Signal.FABRIC_STATUS: 0,
    Signal.FABRIC_HEALTH: 2,
    Signal.MIG: 0,
    Signal.ECC_MODE: 1,
    Signal.TENSOR_PERCENT: 40,
}
Changes = Mapping[Signal, float | None]
"""Signal -> another value; None: this sample lacks it."""


def gpu(index: int, changes: Changes | None = None, **fields: Any) -> Gpu:
    values = {**HEALTHY, **(changes or {})}
    return Gpu(
        index=index,
        pci=f"0000:{0x1B + 0x10 * index:02x}:00.0",
        **{"uuid": f"GPU-{index}", "serial": f"S{index}", **fields},
        values={signal: value for signal, value in values.items() if value is not None},
    )


def machine(changes: Changes | None = None, gpus: int = 8, **fields: Any) -> NvmlSample:
    """A sample in which the first GPU differs, and the others are healthy."""
    every = (gpu(0, changes, **fields), *(gpu(index) for index in range(1, gpus)))
    return NvmlSample(driver="570.86.15", gpus=every)


def over_time(samples: Sequence[NvmlSample], every_s: float = EVERY_S) -> History[NvmlSample]:
    """The first is the baseline."""
    stamped = [
        Stamped(at=START_S + every_s * number, sample=each) for number, each in enumerate(samples)
    ]
    return History(first=stamped[0], past=tuple(stamped[:-1]), now=stamped[-1])


def series(signal: Signal, *values: float | None) -> History[NvmlSample]:
    """The first GPU's values of one signal, ten seconds apart."""
    return over_time([machine({signal: value}) for value in values])


def check(name: str, **limits: Any) -> AnyCheck:
    found = next(each for each in CHECKS if each.name == name)
    return found(msgspec.convert(limits, found.limits_type))


def judged(
    name: str, history: History[Any], here: Here | None = None, **limits: Any
) -> dict[str, Result]:
    """Item -> result; each of them once, as a monitor expects."""
    made = check(name, **limits)
    kept = History(first=history.first, past=history.past[-made.keep :], now=history.now)
    results = list(made.judge(here or Here(), kept))
    assert len({each.key for each in results}) == len(results)
    for each in results:
        assert each.why
        assert bool(each.do) is each.failed or each.verdict is Verdict.ERROR
    return {each.item: each for each in results}


FIRST = "GPU 0000:1b:00.0"


def of_first(name: str, history: History[Any], **limits: Any) -> Result:
    """The result of the first GPU; the others must be healthy."""
    results = judged(name, history, **limits)
    others = [each for item, each in results.items() if item != FIRST]
    assert all(each.verdict is Verdict.INFO for each in others), others
    return results[FIRST]
