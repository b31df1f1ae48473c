"""What people are shown of looks: who does the same, where they run, what is looked into now."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from starlette.applications import Starlette

from everstep.actions import Rung
from everstep.controller import look_views, views
from everstep.controller.look_views import ClusterView, StacksView
from everstep.controller.looks import LookAsked, LooksApi, LooksDesk
from everstep.controller.standing_views import standing_lines
from everstep.core.look_state import Look, Straggler, Watching
from everstep.core.mechanisms import mechanisms
from everstep.core.state import Incident, Machine, Phase, RungTaken, State
from everstep.diagnosis.frames import Frame, Thread
from everstep.diagnosis.standing import Call
from everstep.events import ControllerEvent
from everstep.looks import (
    Child,
    Cluster,
    Fingerprint,
    LookResult,
    Posture,
    Purpose,
    Role,
    Shown,
    Stack,
    Stood,
)
from everstep.model import (
    CheckpointSpec,
    Generation,
    JobId,
    JobSpec,
    LayoutSpec,
    MachineId,
    NodeRank,
    PolicySpec,
    Rank,
    Step,
)
from everstep.sightings import StacksRequested

REDUCE, SEND, READ = (Fingerprint(name * 16) for name in "abc")
# ByteRobust's Figure 7: 32 ranks on 16 machines, a pipeline is four machines in a row.
LAYOUT = LayoutSpec(tp=2, pp=4, dp=4, order=("tp", "cp", "pp", "dp"))


def stack(fingerprint: Fingerprint, name: str, file: str) -> Stack:
    frames = (Frame(name=name, file=file, line=1), Frame(name="step", file="train.py", line=31))
    return Stack(fingerprint=fingerprint, threads=(Thread(frames=frames, main=True),))


STACKS = {
    REDUCE: stack(REDUCE, "all_reduce", "torch/distributed/distributed_c10d.py"),
    SEND: stack(SEND, "isend", "torch/distributed/distributed_c10d.py"),
    READ: stack(READ, "read", "<frozen codecs>"),
}


def cluster(fingerprint: Fingerprint, *ranks: tuple[int, int], **shown: Any) -> Cluster:
    return Cluster(posture=Posture(rank=Shown(stack=fingerprint, state="S", **shown)), ranks=ranks)


def look(number: int = 1, **changed: Any) -> Look:
    told: dict[str, Any] = {
        "number": number,
        "purpose": Purpose.HANG,
        "why": "no step for 14.2 s (limit 10 s)",
        "generation": Generation(1),
        "asked_at": 100.0,
        "asked": [MachineId(f"m{at}") for at in range(16)],
        "clusters": [cluster(SEND, (24, 29)), cluster(REDUCE, (0, 23)), cluster(READ, (30, 31))],
        "stacks": STACKS,
    }
    return Look(**(told | changed))


def judged(number: int = 1, **changed: Any) -> Look:
    told = {"result": LookResult.MACHINES, "judged_at": 103.0, "verdict": "m15 holds all others"}
    return look(number, **(told | changed))


@pytest.fixture
def state() -> State:
    spec = JobSpec(
        job=JobId("j"),
        uid="0",
        command=("t.py",),
        working_dir="/",
        nnodes=16,
        nproc_per_node=2,
        standbys=4,
        local=True,
        layout=LAYOUT,
        checkpoint=CheckpointSpec(directory="/c"),
    )
    state = State(spec=spec, generation=Generation(1), phase=Phase.RUNNING)
    for at in range(16):
        name = MachineId(f"m{at}")
        state.machines[name] = Machine(
            machine=name, agent="", address="", host="h", node_rank=NodeRank(at)
        )
    return state


def watched(*looks: Look, **changed: Any) -> Watching:
    told: dict[str, Any] = {
        "purpose": Purpose.HANG,
        "since": 88.0,
        "noticed_at": 100.0,
        "step": Step(7),
        "looks": list(looks),
    }
    return Watching(**(told | changed))


def spread(views: Sequence[ClusterView]) -> list[tuple[int, str, str]]:
    return [(each.count, ", ".join(each.named[:4]), each.groups) for each in views]


# --- one look ------------------------------------------------------------------------------------


def test_the_largest_cluster_comes_first_and_the_others_name_what_they_fill(state: State) -> None:
    view = look_views.look_view(state, judged())
    assert spread(view.clusters) == [
        (24, "m0, m1, m2, m3", ""),
        (6, "m12, m13, m14", "3 whole tp groups"),
        (2, "m15", "1 whole tp group"),
    ]
    assert view.outliers == "4 whole tp groups, 2 whole pp groups"
    assert [each.doing for each in view.clusters] == [
        "in a collective (all_reduce), at step (train.py:31)",
        "in a send or receive between two ranks (isend), at step (train.py:31)",
        "in reading or writing files (read), at step (train.py:31)",
    ]


def test_ranks_of_a_silent_machine_are_a_cluster_too(state: State) -> None:
    some = [cluster(REDUCE, (0, 5), (8, 31))]
    view = look_views.look_view(state, judged(clusters=some, silent=[MachineId("m3")]))
    assert view.silent == ("m3",)
    assert view.clusters[1].ranks == ((6, 7),)
    assert view.clusters[1].doing == "without a stack: its machine did not answer"


def test_machines_of_an_earlier_generation_are_not_named_by_todays_positions(state: State) -> None:
    some = [MachineId("m0")]
    view = look_views.look_view(state, judged(generation=Generation(0), asked=some))
    assert [(each.machines, each.named) for each in view.clusters] == [(12, ()), (3, ()), (1, ())]


def test_whoever_had_a_position_then_is_named_when_others_have_it_now(state: State) -> None:
    state.machines[MachineId("m15")].node_rank = None
    state.generation = Generation(2)
    view = look_views.look_view(state, judged())
    assert view.clusters[2].named == ("m15",)


def test_a_stack_that_did_not_come_and_children_are_told(state: State) -> None:
    worker = Child(role=Role.LOADER, count=4, shown=Shown(stack=READ, state="T", wchan="do_signal"))
    shown = Shown(stack=Fingerprint("d" * 16), state="S")
    odd = Cluster(posture=Posture(rank=shown, children=(worker,)), ranks=((3, 3),))
    view = look_views.look_view(state, judged(clusters=[odd]))
    assert view.clusters[0].doing == "its stack was not sent"
    child = view.clusters[0].children[0]
    assert (child.count, child.state, child.doing.split(",")[0]) == (
        4,
        "T",
        "in reading or writing files (read)",
    )


def test_a_hundred_thousand_ranks_are_a_few_ranges(state: State) -> None:
    assert state.spec is not None
    state.spec = msgspec.structs.replace(
        state.spec, nnodes=12_500, nproc_per_node=8, layout=LayoutSpec(tp=8, pp=10, dp=1250)
    )
    many = [cluster(REDUCE, (0, 79_999), (80_008, 99_999)), cluster(READ, (80_000, 80_007))]
    view = look_views.look_view(state, judged(clusters=many))
    assert [(each.count, each.machines) for each in view.clusters] == [(99_992, 12_499), (8, 1)]
    assert view.clusters[1].groups == "1 whole tp group"
    assert len(msgspec.json.encode(view)) < 10_000


def call(op: str = "all_reduce") -> tuple[int, Call]:
    return 214, Call(op=op, numel_in=8, dtype="Float")


@pytest.mark.parametrize(
    ("stood", "line"),
    [
        (
            [
                Stood(group="0", enqueued=214, completed=213, calls=(call(),), ranks=((0, 4),)),
                Stood(group="0", enqueued=213, completed=213, ranks=((5, 5),)),
            ],
            ("collective 214 of group 0 (all_reduce of 8 elements Float): ranks 0-4 wait in it, "
            "rank 5 has not called it"),
        ),
        (
            [
                Stood(group="dp", enqueued=214, completed=213, calls=(call(),), ranks=((0, 6),)),
                Stood(
                    group="dp", enqueued=214, completed=213, calls=(call("barrier"),),
                    ranks=((7, 7),),
                ),
            ],
            ("collective 214 of group dp (barrier of 8 elements Float): ranks 0-7 wait in it,"
            " nobody on record is late; ranks called it differently: all_reduce by ranks 0-6,"
            " barrier by rank 7"),
        ),
    ],
)  # fmt: skip
def test_who_has_not_called_what_others_wait_in(stood: list[Stood], line: str) -> None:
    assert standing_lines(stood) == (line,)


def test_members_without_a_record_are_named() -> None:
    members = ((0, 7),)
    some = Stood(group="0", members=members, enqueued=9, completed=8, ranks=((0, 4), (6, 7)))
    (line,) = standing_lines([some])
    assert line.endswith(
        "ranks 0-4, 6-7 wait in it, nobody on record is late; rank 5 left no record"
    )


def test_groups_with_late_ranks_come_first_and_many_are_counted() -> None:
    done = Stood(group="z", enqueued=9, completed=9, ranks=((0, 1),))
    wait = [Stood(group=f"a{n:02}", enqueued=9, completed=8, ranks=((n, n),)) for n in range(20)]
    late = Stood(group="a19", enqueued=8, completed=8, ranks=((77, 77),))
    lines = standing_lines([done, *wait, late], most=2)
    assert lines[0].endswith("rank 19 waits in it, rank 77 has not called it")
    assert lines[2] == "and 18 more groups in which ranks wait"


# --- now and before ------------------------------------------------------------------------------


def test_what_is_looked_into_now_is_said_in_status(state: State) -> None:
    assert views.status(state, 0.0).looking == ""
    again = look(2, round=2, why="nothing advances still: look 2 at it")
    state.watching = watched(judged(1), again)
    asked = views.status(state, 0.0).looking
    assert asked == ("no step for 14.2 s (limit 10 s): looking at the stacks of all ranks, round 2")
    again = judged(result=LookResult.AGAIN, verdict="half of the ranks is elsewhere")
    state.watching = watched(again, next_at=113.0)
    assert views.status(state, 104.0).looking == (
        "no step for 14.2 s (limit 10 s): half of the ranks is elsewhere; looking again in 9 s"
    )


def test_a_straggler_is_said_with_what_it_costs(state: State) -> None:
    state.straggler = Straggler(
        rank=Rank(5),
        machine=MachineId("m2"),
        at=1.0,
        event=9,
        why="it computes for 0.72 s of each step, others for 0.50 s",
        costs=0.31,
    )
    assert views.status(state, 0.0).straggler == (
        "rank 5 on m2 costs all others 31% of each step: it computes for 0.72 s of each step, "
        "others for 0.50 s"
    )


def test_an_incident_has_the_verdict_of_the_look_that_decided_it(state: State) -> None:
    state.incidents = [
        Incident(
            incident=f"incident-{at}",
            symptom="no step",
            opened_at=at * 100.0,
            opened_by="4.0",
            generation=Generation(1),
            furthest=Step(7),
            closed_at=at * 100.0 + 50.0,
            rungs=[
                RungTaken(
                    rung=Rung.AGGREGATE, generation=Generation(1), failure="hang", why="", at=0.0,
                    action="4.1",
                )
            ],
        )
        for at in (1, 2)
    ]  # fmt: skip
    asked = judged(2, purpose=Purpose.ASKED, judged_at=120.0, verdict="shown")
    state.looks = [judged(1, group="pp 24-31"), asked]
    first, second = views.incidents(state, 300.0).incidents
    assert (first.verdict, first.group) == ("m15 holds all others", "pp 24-31")
    assert (second.verdict, second.group) == ("", "")


# --- mechanisms ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "on", "words"),
    [
        ({}, True, "all machines of one group (tp, pp, dp) may go"),
        ({"layout": None}, False, "give --layout"),
        ({"layout": LayoutSpec(dp=32)}, False, "is on all machines"),
        ({"standbys": 0}, False, "give --standbys"),
        ({"nnodes": 1, "nproc_per_node": 32}, False, "one machine"),
        ({"policy": PolicySpec(looks=False)}, False, "--no-hang-detection"),
    ],
)
def test_over_eviction_says_whether_it_is_on(
    state: State, changed: dict[str, Any], on: bool, words: str
) -> None:
    assert state.spec is not None
    state.spec = msgspec.structs.replace(state.spec, **changed)
    told = next(each for each in mechanisms(state) if each.name == "over-eviction")
    assert told.on is on
    assert words in told.why


def test_agents_that_may_not_look_are_told_of(state: State) -> None:
    def told() -> tuple[bool, str]:
        found = next(each for each in mechanisms(state) if each.name == "stack traces")
        return found.on, found.why

    assert told() == (True, "taken when nothing advances; no look was taken yet")
    state.looks = [judged(remarks=["py-spy is not installed", "py-spy is not installed"])]
    assert told() == (True, "py-spy is not installed")
    state.watching = watched(
        look(2, clusters=[cluster(Fingerprint(""), (0, 31))], remarks=["ptrace is forbidden"])
    )
    assert told() == (False, "ptrace is forbidden")


# --- over HTTP -----------------------------------------------------------------------------------


class Asking:
    """The endpoints, without a server."""

    def __init__(self, state: State) -> None:
        self.told: list[ControllerEvent] = []
        self.app = Starlette(routes=LooksApi(LooksDesk(state, self._view, self._note)).routes())
        self._state = state

    def _view(self, after: int) -> StacksView:
        return look_views.stacks(self._state, 105.0, after=after)

    async def _note(self, events: Sequence[ControllerEvent]) -> None:
        self.told += events

    def __call__(self, method: str, query: str = "", body: bytes = b"") -> tuple[int, bytes]:
        return asyncio.run(self._called(method, query, body))

    async def _called(self, method: str, query: str, body: bytes) -> tuple[int, bytes]:
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": method, "path": "/v1/stacks", "headers": []}
        await self.app({**scope, "query_string": query.encode()}, receive, send)
        return sent[0]["status"], b"".join(each.get("body", b"") for each in sent[1:])

    def shown(self, query: str = "") -> StacksView:
        return msgspec.json.decode(self("GET", query)[1], type=StacksView)


def test_who_asks_for_a_look_waits_for_one_with_a_higher_number(state: State) -> None:
    asking = Asking(state)
    state.looked, state.looks = 3, [judged(3)]
    code, answer = asking("POST", body=b'{"by": "anna"}')
    assert (code, msgspec.json.decode(answer, type=LookAsked).after) == (200, 3)
    assert asking.told == [StacksRequested(by="anna")]
    state.stacks_wanted_by = "anna"
    assert asking("POST", body=b'{"by": "bert"}')[0] == 200
    assert len(asking.told) == 1, "one look will do for both"
    assert asking.shown("after=3") == StacksView(job=JobId("j"), wanted=True)

    waits = {MachineId("m1"): "9.0", MachineId("m2"): "9.1"}
    state.watching = watched(look(4, purpose=Purpose.ASKED, awaiting=waits, fetching={READ: "9.3"}))
    going = asking.shown("after=3").under_way
    assert going is not None
    assert (going.number, going.answered, going.asked, going.fetching) == (4, 14, 16, 1)
    newest = asking.shown().newest
    assert newest is not None
    assert newest.number == 3
    state.looked = 4
    _, answer = asking("POST", body=b'{"by": "bert"}')
    assert msgspec.json.decode(answer, type=LookAsked).after == 3, "that one is for all who ask"
    assert len(asking.told) == 1

    state.watching, state.looks = None, [judged(3), judged(4, result=LookResult.SHOWN)]
    newest = asking.shown("after=3").newest
    assert newest is not None
    assert (newest.number, newest.result, len(newest.clusters)) == (4, LookResult.SHOWN, 3)


def test_the_newest_look_of_which_something_is_kept_is_shown(state: State) -> None:
    state.looks = [judged(1), judged(2, clusters=[], result=LookResult.WENT_ON)]
    newest = look_views.stacks(state, 0.0).newest
    assert newest is not None
    assert newest.number == 1


@pytest.mark.parametrize(
    ("phase", "query", "body", "code", "words"),
    [
        (Phase.STARTING, "", b'{"by": "anna"}', 409, b"no ranks run now (the job is starting)"),
        (Phase.RUNNING, "", b"{}", 400, b"body is not what it should be"),
        (Phase.RUNNING, "", b'{"by": ""}', 400, b"body is not what it should be"),
    ],
)
def test_what_cannot_be_asked_is_said(
    state: State, phase: Phase, query: str, body: bytes, code: int, words: bytes
) -> None:
    state.phase = phase
    asking = Asking(state)
    status, answer = asking("POST", query, body)
    assert status == code
    assert words in answer
    assert not asking.told
