"""Judging XIDs: classes, the driver's own advice, echoes, repeats, one program on many GPUs."""

from __future__ import annotations

import pytest

from everstep.agent.checks.xids import (
    XidEvent,
    XidFinding,
    XidLimits,
    entries,
    judge_xids,
    pci_address,
    table,
)
from everstep.diagnosis.words import Category, Verdict

A, B, C = "0000:3b:00.0", "0000:86:00.0", "0000:af:00.0"
NOW = 100_000.0
LIMITS = XidLimits()


def xid(code: int, ago: float = 1.0, pci: str = A, text: str = "", **more: int) -> XidEvent:
    return XidEvent(at=NOW - ago, pci=pci, code=code, text=text, **more)


def judged(*events: XidEvent, limits: XidLimits = LIMITS) -> list[XidFinding]:
    return judge_xids(events, NOW, limits, driver="570.86")


def only(*events: XidEvent, limits: XidLimits = LIMITS) -> XidFinding:
    (finding,) = judged(*events, limits=limits)
    return finding


@pytest.mark.parametrize(
    ("code", "verdict"),
    [
        (79, Verdict.EVICT),
        (48, Verdict.EVICT),
        (95, Verdict.EVICT),
        (119, Verdict.EVICT),
        (74, Verdict.EVICT),
        (109, Verdict.SUSPECT),  # NVIDIA: reset; device plugin and Meta: the application
        (92, Verdict.SUSPECT),
        (94, Verdict.SUSPECT),
        (31, Verdict.WARN),
        (8, Verdict.WARN),
        (43, Verdict.INFO),
        (63, Verdict.INFO),
        (999, Verdict.SUSPECT),
        (154, Verdict.SUSPECT),  # without its text nobody knows
    ],
)
def test_one_xid_alone_is_judged_by_its_class(code: int, verdict: Verdict) -> None:
    finding = only(xid(code))
    assert (finding.verdict, finding.item) == (verdict, f"GPU {A}")
    assert f"XID {code}" in finding.why
    assert bool(finding.do) is (verdict is not Verdict.INFO)


def test_every_code_of_the_table_gets_a_verdict_that_its_class_allows() -> None:
    for code in entries():
        finding = only(xid(code))
        assert finding.verdict in {Verdict.INFO, Verdict.WARN, Verdict.SUSPECT, Verdict.EVICT}


def test_what_the_table_does_not_know_names_the_tables_version() -> None:
    assert table().version in only(xid(12345)).why


@pytest.mark.parametrize(
    ("words", "verdict"),
    [
        ("from 0x0 (None) to 0x1 (GPU Reset Required)", Verdict.EVICT),
        ("from 0x0 (None) to 0x2 (Node Reboot Required)", Verdict.EVICT),
        ("from 0x0 (None) to 0x3 (Drain P2P)", Verdict.SUSPECT),
        ("from 0x0 (None) to 0x4 (Drain and Reset)", Verdict.EVICT),
        ("from 0x0 (None) to 0x6 (Bus Reset)", Verdict.EVICT),
        ("from 0x1 (GPU Reset Required) to 0x0 (None)", Verdict.INFO),
        ("\x00garbage", Verdict.SUSPECT),
    ],
)
def test_the_text_of_154_says_what_to_do(words: str, verdict: Verdict) -> None:
    assert only(xid(154, text=f"GPU recovery action changed {words}")).verdict is verdict


def test_the_drivers_advice_goes_before_the_table() -> None:
    advice = xid(154, 0.5, text="GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset)")
    with_advice = only(xid(94), advice)
    assert (with_advice.code, with_advice.verdict) == (94, Verdict.EVICT)
    assert "GPU reset" in with_advice.why
    assert only(xid(31, action=2)).verdict is Verdict.EVICT
    assert only(xid(31, action=3)).verdict is Verdict.SUSPECT
    assert only(xid(79, action=0)).verdict is Verdict.EVICT  # it may not know yet
    assert only(xid(31, action=77)).verdict is Verdict.WARN  # of a newer driver


def test_the_site_may_set_a_verdict_but_the_driver_knows_better() -> None:
    limits = XidLimits(verdicts={"119": Verdict.WARN})
    assert only(xid(119), limits=limits).verdict is Verdict.WARN
    assert only(xid(119, action=1), limits=limits).verdict is Verdict.EVICT


@pytest.mark.parametrize(
    ("root", "echo", "attached"),
    [
        (48, 45, True),
        (31, 43, True),
        (48, 94, True),
        (95, 94, False),
        (79, 119, True),
        (48, 119, False),  # a time-out of its own
        (63, 45, False),  # a notice is no error
    ],
)
@pytest.mark.parametrize("apart", [-4.0, 0.0, 4.0])
def test_echoes_attach_to_the_error_next_to_them(
    root: int, echo: int, attached: bool, apart: float
) -> None:
    finding = only(xid(root, 10.0), xid(echo, 10.0 - apart))
    assert (f"echoed by XID {echo}" in finding.why) is attached


def test_what_is_far_away_in_time_or_on_another_gpu_is_no_echo() -> None:
    assert [each.code for each in judged(xid(79), xid(119, pci=B))] == [79, 119]
    late = only(xid(48, 20.0), xid(45, 10.0))
    assert "echoed" not in late.why


def test_a_line_that_names_its_cause_speaks_of_that() -> None:
    finding = only(xid(45, text="pid=7, caused by previous Xid 79"))
    assert (finding.code, finding.verdict) == (79, Verdict.EVICT)


def test_the_gravest_of_a_gpu_wins() -> None:
    assert only(xid(13, 30.0), xid(79, 20.0), xid(92, 10.0)).code == 79


def test_a_program_error_on_several_gpus_at_once_is_the_program() -> None:
    finding = only(xid(31, 10.0), xid(31, 9.8, B), xid(13, 9.5, C), xid(43, 9.5, C))
    assert (finding.verdict, finding.item) == (Verdict.USER, "")
    assert "3 GPUs" in finding.why


def test_a_program_error_on_one_gpu_again_and_again_is_that_gpu() -> None:
    verdicts = [
        only(*(xid(31, 1.0 + 3600 * back) for back in range(times))).verdict
        for times in range(1, 6)
    ]
    assert verdicts == [Verdict.WARN, *[Verdict.SUSPECT] * 4]


def test_an_application_restarted_for_the_third_time_sends_the_machine_away() -> None:
    verdicts = [
        only(*(xid(32, 1.0 + 3600 * back) for back in range(times))).verdict
        for times in range(1, 4)
    ]
    assert verdicts == [Verdict.WARN, Verdict.SUSPECT, Verdict.EVICT]


def test_bursts_count_once_and_yesterday_does_not_count() -> None:
    assert only(*(xid(32, 0.1 * back) for back in range(100))).verdict is Verdict.WARN
    assert only(xid(32), xid(32, 90_000.0)).verdict is Verdict.WARN


def test_errors_of_the_program_are_no_repeats_of_a_gpu() -> None:
    before = [xid(31, 7200.0, pci) for pci in (A, B, C)]
    assert only(*before, xid(31)).verdict is Verdict.WARN


def test_old_xids_say_nothing_about_now() -> None:
    assert judged(xid(79, 61.0)) == []
    assert judged() == []


def test_what_the_driver_did_may_be_the_drivers_roll_out() -> None:
    assert only(xid(119)).cause == "driver 570.86"
    assert only(xid(79)).cause == ""


def test_categories_follow_the_kind_of_error() -> None:
    assert only(xid(48)).category is Category.GPU_MEMORY_ERROR
    assert only(xid(79)).category is Category.GPU_UNAVAILABLE
    assert only(xid(31)).category is Category.CUDA_ERROR


def test_a_storm_hides_neither_what_came_before_it_nor_the_repeats() -> None:
    storm = [xid(31, 50.0 - 0.004 * number) for number in range(10_000)]
    assert only(xid(79, 55.0), *storm).code == 79
    assert only(xid(31, 7200.0), *storm).verdict is Verdict.SUSPECT


@pytest.mark.parametrize(
    ("written", "address"),
    [
        ("00000000:3B:00.0", A),
        ("0000:3b:00", A),
        ("PCI:0000:3b:00.0", A),
        ("3b:00.0", A),
        ("00010000:3B:00.1", "10000:3b:00.1"),
        ("GPU-5c1f", ""),
        ("", ""),
    ],
)
def test_addresses_have_one_form(written: str, address: str) -> None:
    assert pci_address(written) == address
