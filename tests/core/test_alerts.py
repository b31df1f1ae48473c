"""What is kept of alerts, and when one is enough to evict: what the transcripts do not tell."""

from __future__ import annotations

import pytest

import everstep.core.alerts
from everstep.actions import PageHuman
from everstep.core.alerts import ALERTS_MAX, STRIKES_MAX, accusations, doubts
from everstep.core.controller import ControllerCore
from everstep.core.slowdown import NEWEST, SETTLING, USUAL_MIN, slowed
from everstep.core.state import Machine
from everstep.diagnosis.words import Verdict
from everstep.events import AlertCleared, AlertRaised, MachineJoined, StepProgress, TimerFired
from everstep.health import Alert, Counts, Result
from everstep.model import Generation, MachineId, Seconds, Step
from tests.transcripts.transcript import Transcript

M0, M1 = MachineId("m0"), MachineId("m1")
NO_STANDBY = """
> 0 job nnodes=2 nproc=1 standbys=0 disk_every=0
> 1 join m0 m1 boot_id=one
> 2 stopped m0 m1
> 3 started m0 m1
> 4 progress 12
"""


class Job:
    """Two machines that train, without a standby: what is noted changes nothing."""

    def __init__(self) -> None:
        transcript = Transcript()
        transcript.run(NO_STANDBY)
        self.core: ControllerCore = transcript.core

    @property
    def m1(self) -> Machine:
        return self.core.state.machines[M1]

    def alert(self, now: Seconds, result: Result, source: str = "agent", age_s: float = 0) -> None:
        alert = Alert(result=result, source=source, age_s=age_s)
        self.core.handle(AlertRaised(machine=M1, alert=alert), now)

    def clear(self, now: Seconds, result: Result) -> None:
        over = AlertCleared(machine=M1, check=result.check, item=result.item)
        self.core.handle(over, now)

    def accused(self, now: Seconds, decided_at: Seconds | None = None) -> list[MachineId]:
        return [each.machine for each in accusations(self.core.state, now, decided_at)]


def lost(item: str = "GPU 0", verdict: Verdict = Verdict.EVICT) -> Result:
    return Result(check="gpu.lost", item=item, verdict=verdict, why="it is lost")


def link(item: str = "eth0", verdict: Verdict = Verdict.WARN) -> Result:
    return Result(
        check="net.link", item=item, verdict=verdict, why="it is down", counts=Counts.TWICE
    )


HOT = Result(check="gpu.hot", verdict=Verdict.WARN, why="it has 92 C", counts=Counts.WITH_SLOWDOWN)


# --- what is kept ---


def test_what_is_said_of_strangers_and_what_passes_is_not_noted() -> None:
    job = Job()
    stranger = AlertRaised(machine=MachineId("m9"), alert=Alert(result=lost()))
    assert job.core.handle(stranger, 5.0) == []
    job.alert(6.0, lost(verdict=Verdict.INFO))
    assert not job.core.state.alerted


def test_a_flood_of_items_leaves_the_gravest_and_only_so_many() -> None:
    job = Job()
    for number in range(2_000):
        job.alert(5.0 + number / 100, lost(f"GPU {number}", Verdict.WARN))
        job.alert(5.0 + number / 100, link(f"eth{number}"), source=f"monitor {number}")
    job.alert(200.0, lost())
    assert len(job.m1.alerts) == ALERTS_MAX
    assert len(job.m1.strikes) == STRIKES_MAX
    assert job.accused(200.0) == [M1]


def test_what_is_over_is_forgotten_in_the_end() -> None:
    job = Job()
    job.alert(5.0, link())
    job.clear(6.0, link())
    job.alert(700.0, lost(verdict=Verdict.INFO))
    assert job.m1.alerts, "nobody looked since"
    job.alert(701.0, lost(verdict=Verdict.WARN))
    assert [noted.alert.result.check for noted in job.m1.alerts] == ["gpu.lost"]
    assert not job.m1.strikes


def test_the_same_occurrence_told_again_changes_nothing() -> None:
    """An agent that was restarted says again what holds, and how long it has."""
    job = Job()
    job.alert(5.0, lost())
    (noted,) = job.m1.alerts
    event, since = noted.event, noted.since
    job.alert(105.0, lost(), age_s=100.0)
    job.alert(106.5, lost(), age_s=100.0)
    assert (noted.event, noted.since, noted.at) == (event, since, 5.0)
    job.clear(107.0, lost())
    job.alert(108.0, lost(), age_s=103.0)
    assert noted.cleared_at == 107.0
    job.alert(120.0, lost())
    assert noted.cleared_at is None
    assert noted.since == 120.0


def test_a_verdict_that_grew_worse_is_news_even_if_the_occurrence_is_the_same() -> None:
    job = Job()
    job.alert(5.0, lost(verdict=Verdict.SUSPECT))
    assert job.accused(5.0) == []
    job.alert(6.0, lost(), age_s=1.0)
    assert job.accused(6.0) == [M1]


def test_a_check_that_cannot_run_any_more_takes_nothing_back() -> None:
    job = Job()
    job.alert(5.0, lost())
    job.alert(50.0, lost(verdict=Verdict.ERROR))
    assert job.accused(50.0) == [M1]
    job.clear(51.0, lost())
    job.alert(52.0, lost(verdict=Verdict.ERROR))
    assert job.accused(52.0) == []


def test_what_a_machine_said_before_it_was_booted_anew_is_over() -> None:
    job = Job()
    job.alert(5.0, lost())
    job.alert(5.0, lost("GPU 1"), source="alertmanager")
    joined = MachineJoined(
        machine=M1,
        agent="agent-2",
        address="a",
        host="h",
        version="0",
        generation=Generation(1),
        boot_id="two",
    )
    job.core.handle(joined, 60.0)
    holding = [n.alert.source for n in job.m1.alerts if n.cleared_at is None]
    assert holding == ["alertmanager", "controller"], "that it was booted anew is said by us"


# --- when it is enough ---


@pytest.mark.parametrize("verdict", [Verdict.WARN, Verdict.SUSPECT])
@pytest.mark.parametrize(
    ("second_at", "item", "source", "enough"),
    [
        (24.9, "eth1", "agent", False),
        (25.0, "eth1", "agent", True),
        (25.0, "eth0", "agent", True),
        (304.9, "eth0", "agent", True),
        (305.1, "eth0", "agent", False),
        (60.0, "eth0", "alertmanager", False),
    ],
)
def test_two_strikes(
    verdict: Verdict, second_at: Seconds, item: str, source: str, enough: bool
) -> None:
    job = Job()
    job.alert(5.0, link(verdict=verdict))
    job.clear(5.1, link())
    job.alert(second_at, link(item, verdict), source=source)
    assert job.accused(second_at) == [M1] * enough
    assert job.accused(second_at + 301.0) == []


@pytest.mark.parametrize("verdict", [Verdict.JOB, Verdict.USER, Verdict.ERROR])
def test_what_is_no_machines_fault_strikes_nobody(verdict: Verdict) -> None:
    job = Job()
    for now in (5.0, 50.0, 100.0):
        job.alert(now, link(verdict=verdict))
    assert job.accused(100.0) == []


def test_strikes_told_late_count_when_they_occurred() -> None:
    job = Job()
    job.alert(100.0, link("eth0"), age_s=90.0)
    job.alert(100.0, link("eth1"), age_s=85.0)
    assert job.accused(100.0) == []
    job.alert(100.0, link("eth2"), age_s=40.0)
    assert job.accused(100.0) == [M1]
    assert "for the second time in 50 s" in accusations(job.core.state, 100.0)[0].why


def test_what_was_enough_when_ranks_were_stopped_is_enough_although_it_is_over() -> None:
    job = Job()
    job.alert(5.0, lost())
    job.clear(8.0, lost())
    assert job.accused(9.0) == []
    assert job.accused(9.0, decided_at=7.0) == [M1]
    assert job.accused(9.0, decided_at=8.5) == []


def test_doubts_last_a_while_after_they_are_over() -> None:
    job = Job()
    job.alert(5.0, lost(verdict=Verdict.SUSPECT))
    job.clear(8.0, lost())
    assert doubts(job.core.state, job.m1, 307.0)
    assert not doubts(job.core.state, job.m1, 309.0)


def test_in_a_flood_nobody_is_judged_before_the_second_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten thousand machines that speak at once are one question and not ten thousand."""
    monkeypatch.setattr(everstep.core.alerts, "JUDGED_MAX", 50)
    job = Job()
    for number in range(50):
        job.alert(60.1, lost(f"GPU {number}", Verdict.WARN))
    job.alert(60.2, lost())
    assert not job.core.state.paged
    assert job.core.next_deadline() == 61.0
    (page,) = job.core.handle(TimerFired(), 61.0)
    assert isinstance(page, PageHuman)
    assert page.why.endswith("no standby is ready, so m1 goes on for now")


# --- slow-down ---


def train(job: Job, since: Seconds, reports: int, step_s: Seconds) -> Seconds:
    """One report a second; when the last one came."""
    for number in range(reports):
        now, step = since + number, job.core.state.finished_by_all + 1
        progress = StepProgress(
            generation=Generation(1),
            finished_by_all=Step(step),
            finished_by_one=Step(step),
            step_s=step_s,
        )
        job.core.handle(progress, now)
    return since + reports - 1


SETTLED = SETTLING + USUAL_MIN + NEWEST


def test_a_hot_gpu_counts_with_a_slow_down_that_is_not_old() -> None:
    job = Job()
    now = train(job, 10.0, SETTLED, 0.5)
    job.alert(now, HOT)
    now = train(job, now + 1, 60, 0.6)
    assert job.accused(now) == [], "20 % more is noise"
    now = train(job, now + 1, NEWEST, 1.0)
    assert job.accused(now) == [M1]
    now = train(job, now + 1, 310, 1.0)
    assert job.accused(now) == [], "that is the new normal"


def test_a_slow_down_that_is_over_counts_no_more() -> None:
    job = Job()
    now = train(job, 10.0, SETTLED, 0.5)
    now = train(job, now + 1, NEWEST, 1.0)
    assert slowed(job.core.state, 0.0) is not None
    now = train(job, now + 1, NEWEST, 0.5)
    assert slowed(job.core.state, 0.0) is None
    job.alert(now, HOT)
    assert job.accused(now) == []


@pytest.mark.parametrize("step_s", [0.0, -1.0])
def test_times_that_cannot_be_are_no_pace(step_s: Seconds) -> None:
    job = Job()
    train(job, 10.0, SETTLED, step_s)
    assert not job.core.state.pace.newest
