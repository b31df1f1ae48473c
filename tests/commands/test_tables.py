"""Sentences and tables for people: the right numbers in them, and nothing that says nothing."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest
from rich.console import Console, RenderableType

from everstep.actions import Rung
from everstep.commands import stories, tables
from everstep.controller.version_views import CodeView
from everstep.controller.views import (
    AlertView,
    EvictionsView,
    EvictionView,
    IncidentsView,
    LayoutView,
    MachineView,
    RungView,
)
from everstep.core.ettr import Owner
from everstep.core.state import Phase
from everstep.diagnosis.words import Verdict
from everstep.health import Counts
from everstep.journal import StoryLine
from everstep.journal.index import Part
from everstep.model import Generation, JobId, MachineId, NodeRank, Rank
from tests.commands.fake_controller import SPENT, ended_view, incident_view, status_view


def drawn(content: RenderableType, width: int = 120) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(content)
    return " ".join(out.getvalue().split())


def machine(name: str, condition: str, why: str = "", first: int | None = None) -> MachineView:
    placed = first is not None
    return MachineView(
        machine=MachineId(name),
        host="h",
        address="a",
        node_rank=NodeRank(0) if placed else None,
        ranks=(Rank(first or 0), Rank((first or 0) + 1)) if placed else (),
        condition=condition,
        why=why,
    )


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({}, "step 7 | 100 ms per step | loss 2.5000 | 0 of 2 machines | ETTR 0.900"),
        ({"finished_by_all": -1, "loss": None, "step_s": None, "ettr": None},
         "generation 1: before its first step | 0 of 2 machines"),
        ({"phase": Phase.GATHERING, "loss": None, "standbys_wanted": 1},
         "gathering machines | 0 of 2 machines + 0 standby | ETTR 0.900"),
        ({"phase": Phase.STOPPING, "loss": None, "generation": 3},
         "generation 3: stopping | 0 of 2 machines | ETTR 0.900"),
        ({"incident": "i1", "step_s": 2.0, "loss": None},
         "step 7 | 2.00 s per step | 0 of 2 machines | ETTR 0.900 | incident i1 is open"),
    ],
)  # fmt: skip
def test_the_progress_line_says_where_the_job_is(changed: dict[str, object], line: str) -> None:
    assert tables.progress(status_view(**changed)) == line


def test_machines_are_listed_with_their_ranks_and_what_became_of_them() -> None:
    view = status_view(
        machines=(machine("m0", "member", first=0), machine("m1", "evicted", "it was lost"))
    )
    text = drawn(tables.machines(view))
    assert "m0 h a 0 0-1 member" in text
    assert "m1 h a evicted: it was lost" in text


def test_what_needs_a_layout_says_whether_it_is_on_and_what_is_known() -> None:
    known = LayoutView(
        text="tp=2, dp=2", source="--layout", remarks=(), disagreement="the mesh is dp=2, tp=2"
    )
    assert tables.layout(status_view(layout=known)) == [
        "layout: tp=2, dp=2 (the fastest dimension first), from --layout",
        "  warning: the mesh is dp=2, tp=2",
        "backup placement is off: no layout",
    ]
    assert tables.layout(status_view())[:2] == ["layout: unknown", "  no groups"]


def test_the_table_of_incidents_adds_up() -> None:
    first = incident_view(closed_at=2.0, outcome="proven", restored=7)
    second = incident_view(incident="i2", symptom="machine m1 is lost", evicted=("m1",))
    view = IncidentsView(job=JobId("j"), incidents=(first, second), seconds=SPENT, ettr=0.5)
    text = drawn(tables.incidents(view))
    assert "i1 rank 3 died of signal 9: proven; restored step 7 0.25 0.00 1.50 0.00 1.75" in text
    assert "i2 machine m1 is lost: open 0.25 0.00 1.50 0.00 1.75" in text
    assert "all 0.50 0.00 3.00 0.00 3.50" in text
    assert "waiting" not in text


def test_the_table_has_room_for_a_terminal_of_80_columns() -> None:
    view = IncidentsView(job=JobId("j"), incidents=(incident_view(),), seconds=SPENT, ettr=None)
    assert "detecting locating restarting recomputing total s" in drawn(tables.incidents(view), 80)


def test_waiting_for_machines_has_a_column_where_somebody_waited() -> None:
    waited = incident_view(seconds=SPENT | {Owner.WAITING: 3.0})
    view = IncidentsView(job=JobId("j"), incidents=(waited,), seconds=SPENT, ettr=None)
    assert "waiting" in drawn(tables.incidents(view))


def test_an_incident_that_restored_nothing_began_anew() -> None:
    closed = incident_view(closed_at=1.0, outcome="proven", restored=-1)
    assert tables.outcome(closed) == "proven; began anew"
    assert tables.closed(incident_view(closed_at=1.0, seconds=SPENT)) == (
        "incident i1 closed: closed (no time lost)"
    )


def test_the_account_names_every_owner_that_owns_something() -> None:
    text = tables.account(SPENT | {Owner.TRAINING: 9.0, Owner.WAITING: 1.0}, 0.9)
    assert text == (
        "Of 10.00 s: training 9.00, waiting for machines 1.00."
        " ETTR 0.9000 (90.0% of the time trained)."
    )


def test_news_are_told_once() -> None:
    before = status_view(machines=(machine("m1", "member"),))
    after = status_view(
        term=2,
        generation=2,
        restored=7,
        notes=("the journal had a torn end",),
        machines=(machine("m1", "lost", "its keeper is gone"),),
    )
    assert tables.news(before, after) == [
        "the controller is back, term 2; training went on meanwhile",
        "the journal had a torn end",
        "machine m1 is lost: its keeper is gone",
        "generation 2 begins, from step 7",
    ]
    assert tables.news(after, after) == []
    assert tables.news(None, before) == []
    assert tables.news(status_view(), ended_view()) == []


def test_a_story_names_reasons_and_facts() -> None:
    fact = StoryLine(
        id="4",
        part=Part.EVENT,
        time=10.0,
        name="RankExited",
        cause="",
        why="",
        fields={
            "rank": 3,
            "exit": {"signal": 9, "code": None},
            "age_s": 0.25,
            "error": None,
            "copies": [1, 2, 3, 4, 5],
            "last_lines": "x" * 500,
        },
    )
    decision = StoryLine(
        id="4.0", part=Part.ACTION, time=10.5, name="OpenIncident", cause="4", why="so", fields={}
    )
    text = drawn(stories.story([fact, decision]), 300)
    assert "0.00 4 RankExited: rank 3, exit signal 9, age_s 0.25, copies (5 of them)" in text
    assert "x" * 130 not in text
    assert "0.50 4.0 4 OpenIncident: so" in text


def alert_view(machine: str = "m0", **changed: Any) -> AlertView:
    told: dict[str, Any] = {
        "machine": MachineId(machine),
        "check": "net.link",
        "item": "eth0",
        "verdict": Verdict.WARN,
        "counts": Counts.TWICE,
        "why": "eth0 is down [again]",
        "do": "Check the cable.",
        "source": "agent",
        "since": 5.0,
        "age_s": 42.0,
    }
    return AlertView(**(told | changed))


def test_alerts_say_of_whom_what_and_since_when() -> None:
    views = (alert_view(), alert_view("m1", verdict=Verdict.ERROR, age_s=7300.0, source="fabric"))
    text = drawn(tables.alerts(status_view(alerts=views)))
    assert "m0 net.link eth0 warn 42 s eth0 is down [again] agent" in text
    assert "m1 net.link eth0 could not run 2 h eth0 is down [again] fabric" in text


def test_a_flood_of_alerts_is_cut() -> None:
    views = tuple(alert_view(f"m{number}") for number in range(25))
    text = drawn(tables.alerts(status_view(alerts=views)))
    assert "m19 " in text
    assert "m20 " not in text
    assert "and 5 more: see --json" in text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (2e5, "2 d")]
)
def test_an_age_is_told_in_one_unit(seconds: float, text: str) -> None:
    assert tables.age(seconds) == text


# --- code, copies and evictions ------------------------------------------------------------------


def test_status_says_which_code_runs_and_which_waits() -> None:
    code = CodeView(running="v2", text="/home/anna on h, sent by anna: larger", waiting=("v3 is",))
    assert tables.code(status_view(code=code)) == [
        "code: v2 (/home/anna on h, sent by anna: larger)",
        "  waiting: v3 is",
    ]
    none = CodeView(text="it is no Python program")
    assert tables.code(status_view(code=none)) == ["code: not versioned: it is no Python program"]
    assert tables.code(status_view()) == []


def test_status_says_which_steps_outlive_a_machine() -> None:
    assert tables.copies(status_view()).endswith("two machines: none; on disk: none")
    view = status_view(machine_safe=40, published=(10, 30))
    assert tables.copies(view).endswith("two machines: step 40; on disk: step 30")


def test_a_viewer_is_told_of_other_code() -> None:
    before, after = (status_view(code=CodeView(running=name)) for name in ("v1", "v2"))
    assert tables.news(before, after) == ["code v2 takes the place of v1"]


def eviction(machine: str, **changed: Any) -> EvictionView:
    told: dict[str, Any] = {
        "machine": MachineId(machine),
        "host": "h",
        "at": 1.0,
        "why": "GPU 3 is lost",
        "incident": "i1",
        "guilty": None,
        "verdict": "",
        "tests": 0,
        "passed": 0,
        "returned": False,
    }
    return EvictionView(**(told | changed))


def test_each_eviction_has_a_verdict_or_says_how_far_it_is() -> None:
    view = IncidentsView(
        job=JobId("j"),
        incidents=(),
        seconds=SPENT,
        ettr=None,
        evictions=(
            eviction("m1", guilty=True, verdict="it failed its tests", tests=1),
            eviction("m2", guilty=False, verdict="it passed twice", returned=True),
            eviction("m3", tests=2, passed=1),
            eviction("m4"),
        ),
    )
    text = drawn(tables.evicted(view))
    assert "m1 h guilty GPU 3 is lost; it failed its tests" in text
    assert "m2 h innocent, returned GPU 3 is lost; it passed twice" in text
    assert "m3 h not known GPU 3 is lost; passed 1 of 2 tests" in text
    assert "m4 h not known GPU 3 is lost; not tested yet" in text


def test_the_share_of_false_evictions_is_of_those_with_a_verdict() -> None:
    assert tables.evictions(EvictionsView()) == []
    assert tables.evictions(EvictionsView(count=1)) == ["evictions: 1, 0 guilty, 0 innocent"]
    some = EvictionsView(count=5, guilty=3, innocent=1, false_share=0.25)
    assert tables.evictions(some) == [
        "evictions: 5, 3 guilty, 1 innocent: 25% of those with a verdict were false"
    ]


def rung(name: Rung) -> RungView:
    return RungView(
        rung=name, generation=Generation(2), failure="f", why="so", at=0.0, action="1.0"
    )


def test_an_incident_names_its_rungs_in_order() -> None:
    tried = incident_view(rungs=(rung(Rung.REATTEMPT), rung(Rung.ROLLBACK)))
    view = IncidentsView(job=JobId("j"), incidents=(tried,), seconds=SPENT, ettr=None)
    assert "[reattempt, rollback]" in drawn(tables.incidents(view))


# --- long stories --------------------------------------------------------------------------------


def line(number: int, name: str, why: str, **fields: Any) -> StoryLine:
    return StoryLine(
        id=f"5.{number}",
        part=Part.ACTION,
        time=float(number),
        name=name,
        cause="5",
        why=why,
        fields=fields,
    )


def test_a_long_story_is_told_in_short_first() -> None:
    told = [
        line(0, "OpenIncident", "rank 3 ended", incident="incident-2"),
        line(1, "EvictMachine", "GPU 3 is lost", machine="m1"),
        *(line(2, "StopRanks", "ranks must be gone", machine=f"m{n}") for n in range(12)),
        line(3, "TakeRung", "it fails again", rung="rollback"),
        line(4, "SwitchCode", "back to v1", rolled_back=True),
        line(5, "GiveVerdict", "it passed twice", machine="m1", guilty=False),
        line(6, "CloseIncident", "proven", incident="incident-2"),
    ]
    assert stories.in_short(told) == [
        "0.00 s: incident-2: rank 3 ended",
        "1.00 s: m1 is evicted: GPU 3 is lost",
        "3.00 s: rollback: it fails again",
        "4.00 s: rolled back: back to v1",
        "5.00 s: m1 is innocent: it passed twice",
        "6.00 s: incident-2 is closed: proven",
    ]
    assert stories.in_short(told[:3]) == []
    text = drawn(stories.story(told), 200)
    assert "StopRanks: 12 machines (m0, m1, m2, m3, ...): ranks must be gone" in text
    assert text.count("StopRanks") == 1


def test_a_look_is_one_line_and_its_verdict_makes_the_story() -> None:
    told = [
        line(0, "OpenIncident", "no step for 14 s", incident="incident-2"),
        line(1, "CollectStacks", "no step for 14 s", machine="m0", machines_in_all=1250),
        *(line(2, "StopRanks", "ranks must be gone", machine=f"m{n}") for n in range(12)),
        line(3, "JudgeStacks", "m7 holds all others", look=4, result="machines", machines=["m7"]),
    ]
    assert stories.in_short(told) == [
        "0.00 s: incident-2: no step for 14 s",
        "3.00 s: look 4: machines: m7 holds all others",
    ]
    text = drawn(stories.story(told), 200)
    assert "CollectStacks: 1250 machines: no step for 14 s" in text
    fields = {"look": 4, "machines": ["m0", "m1"], "clusters": [{"posture": {}}], "stood": [1, 2]}
    taken = msgspec.structs.replace(told[1], name="StacksTaken", fields=fields, why="")
    assert stories.facts(taken) == ("look 4: 2 machines have answered, and show 1 different things")


def test_what_is_looked_into_is_said_in_status_and_in_the_line_of_progress() -> None:
    view = status_view(looking="no step for 14 s: looking", straggler="rank 5 costs 31%")
    assert tables.looking(view) == [
        "looked into: no step for 14 s: looking",
        "straggler: rank 5 costs 31%",
    ]
    assert "| no step for 14 s |" in f"{tables.progress(view)} |"
    assert tables.looking(status_view()) == []


def test_an_incident_tells_what_its_look_meant_and_the_group_that_went() -> None:
    gone = incident_view(
        closed_at=1.0,
        outcome="proven",
        evicted=("m12", "m13"),
        group="pp 24-31",
        cause="no line says why",
        verdict="ranks 24-31 are outliers",
    )
    view = IncidentsView(job=JobId("j"), incidents=(gone,), seconds=SPENT, ettr=0.5)
    text = drawn(tables.incidents(view), 200)
    assert "evicted m12, m13 (group pp 24-31); no line says why; ranks 24-31 are outliers" in text
    same = msgspec.structs.replace(gone, cause="hang: ranks 24-31 are outliers")
    text = drawn(tables.incidents(msgspec.structs.replace(view, incidents=(same,))), 200)
    assert text.count("ranks 24-31 are outliers") == 1
