"""When the number of machines changes, and the sentences that people get."""

from __future__ import annotations

import msgspec
import pytest

from everstep.actions import PageHuman, ResizeJob, StartRanks
from everstep.core.invariants import Watch
from everstep.core.must import InvariantBroken
from everstep.core.restore import choose_from, only_spoiled
from everstep.core.state import Spoiled, State
from everstep.events import (
    ControllerEvent,
    ControllerStarted,
    JobSubmitted,
    MachineJoined,
    MachineLost,
    RanksStopped,
)
from everstep.model import Copy, ElasticSpec, Generation, MachineId, NodeRank, Rank, Step, Term
from tests.core.test_sizes import job
from tests.transcripts.transcript import Transcript

STORY = """
> 0 job {job}
> 1 join m0 m1 m2 shard_port=7000
> 2 stopped m0 m1 m2
> 3 started m0 m1 m2
> 4 progress 5
> 20 MachineLost m1 witness="gone"
{then}
"""
REFUSED = """
> 20.1 requested reason=no_scheduler
> 20.2 stopped m0 m2 copies=26,27,28 finished=28
"""


def told(spec: str, then: str) -> str:
    return Transcript().run(STORY.format(job=spec, then=then))


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("nnodes=3 nproc=1", "the job waits; give it a machine, or submit it with --elastic-dp"),
        ("nnodes=3 nproc=1 elastic=3", "because 2 machines do not hold 3 of its replicas"),
        ("sharded nnodes=3 nproc=1 elastic=1", "sharded and no step is on disk yet"),
        ("nnodes=3 nproc=1 elastic=1", "the job goes on with 2 of 3 replicas, on 2 of 3 machines"),
    ],
)
def test_what_is_done_and_said_when_a_request_is_refused(spec: str, sentence: str) -> None:
    text = told(spec, REFUSED)
    assert sentence in text
    assert "1 of 3 positions is free and none is coming (no scheduler)" in text
    assert text.count("PageHuman") == ("goes on" not in sentence)


def test_while_a_request_is_open_or_promised_it_waits() -> None:
    stopped = "> 20.2 stopped m0 m2 copies=26,27,28 finished=28"
    for answer in ("", "> 20.1 requested\n"):
        text = told("nnodes=3 nproc=1 elastic=1", f"{answer}{stopped}\n> 300 TimerFired")
        assert "ResizeJob" not in text
        assert "PageHuman" not in text


def test_how_long_a_sharded_state_takes_is_said() -> None:
    run = Transcript()
    run.run("> 0 job sharded nnodes=3 nproc=1 elastic=1 disk_every=10\n> 1 join m0 m1 m2\n")
    run.run("> 2 stopped m0 m1 m2\n> 3 started m0 m1 m2\n> 4 progress 5\n> 10 persisted m0 m1 m2\n")
    run.run("> 10.1 published\n")
    run.core.state.stored_bytes = 90_000_000_000
    text = run.run(f"> 20 MachineLost m1 witness='gone'\n{REFUSED}")
    assert "90 GB, about 360 s" in text
    assert "18 steps are done again" in text


def small() -> State:
    """Two replicas of three are left, and none of their size has saved anything."""
    run = Transcript()
    run.run(STORY.format(job="nnodes=3 nproc=1 elastic=1", then=REFUSED))
    return run.core.state


@pytest.mark.parametrize(("bound", "step"), [(None, 28), (30, 28), (27, 27), (26, 26), (20, 26)])
def test_steps_that_are_to_be_done_again_may_be_of_another_size(
    bound: int | None, step: int
) -> None:
    state = small()
    state.overlap_to = None if bound is None else Step(bound)
    choice = choose_from(state)
    assert choice.copy.step == step
    assert choice.restores == {0: 0, 1: 2}, "whatever the step, the survivors' shards"


@pytest.mark.parametrize(("bad", "step"), [(29, 28), (27, 26), (26, -1), (3, -1)])
def test_what_is_sound_may_be_of_another_size(bad: int, step: int) -> None:
    state = small()
    assert not only_spoiled(state)
    state.spoiled = [Spoiled(step=Step(bad), through=Generation(1))]
    choice = choose_from(state)
    assert choice.copy.step == step
    assert ("bad steps" in choice.why) == (bad < 29)
    assert only_spoiled(state) == (step < 0)


BACK = """
> 21 started m0 m2
> 25 progress 45
"""


@pytest.mark.parametrize("last", ["> 32 ready m3", "> 33 held m3"])
def test_a_job_grows_by_machines_that_are_ready_and_have_its_code(last: str) -> None:
    run = Transcript()
    text = STORY.replace("shard_port=7000", "versions=aaaaaaaa ready=yes")
    run.run(text.format(job="nnodes=3 nproc=1 elastic=1 code=aaaaaaaa", then=REFUSED + BACK))
    first = "> 32 ready m3" if "held" in last else "> 32 held m3"
    assert "planned" not in run.run(f"> 30 join m3 versions=\n{first}\n")
    assert "the job grows from 2 to 3 of 3" in run.run(last)


# --- the invariants notice -----------------------------------------------------------------------


def shrunk(watch: Watch) -> None:
    """A job of three, of which two are left and have stopped."""
    submitted = JobSubmitted(spec=job(3, 1))
    run = Transcript()
    started = ControllerStarted(term=Term(1), version="0")
    events: list[ControllerEvent] = [submitted, started]
    events += [
        MachineJoined(
            machine=MachineId(name),
            agent=name,
            address=name,
            host="h",
            version="0",
            generation=Generation(0),
        )
        for name in ("m0", "m1", "m2")
    ]
    for number, event in enumerate(events):
        watch.see(event, run.core.handle(event, float(number)), float(number))
    assert watch.positions == {0: "m0", 1: "m1", 2: "m2"}
    for name in ("m0", "m2"):
        watch.stopped[MachineId(name)] = RanksStopped(
            machine=MachineId(name), action="1.0", generation=Generation(1), store_port=1
        )


def resize(**changes: object) -> ResizeJob:
    positions = ((NodeRank(0), MachineId("m0")), (NodeRank(1), MachineId("m2")))
    action = ResizeJob(id="1.0", cause="1", why="x", nnodes=2, dp=2, positions=positions)
    return msgspec.structs.replace(action, **changes)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"dp": 0}, "is not allowed"),
        ({"dp": 4, "nnodes": 4}, "is larger than the job"),
        ({"positions": ((NodeRank(0), MachineId("m9")),)}, "a newcomer"),
        ({"positions": ((NodeRank(2), MachineId("m0")),)}, "no such position"),
    ],
)
def test_a_wrong_size_is_noticed(changes: dict[str, object], complaint: str) -> None:
    watch = Watch()
    shrunk(watch)
    watch.resize_job(resize())
    with pytest.raises(InvariantBroken, match=complaint):
        watch.resize_job(resize(**changes))


def start(rank: int, **changes: object) -> StartRanks:
    order = StartRanks(
        id="1.1",
        cause="1",
        why="x",
        machine=MachineId("m2"),
        generation=Generation(1),
        node_rank=NodeRank(1),
        master_addr="m0",
        master_port=1,
        restore=Step(7),
        restore_generation=Generation(0),
        restarts=1,
        nnodes=2,
        dp=2,
        restore_nnodes=3,
        restores=((Rank(1), Rank(rank)),),
    )
    return msgspec.structs.replace(order, **changes)


def test_a_shard_that_nobody_has_is_noticed() -> None:
    watch = Watch()
    shrunk(watch)
    watch.resize_job(resize())
    held = Copy(rank=Rank(2), step=Step(7), generation=Generation(0))
    watch._own[MachineId("m2")] = (held,)
    with pytest.raises(InvariantBroken, match="nobody has rank 0's shard"):
        watch.start_ranks(start(0))
    with pytest.raises(InvariantBroken, match="is of another size"):
        watch.start_ranks(start(2, nnodes=0, dp=0))
    with pytest.raises(InvariantBroken, match="wrong about who saved"):
        watch.start_ranks(start(2, restore_nnodes=2))
    watch.start_ranks(start(2))


def test_elastic_jobs_alone_are_resized() -> None:
    spec = job(3, 1)
    assert spec.elastic == ElasticSpec()
    text = told("nnodes=3 nproc=1", REFUSED)
    assert "ResizeJob" not in text
    assert MachineLost.__name__ in text
    assert PageHuman.__name__ in text
