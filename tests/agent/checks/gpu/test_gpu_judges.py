"""Judges of GPU signals as tables: good, bad, counters that begin anew, missing, garbage."""

from __future__ import annotations

import pytest

from everstep.agent.checks.check import Here, History, Stamped
from everstep.agent.checks.gpu import CHECKS
from everstep.agent.checks.gpu.dcgm import DcgmSample
from everstep.agent.checks.gpu.events import XidSource
from everstep.agent.checks.gpu.nvml import NvmlSource
from everstep.agent.checks.gpu.samples import Gpu, NvmlSample, Signal, XidSample
from everstep.agent.checks.xids import XidEvent
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Counts
from tests.agent.checks.gpu.histories import (
    FIRST,
    START_S,
    Changes,
    check,
    gpu,
    judged,
    machine,
    of_first,
    over_time,
    series,
)

BY_NVML = [each.name for each in CHECKS if each.source == "nvml"]
PASS, WARN, SUSPECT, EVICT, ERROR = (
    Verdict.INFO,
    Verdict.WARN,
    Verdict.SUSPECT,
    Verdict.EVICT,
    Verdict.ERROR,
)
S = Signal


@pytest.mark.parametrize("name", BY_NVML)
def test_a_healthy_machine_passes_from_its_first_sample_on(name: str) -> None:
    for samples in ([machine()], [machine()] * 13):
        results = judged(name, over_time(samples))
        assert results
        assert {each.verdict for each in results.values()} == {PASS}


@pytest.mark.parametrize("name", BY_NVML)
def test_a_gpu_that_tells_nothing_is_never_a_fault(name: str) -> None:
    """Not supported, of an older driver, not permitted: in one sample or from the start on."""
    silent = machine(dict.fromkeys(Signal), gpus=2)
    unsupported = NvmlSample(
        gpus=(Gpu(index=0, pci="0000:1b:00.0", errors=dict.fromkeys(Signal, 3)), gpu(1))
    )
    forbidden = NvmlSample(
        gpus=(Gpu(index=0, pci="0000:1b:00.0", errors=dict.fromkeys(Signal, 4)), gpu(1))
    )
    for odd in (silent, unsupported, forbidden):
        for samples in ([odd], [machine(gpus=2), *[odd] * 12], [*[odd] * 12, machine(gpus=2)]):
            for result in judged(name, over_time(samples)).values():
                assert not result.failed


@pytest.mark.parametrize("name", BY_NVML)
@pytest.mark.parametrize("garbage", [-1.0, 2.0**63, 255.0, float("nan")])
def test_one_garbage_sample_never_evicts(name: str, garbage: float) -> None:
    for signal in Signal:
        for before in (0, 12):
            history = over_time([*[machine()] * before, machine({signal: garbage})])
            for result in judged(name, history).values():
                assert result.verdict is not EVICT


@pytest.mark.parametrize("name", BY_NVML)
def test_no_gpus_and_no_driver_break_no_judge(name: str) -> None:
    for odd in (NvmlSample(), NvmlSample(error=999)):
        judged(name, over_time([odd]))
        judged(name, over_time([machine(), odd]))
        judged(name, over_time([odd, machine()]))


# --- the driver and its GPUs ---


@pytest.mark.parametrize(
    ("sample", "verdict"),
    [
        (NvmlSample(error=9), EVICT),
        (NvmlSample(error=9, driver="570.1"), ERROR),  # the kernel has it: a container may not
        (NvmlSample(error=18), SUSPECT),  # the ranks go on
        (NvmlSample(error=14), SUSPECT),
        (NvmlSample(error=15), EVICT),
        (NvmlSample(error=16), EVICT),
        (NvmlSample(error=1), ERROR),
        (NvmlSample(error=4), ERROR),
        (NvmlSample(error=999), ERROR),  # a container that lost its devices: the ranks go on
        (NvmlSample(error=77), ERROR),
    ],
)
def test_what_nvml_as_a_whole_returns(sample: NvmlSample, verdict: Verdict) -> None:
    assert judged("gpu.driver", over_time([machine(), sample]))[""].verdict is verdict


def test_a_library_without_gpus_is_no_fault() -> None:
    alone = NvmlSample(error=9)
    assert judged("gpu.driver", over_time([alone, alone]))[""].verdict is ERROR
    on_bus = NvmlSample(error=9, on_bus=("0000:1b:00.0",))
    assert judged("gpu.driver", over_time([on_bus]))[""].verdict is SUSPECT, (
        "lent to a guest, maybe"
    )


def test_a_drivers_roll_out_is_a_cause_that_machines_share() -> None:
    mismatch = NvmlSample(error=18, driver="580.1")
    assert judged("gpu.driver", over_time([machine(), mismatch]))[""].cause == "driver 580.1"
    lost = NvmlSample(error=15, driver="580.1")
    assert judged("gpu.driver", over_time([machine(), lost]))[""].cause == ""


@pytest.mark.parametrize(
    ("for_s", "times", "hung"), [(5.0, 1, False), (10.0, 1, True), (6.0, 2, True), (0.0, 0, False)]
)
def test_a_driver_that_does_not_answer_twice_hangs(for_s: float, times: int, hung: bool) -> None:
    for source, name in ((NvmlSource(), "gpu.driver"), (XidSource(), "gpu.answers")):
        result = source.unanswered(for_s, times)
        assert (result is not None) is hung
        if result is not None:
            assert (result.check, result.verdict) == (name, EVICT)
            assert f"{for_s:.0f} s" in result.why


ANSWERED = XidSample(answers={"0000:1b:00.0": 0})


@pytest.mark.parametrize(
    ("starting_s", "pids", "before", "verdict"),
    [
        (3.0, (1,), ANSWERED, ERROR),
        (12.0, (1,), ANSWERED, EVICT),
        (12.0, (), ANSWERED, ERROR),
        (30.0, (1,), XidSample(starting_s=27.0), ERROR),  # ranks that just started, cold GPUs
        (121.0, (), XidSample(starting_s=118.0), EVICT),
    ],
)
def test_a_start_that_does_not_end_is_a_hang(
    starting_s: float, pids: tuple[int, ...], before: XidSample, verdict: Verdict
) -> None:
    now = Stamped(at=START_S, sample=XidSample(starting_s=starting_s, driver="570.1"))
    past = Stamped(at=START_S - 3.0, sample=before)
    history = History(first=past, past=(past,), now=now)
    result = judged("gpu.answers", history, here=Here(pids=pids))[""]
    assert result.verdict is verdict
    assert result.cause == ("driver 570.1" if verdict is EVICT else "")


def test_a_gpu_that_is_lost_is_told_by_the_short_question() -> None:
    sample = XidSample(answers={"0000:1b:00.0": 15, "0000:2b:00.0": 0, "0000:3b:00.0": 999})
    now = Stamped(at=START_S, sample=sample)
    results = judged("gpu.answers", History(first=now, now=now))
    assert {item: each.verdict for item, each in results.items()} == {FIRST: EVICT, "": PASS}


@pytest.mark.parametrize("name", BY_NVML)
def test_alerts_are_not_over_because_nobody_could_look(name: str) -> None:
    """Neither NVML as a whole nor one GPU telling nothing is a pass: could not run."""
    results = judged(name, over_time([machine(), NvmlSample(error=1)]))
    assert results[""].verdict is ERROR


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("gpu.lost", 15),
        ("gpu.needs_reset", 16),
        ("gpu.needs_reset", 11),
        ("gpu.needs_reset", 8),
    ],
)
def test_return_codes_of_one_gpu_send_the_machine_away(name: str, code: int) -> None:
    broken = NvmlSample(
        gpus=(Gpu(index=0, pci="0000:1b:00.0", errors={S.TEMPERATURE_C: code}), gpu(1))
    )
    result = of_first(name, over_time([machine(gpus=2), broken]))
    assert (result.verdict, result.category) == (EVICT, Category.GPU_UNAVAILABLE)
    assert f"{code}" in result.why


def test_a_gpu_with_a_corrupt_inforom_computes_on() -> None:
    odd = NvmlSample(gpus=(Gpu(index=0, pci="0000:1b:00.0", errors={S.ECC_MODE: 14}), gpu(1)))
    assert of_first("gpu.needs_reset", over_time([machine(gpus=2), odd])).verdict is SUSPECT


def test_a_gpu_that_is_silent_on_the_bus_twice_is_lost() -> None:
    silent = NvmlSample(gpus=machine().gpus, silent=("0000:1b:00.0",))
    assert of_first("gpu.lost", over_time([machine(), silent])).verdict is PASS
    assert of_first("gpu.lost", over_time([machine(), silent, silent])).verdict is EVICT
    gone = NvmlSample(gpus=machine().gpus[1:], silent=("0000:1b:00.0",))
    assert of_first("gpu.lost", over_time([machine(), gone, gone])).verdict is EVICT


def test_a_site_may_say_how_many_gpus_there_must_be() -> None:
    seven = NvmlSample(gpus=tuple(gpu(number) for number in range(7)))
    assert judged("gpu.inventory", over_time([seven]))[""].verdict is PASS
    few = judged("gpu.inventory", over_time([seven]), count=8)[""]
    assert (few.verdict, few.why) == (EVICT, "7 GPUs, and 8 are expected here")
    assert judged("gpu.inventory", over_time([NvmlSample()]), count=8)[""].verdict is EVICT
    assert judged("gpu.inventory", over_time([machine()]), count=8)[""].verdict is PASS
    unknown = NvmlSample(error=999)
    assert judged("gpu.inventory", over_time([unknown]), count=8)[""].verdict is ERROR
    some = Here(gpus=(FIRST,))
    assert judged("gpu.inventory", over_time([seven]), count=8, here=some)[""].verdict is PASS


def test_the_inventory_is_compared_with_the_start() -> None:
    seven = NvmlSample(gpus=machine().gpus[1:])
    assert judged("gpu.inventory", over_time([machine(), seven]))[""].verdict is PASS, "once"
    result = judged("gpu.inventory", over_time([machine(), seven, seven]))[""]
    assert result.verdict is EVICT
    assert "7 of 8" in result.why
    assert FIRST in result.why
    assert judged("gpu.inventory", over_time([seven, machine()]))[""].verdict is PASS
    unknown = judged("gpu.inventory", over_time([machine(), NvmlSample(error=999)]))
    assert unknown[""].verdict is ERROR
    none = over_time([machine(), NvmlSample(), NvmlSample()])
    assert judged("gpu.inventory", none)[""].verdict is EVICT


def test_gpus_that_only_their_container_may_not_use_any_more_are_not_gone() -> None:
    """`systemctl daemon-reload` takes the devices from containers of some runtimes."""
    addresses = tuple(each.pci for each in machine().gpus)
    hidden = NvmlSample(on_bus=addresses)
    result = judged("gpu.inventory", over_time([machine(), hidden, hidden]))[""]
    assert result.verdict is SUSPECT
    assert "on the PCI bus they answer" in result.why
    lost = NvmlSample(gpus=machine().gpus[1:], on_bus=addresses[1:])
    assert judged("gpu.inventory", over_time([machine(), lost, lost]))[""].verdict is EVICT


def test_another_gpu_at_the_same_address_is_told_when_seen_twice() -> None:
    other = machine(uuid="GPU-other", serial="S9")
    assert judged("gpu.inventory", over_time([machine(), other]))[""].verdict is PASS
    result = judged("gpu.inventory", over_time([machine(), other, other]))[""]
    assert result.verdict is EVICT
    assert "GPU-other" in result.why
    garbled = machine(uuid="", serial="")
    assert judged("gpu.inventory", over_time([machine(), garbled, garbled]))[""].verdict is PASS


@pytest.mark.parametrize(
    ("action", "verdict"),
    [
        (0, PASS),
        (1, EVICT),
        (2, EVICT),
        (3, SUSPECT),
        (4, EVICT),
        (5, SUSPECT),
        (6, EVICT),
        (7, EVICT),
        (99, WARN),
    ],
)
def test_the_driver_says_what_must_be_done(action: float, verdict: Verdict) -> None:
    assert of_first("gpu.recovery", series(S.RECOVERY_ACTION, 0, action)).verdict is verdict


# --- memory ---


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ((500,), PASS),  # the first sample never alarms
        ((500, 500), PASS),
        ((500, 501), SUSPECT),
        ((500, 3), PASS),  # began anew
        ((500, 3, 4), SUSPECT),
        ((None, 500), PASS),
        ((500, None, 501), SUSPECT),
        ((500, 501, *[501] * 7), PASS),
    ],
)
def test_new_uncorrectable_errors(values: tuple[float | None, ...], verdict: Verdict) -> None:
    result = of_first("gpu.ecc_uncorrected", series(S.ECC_UNCORRECTED, *values))
    assert result.verdict is verdict
    assert verdict is PASS or result.category is Category.GPU_MEMORY_ERROR


def test_what_was_counted_while_nobody_looked_counts() -> None:
    samples = [machine({S.ECC_UNCORRECTED: value}) for value in (5, 6)]
    assert of_first("gpu.ecc_uncorrected", over_time(samples, every_s=900.0)).verdict is SUSPECT


@pytest.mark.parametrize(
    ("per_sample", "times", "verdict"),
    [(9_000, 12, PASS), (11_000, 12, WARN), (11_000, 3, PASS), (1_000_000, 1, PASS)],
)
def test_a_high_rate_of_corrected_errors(per_sample: int, times: int, verdict: Verdict) -> None:
    values = [per_sample * number for number in range(times + 1)]
    assert of_first("gpu.ecc_corrected", series(S.ECC_CORRECTED, *values)).verdict is verdict


def test_a_counter_that_begins_anew_is_no_rate() -> None:
    values = [10.0**9, *range(0, 60, 5)]
    assert of_first("gpu.ecc_corrected", series(S.ECC_CORRECTED, *values)).verdict is PASS


@pytest.mark.parametrize(
    ("name", "changes", "verdict"),
    [
        ("gpu.sram", {S.SRAM_THRESHOLD: 1}, EVICT),
        ("gpu.remap", {S.REMAP_FAILED: 1}, EVICT),
        ("gpu.remap", {S.REMAP_FAILED: 1, S.REMAP_PENDING: 1}, EVICT),
        ("gpu.remap", {S.REMAP_PENDING: 1}, SUSPECT),
        ("gpu.remap", {S.REMAPPED_UNCORRECTED: 511}, PASS),
        ("gpu.remap", {S.REMAPPED_UNCORRECTED: 512}, EVICT),
        ("gpu.retired_pages", {S.RETIRED_CORRECTED: 62}, PASS),
        ("gpu.retired_pages", {S.RETIRED_CORRECTED: 63}, SUSPECT),
        ("gpu.retired_pages", {S.RETIRED_UNCORRECTED: 15}, SUSPECT),
        ("gpu.retired_pages", {S.RETIRED_PENDING: 1}, SUSPECT),
    ],
)
def test_the_state_of_memory(name: str, changes: Changes, verdict: Verdict) -> None:
    assert of_first(name, over_time([machine(), machine(changes)])).verdict is verdict


# --- links ---


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({S.PCIE_WIDTH: 8}, SUSPECT),
        ({S.PCIE_GENERATION: 1}, SUSPECT),
        ({S.PCIE_GENERATION: 1, S.UTIL_PERCENT: 0}, PASS),
        ({S.PCIE_WIDTH: 8, S.UTIL_PERCENT: 0}, SUSPECT),
        ({S.PCIE_WIDTH: 0, S.PCIE_GENERATION: 0}, PASS),
    ],
)
def test_a_pcie_link_below_its_best(changes: Changes, verdict: Verdict) -> None:
    bad = machine(changes)
    assert of_first("gpu.pcie_link", over_time([machine(), bad])).verdict is PASS
    assert of_first("gpu.pcie_link", over_time([machine(), bad, bad])).verdict is verdict


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([3] * 13, PASS),
        ([3, *[3] * 6, 34, 34, 34, 34, 34, 34], PASS),  # 31 a minute, as generation 5 x 16 may
        ([3, *[3] * 6, 35, 35, 35, 35, 35, 35], WARN),
        ([3 + 10 * number for number in range(13)], SUSPECT),
        ([900, *[0] * 6, 9, 9, 9], PASS),
    ],
)
def test_pcie_replays_by_lanes_and_generation(values: list[float], verdict: Verdict) -> None:
    assert of_first("gpu.pcie_replay", series(S.PCIE_REPLAYS, *values)).verdict is verdict


def test_an_nvlink_that_was_active_at_the_start_must_be_so() -> None:
    result = of_first("gpu.nvlink", series(S.NVLINKS, 0x3FFFF, 0x3FFFD, 0x3FFFD))
    assert result.verdict is EVICT
    assert "NVLink 1 went down; 17 of 18" in result.why
    assert of_first("gpu.nvlink", series(S.NVLINKS, 0x3FFFF, 0x3FFFD)).verdict is PASS
    assert of_first("gpu.nvlink", series(S.NVLINKS, 0xF, 0xF, 0xF)).verdict is PASS
    assert of_first("gpu.nvlink", series(S.NVLINKS, 0xF, 0x3FFFF, 0xF)).verdict is PASS
    assert of_first("gpu.nvlink", series(S.NVLINKS, 0, 0, 0)).verdict is PASS


@pytest.mark.parametrize(
    ("signal", "values", "verdict"),
    [
        (S.NVLINK_RECOVERIES, (5, 5), PASS),
        (S.NVLINK_RECOVERIES, (5, 6), SUSPECT),
        (S.NVLINK_RECOVERIES, (5, 0), PASS),
        (S.NVLINK_CRC_ERRORS, (0, 900), PASS),
        (S.NVLINK_CRC_ERRORS, (0, 1100), SUSPECT),
        (S.NVLINK_REPLAYS, (0, 1), WARN),
    ],
)
def test_errors_of_nvlinks(signal: Signal, values: tuple[float, ...], verdict: Verdict) -> None:
    assert of_first("gpu.nvlink_errors", series(signal, *values)).verdict is verdict


def test_a_gpu_without_nvlinks_has_no_errors_of_them() -> None:
    history = series(S.NVLINKS, 0, 0)
    assert FIRST not in judged("gpu.nvlink_errors", history)


@pytest.mark.parametrize(
    ("first", "later", "verdict"),
    [
        ({}, {S.FABRIC_STATE: 2}, EVICT),
        ({}, {S.FABRIC_STATUS: 999}, EVICT),
        ({S.FABRIC_STATE: 1}, {S.FABRIC_STATE: 2}, SUSPECT),
        ({S.FABRIC_STATE: 2}, {}, PASS),
        ({}, {S.FABRIC_HEALTH: 1}, WARN),
        ({}, {S.FABRIC_STATE: 0}, None),
    ],
)
def test_fabric_registration(first: Changes, later: Changes, verdict: Verdict | None) -> None:
    short = [machine(first), *[machine(later)] * 5]
    so_far = judged("gpu.fabric", over_time(short)).values()
    assert not any(each.verdict in {EVICT, SUSPECT} for each in so_far), "it is started again"
    samples = [machine(first), *[machine(later)] * 7]
    if verdict is None:
        assert FIRST not in judged("gpu.fabric", over_time(samples))
    else:
        assert of_first("gpu.fabric", over_time(samples)).verdict is verdict


def test_the_fabric_manager_may_take_its_time_after_a_boot() -> None:
    bad = machine({S.FABRIC_STATE: 2})
    soon = [Stamped(at=200.0 + 10 * number, sample=bad) for number in range(3)]
    history = History(first=soon[0], past=tuple(soon[:-1]), now=soon[-1])
    assert of_first("gpu.fabric", history).verdict is PASS


# --- heat, clocks, power ---


@pytest.mark.parametrize(
    ("heats", "verdict"),
    [
        ([70] * 9, PASS),
        ([55, 86, 86], PASS),  # neither for long nor near the end
        ([55, 88], WARN),  # where it slows itself down
        ([55, 88, 88], EVICT),  # 92 - 5
        ([55, 83, 83], PASS),
        ([55, 80, 80, 80], WARN),  # 20 above its neighbours
        ([55, 80, 80, 55], PASS),
        ([None, 80], PASS),
        ([55, 255], ERROR),
        ([55, 255, 255], ERROR),
    ],
)
def test_heat(heats: list[float | None], verdict: Verdict) -> None:
    result = of_first("gpu.temperature", series(S.TEMPERATURE_C, *heats))
    assert result.verdict is verdict
    assert (result.counts is Counts.WITH_SLOWDOWN) is (verdict is WARN)


def test_a_gpu_that_need_not_slow_down_is_not_too_hot() -> None:
    """Close to where it switches off, by a machine room that is warm: it counts if it is slow."""
    warm = machine({S.TEMPERATURE_C: 88, S.SLOWDOWN_AT_C: 89, S.SHUTDOWN_AT_C: 92})
    assert of_first("gpu.temperature", over_time([machine(), warm, warm])).verdict is PASS


@pytest.mark.parametrize(("heat", "verdict"), [(69.0, PASS), (70.0, WARN), (84.0, WARN)])
def test_a_gpu_at_its_own_slowdown_threshold_is_hot_at_once(heat: float, verdict: Verdict) -> None:
    now = machine({S.SLOWDOWN_AT_C: 70.0, S.TEMPERATURE_C: heat})
    result = of_first("gpu.temperature", over_time([now]))
    assert result.verdict is verdict
    assert (result.counts is Counts.WITH_SLOWDOWN) is (verdict is WARN)


def test_a_gpu_that_is_hot_for_any_gpu_is_told_at_once() -> None:
    far = {S.SLOWDOWN_AT_C: 120.0, S.SHUTDOWN_AT_C: 130.0}
    assert (
        of_first("gpu.temperature", over_time([machine({**far, S.TEMPERATURE_C: 89.0})])).verdict
        is PASS
    )
    assert (
        of_first("gpu.temperature", over_time([machine({**far, S.TEMPERATURE_C: 90.0})])).verdict
        is WARN
    )


def test_a_threshold_of_zero_is_none_and_margins_take_its_place() -> None:
    none: Changes = {S.SLOWDOWN_AT_C: 0, S.SHUTDOWN_AT_C: 0, S.SLOWDOWN_MARGIN_C: -2}
    wide, gone = machine({**none, S.MARGIN_C: 20}), machine({**none, S.MARGIN_C: -3})
    assert of_first("gpu.temperature", over_time([wide] * 12)).verdict is PASS
    assert of_first("gpu.temperature", over_time([gone] * 12)).verdict is WARN
    zero = machine({**none, S.SLOWDOWN_MARGIN_C: 0, S.MARGIN_C: 0})
    assert of_first("gpu.temperature", over_time([zero] * 12)).verdict is PASS


@pytest.mark.parametrize(
    ("reasons", "verdict"),
    [
        ([0x04] * 12, PASS),
        ([0x01 | 0x02 | 0x10] * 12, PASS),
        ([0x40] * 2, PASS),
        ([0x40] * 3, WARN),
        ([0x04, 0x48, 0x04, 0x48], WARN),
        ([0x04, 0x04, 0x04, 0x48], PASS),
        ([0x80] * 4, WARN),
    ],
)
def test_clocks_held_down(reasons: list[float], verdict: Verdict) -> None:
    result = of_first("gpu.throttle", series(S.CLOCK_REASONS, *reasons))
    assert result.verdict is verdict
    assert (result.counts is Counts.WITH_SLOWDOWN) is (verdict is WARN)
    assert result.cause == ""


def test_a_power_brake_on_most_gpus_is_the_racks() -> None:
    braked = NvmlSample(gpus=tuple(gpu(number, {S.CLOCK_REASONS: 0x80}) for number in range(8)))
    results = judged("gpu.throttle", over_time([braked] * 4))
    assert {each.cause for each in results.values()} == {"power brake"}


def test_clocks_below_the_neighbours_under_load() -> None:
    slow, idle = {S.SM_CLOCK_MHZ: 1200.0}, {S.SM_CLOCK_MHZ: 345.0, S.UTIL_PERCENT: 0.0}
    assert of_first("gpu.clocks", over_time([machine(slow)] * 4)).verdict is PASS
    assert of_first("gpu.clocks", over_time([machine(slow)] * 5)).verdict is WARN
    assert of_first("gpu.clocks", over_time([machine(idle)] * 5)).verdict is PASS
    assert of_first("gpu.clocks", over_time([machine(slow, gpus=2)] * 5)).verdict is PASS
    assert of_first("gpu.clocks", series(S.SM_CLOCK_MHZ, *[1500] * 5)).verdict is PASS


def test_power_limits_and_sensors() -> None:
    assert of_first("gpu.power", series(S.POWER_LIMIT_W, 700, 500)).verdict is WARN
    capped = NvmlSample(gpus=tuple(gpu(number, {S.POWER_LIMIT_W: 500}) for number in range(8)))
    results = judged("gpu.power", over_time([capped, capped])).values()
    assert {each.verdict for each in results} == {PASS}
    lowered = judged("gpu.power", over_time([machine(), capped])).values()
    assert {each.verdict for each in lowered} == {WARN}
    blind = NvmlSample(gpus=(Gpu(index=0, pci="0000:1b:00.0", errors={S.POWER_W: 999}), gpu(1)))
    assert of_first("gpu.power", over_time([machine(gpus=2), blind])).verdict is WARN
    refused = NvmlSample(gpus=(Gpu(index=0, pci="0000:1b:00.0", errors={S.POWER_W: 4}), gpu(1)))
    assert judged("gpu.power", over_time([machine(gpus=2), refused]))[FIRST].verdict is ERROR


# --- the rest ---


def test_memory_in_use_without_a_rank_of_the_job() -> None:
    used = machine({S.MEMORY_USED_MIB: 40_000})
    foreign = machine(pids=(4711,))
    assert of_first("gpu.memory_left", over_time([used] * 3)).verdict is WARN
    assert of_first("gpu.memory_left", over_time([machine(), used, used])).verdict is PASS
    assert "4711" in of_first("gpu.memory_left", over_time([foreign] * 3)).why
    training = judged("gpu.memory_left", over_time([used] * 3), here=Here(pids=(1,)))
    assert training[FIRST].verdict is PASS


def test_settings_that_differ_and_modes_that_hide() -> None:
    assert of_first("gpu.settings", series(S.ECC_MODE, 0)).verdict is WARN
    none = NvmlSample(gpus=tuple(gpu(number, {S.ECC_MODE: 0}) for number in range(8)))
    assert {each.verdict for each in judged("gpu.settings", over_time([none])).values()} == {PASS}
    assert judged("gpu.settings", series(S.MIG, 1))[FIRST].verdict is ERROR


def test_low_activity_of_tensor_cores_is_recorded_and_not_judged() -> None:
    result = of_first("gpu.tensor", series(S.TENSOR_PERCENT, 40, 0))
    assert result.verdict is PASS
    assert result.values["tensor_percent"] == 0
    assert FIRST not in judged("gpu.tensor", series(S.TENSOR_PERCENT, None))


@pytest.mark.parametrize(
    ("samples", "verdict"),
    [
        ([DcgmSample()], PASS),
        ([DcgmSample(enabled=True, running=True)], PASS),
        ([DcgmSample(enabled=True)], WARN),
        ([DcgmSample(running=True), DcgmSample()], WARN),
        ([DcgmSample(), DcgmSample(running=True)], PASS),
    ],
)
def test_the_dcgm_service(samples: list[DcgmSample], verdict: Verdict) -> None:
    stamped = [Stamped(at=60.0 * number, sample=each) for number, each in enumerate(samples)]
    history = History(first=stamped[0], past=tuple(stamped[:-1]), now=stamped[-1])
    assert judged("gpu.dcgm", history)[""].verdict is verdict


def test_xids_of_nvml_are_judged_by_their_age() -> None:
    event = XidEvent(at=START_S - 1, pci="0000:1b:00.0", code=79)
    sample = XidSample(driver="570", events=(event,))

    def at(time: float, sample: XidSample) -> History[XidSample]:
        now = Stamped(at=time, sample=sample)
        return History(first=now, now=now)

    now = judged("gpu.xid", at(START_S, sample))
    assert (now[FIRST].verdict, now[""].verdict) == (EVICT, PASS)
    later = judged("gpu.xid", at(START_S + 600, sample))
    assert {item: each.verdict for item, each in later.items()} == {"": PASS}
    assert judged("gpu.xid", at(START_S, XidSample(starting_s=1.0)))[""].verdict is ERROR
    program = [XidEvent(at=START_S, pci=f"0000:{at}b:00.0", code=31) for at in (1, 2, 3)]
    shared = judged("gpu.xid", at(START_S, XidSample(events=tuple(program))))
    assert shared[""].verdict is Verdict.USER


def test_every_limit_can_be_set_and_every_check_says_what_it_is_about() -> None:
    assert len({each.name for each in CHECKS}) == len(CHECKS)
    for each in CHECKS:
        assert each.about
        assert check(each.name, off=True, at_most="warn").limits.at_most is WARN
