"""Who goes for a look at ranks that stood still, and what limits that."""

from __future__ import annotations

import pytest

from everstep.core.over_eviction import objection
from everstep.model import MachineId
from tests.transcripts.transcript import Transcript


def job(nnodes: int, standbys: int, more: str = "") -> Transcript:
    """All machines run ranks, and so many standbys are ready."""
    run = Transcript()
    members = " ".join(f"m{n}" for n in range(nnodes))
    spare = " ".join(f"m{n}" for n in range(nnodes, nnodes + standbys))
    run.run(f"> 0 job nnodes={nnodes} nproc=1 standbys={standbys}\n> 1 join {members}\n")
    if spare:
        run.run(f"> 1 join {spare}\n")
    run.run(f"> 9 TimerFired\n> 10 stopped {members}\n> 11 started {members}\n> 12 progress 5\n")
    run.run(more)
    return run


def against(run: Transcript, count: int, group: str = "", now: float = 20) -> str:
    names = [MachineId(f"m{n}") for n in range(count)]
    return objection(run.core.state, names, group, now)


@pytest.mark.parametrize(
    ("nnodes", "standbys", "count", "group", "says"),
    [
        (8, 1, 1, "", ""),
        (8, 0, 1, "", "no standby is ready"),
        (8, 2, 2, "", ""),
        (8, 1, 2, "", "only 1 of 2 standbys are ready"),
        (8, 4, 3, "", "3 machines at once are not the machines"),
        (3, 4, 2, "", "2 machines at once are not the machines"),
        (2, 4, 2, "dp 0-1", "they are the whole job"),
        (16, 4, 4, "pp 0-3", ""),
        (16, 3, 4, "pp 0-3", "only 3 of 4 standbys are ready"),
        (16, 0, 4, "pp 0-3", "no standby is ready"),
        (16, 2, 8, "pp 0-7", "only 2 of 8 standbys are ready"),
        (64, 3, 4, "pp 0-3", "only 3 of 4 standbys are ready"),
        (64, 5, 5, "pp 0-4", ""),
    ],
)
def test_no_more_go_than_standbys_are_ready_and_a_group_counts_once(
    nnodes: int, standbys: int, count: int, group: str, says: str
) -> None:
    said = against(job(nnodes, standbys), count, group)
    assert said.startswith(says)
    assert bool(said) == bool(says)


def test_evictions_of_the_last_minutes_count() -> None:
    run = job(8, 4)
    for at, name in ((20, "m6"), (30, "m7")):
        run.run(f"> {at} alert {name} check=gpu.lost verdict=evict\n")
        state = run.core.state
        members = " ".join(m.machine for m in state.members())
        run.run(f"> {at + 1} stopped {members} copies=5\n")
        fresh = [m.machine for m in state.members() if m.machine in state.awaiting]
        run.run(f"> {at + 2} stopped {' '.join(fresh)}\n")
        run.run(f"> {at + 3} started {' '.join(m.machine for m in state.members())}\n")
    assert against(run, 1, now=40) == "2 evictions within 5 minutes are enough"
    assert against(run, 1, now=400) == ""


def test_a_parallel_group_is_no_place_that_standbys_are_distrusted_for() -> None:
    look = "looked m0 m1 m2 m3 m4 m5 m6 m7 reduce_scatter=0-5 irecv=6 isend=7\n"
    run = Transcript()
    members = " ".join(f"m{n}" for n in range(8))
    run.run(
        "> 0 job stalls nnodes=8 nproc=1 standbys=2 layout=pp=2,dp=4,order=tp-cp-pp-dp\n"
        f"> 1 join {members} m8 m9\n> 2 stopped {members}\n> 3 started {members}\n> 4 progress 5\n"
        f"> 14 TimerFired\n> 15 {look}> 15 texts m0 m6 m7\n> 17 TimerFired\n> 18 {look}"
        f"> 19 stopped {members} copies=5\n"
    )
    state = run.core.state
    assert [(each.machine, each.unit) for each in state.evictions] == [
        ("m6", "pp 6-7"),
        ("m7", "pp 6-7"),
    ]
    assert [each.unit for each in state.expelled] == ["pp 6-7", "pp 6-7"]
    assert not state.bad_units
