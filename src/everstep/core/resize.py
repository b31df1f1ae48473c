"""Fewer machines than wanted, and none coming: going on with fewer data-parallel replicas.

Asked by rules.py while positions are free. Only if the job says that it is elastic; otherwise it
waits and says so. When machines are there again, the job grows back, in a planned restart or on
the next one that comes. Which ranks then get whose shard is regrown.py's business.
"""

from __future__ import annotations

from collections.abc import Iterator

from everstep.actions import ControllerAction, PageHuman, RequestMachines, ResizeJob, Rung
from everstep.core.alerts import doubts
from everstep.core.deciding import Deciding, Planned
from everstep.core.history import Sized
from everstep.core.sizes import Size, largest, seats
from everstep.core.spreading import can_run
from everstep.core.state import Machine, Phase, State
from everstep.events import MachinesRequested
from everstep.model import NO_STEP, JobSpec, Seconds, Step

SHORT = "machines"
"""Key of the matter of which people are told."""
LOAD_BYTES_PER_S = 500e6
"""Assumed, for what people are told: one process writes torch's own format, then all ranks read."""


def machines_requested(state: State, event: MachinesRequested, now: Seconds) -> None:
    """A refusal leaves `requested` as it is: the machines are still wanted, from anybody."""
    del now
    state.outstanding.pop(event.action, None)
    state.refused = event.reason


def note_shortage(state: State, now: Seconds) -> None:
    """After every event: since when the job waits for machines."""
    if state.spec is None or not _short(state):
        state.short_since = None
    elif state.short_since is None:
        state.short_since = now


def resize_job(state: State, action: ResizeJob, now: Seconds) -> None:
    """The next generation has another size. Backups of the former one are no use to the next."""
    del now
    assert state.spec is not None, "the journal's first record must be JobSubmitted"
    resized = state.spec.resized(action.nnodes, action.dp)
    state.resized = None if resized == state.spec else resized
    state.sizes.append(Sized(since=state.generation, nnodes=action.nnodes, dp=action.dp))
    for machine in state.members():
        machine.node_rank = None
    state.positions = dict(action.positions)
    for node_rank, name in action.positions:
        state.machines[name].node_rank = node_rank
    state.seen = state.safe = state.short_since = None
    state.single = False
    state.backup_after = NO_STEP


def restart_for(d: Deciding) -> Planned | None:
    """Ranks that run are stopped to change the number of machines; None: they are not.

    Only to have more of them, and only once the last recovery is proven.
    """
    state, incident = d.state, d.state.incident
    mine = incident is None or (incident.planned and incident.generation == state.generation)
    if state.resized is None or state.phase is not Phase.RUNNING or not mine:
        return None
    more = len(_ready(d))
    size = _possible(state, more)
    if size is None or size.dp <= state.job.dp or _why_not(state):
        return None
    noun = "machine is" if more == 1 else "machines are"
    why = (
        f"{more} more {noun} ready: the job grows from {state.job.dp} to {size.dp} of"
        f" {_full(state).dp} replicas{_by_way_of_disk(state)}"
    )
    return Planned(rung=Rung.RESIZE, why=why)


def resize(d: Deciding) -> list[ControllerAction]:
    """With all ranks stopped: go on with fewer machines, or with more of them again."""
    state = d.state
    if state.phase is not Phase.STOPPING or state.awaiting or _why_not(state):
        return []
    return _grow(d) or _shrink(d)


def _grow(d: Deciding) -> list[ControllerAction]:
    state, elastic = d.state, _full(d.state).elastic
    more = len(_ready(d))
    size = _possible(state, more)
    if elastic is None or size is None or size.dp <= state.job.dp:
        return []
    if elastic.sharded and state.planned is not Rung.RESIZE:
        return []  # memory has a newer step than disk: grow when that costs less
    if state.overlap_to is not None:
        return []  # losses are compared with those of as many replicas: grow when that is done
    return [_resize(d, size, f"{len(state.positions) + more} machines are there again")]


def _shrink(d: Deciding) -> list[ControllerAction]:
    state = d.state
    size, waited = _possible(state, len(state.standbys())), _waited(state, d.now)
    if size is None or size.dp >= state.job.dp or not waited:
        return []
    return [_resize(d, size, f"{_missing(state)} and {waited}")]


def _resize(d: Deciding, size: Size, because: str) -> ResizeJob:
    state = d.state
    full = _full(state)
    job = full.resized(size.nnodes, size.dp)
    return ResizeJob(
        id=d.id(),
        cause=d.event,
        why=f"{because}: the job goes on with {size.dp} of {full.dp} replicas, on {size.nnodes} of"
        f" {full.nnodes} machines{_by_way_of_disk(state)}",
        nnodes=size.nnodes,
        dp=size.dp,
        positions=tuple(seats(job, state.job, state.positions).items()),
    )


def tell_of_shortage(d: Deciding) -> list[ControllerAction]:
    """The job waits for machines that do not come."""
    state = d.state
    waited = _waited(state, d.now)
    if not waited or state.awaiting or SHORT in state.paged:
        return []
    why = f"{_missing(state)} and {waited}: the job waits{_advice(state)}"
    return [PageHuman(id=d.id(), cause=d.event, why=why, about=SHORT)]


def deadlines(state: State) -> Iterator[Seconds]:
    """When the job has waited long enough."""
    if state.short_since is not None:
        yield state.short_since + state.job.policy.elastic_after_s


# --- what is there, and what may be done ---------------------------------------------------------


def _full(state: State) -> JobSpec:
    assert state.spec is not None, "the journal's first record must be JobSubmitted"
    return state.spec


def _there(state: State) -> int:
    return len(state.positions) + len(state.standbys())


def _ready(d: Deciding) -> list[Machine]:
    """Standbys for which a larger job need not wait: all is warm, the code is there, and no check
    speaks against them.
    """
    state = d.state
    return [
        machine
        for machine in state.standbys()
        if machine.ready and can_run(state, machine, state.version)
        if not doubts(state, machine, d.now)
    ]


def _possible(state: State, more: int) -> Size | None:
    """With so many standbys besides the members."""
    full = _full(state)
    return None if full.elastic is None else largest(full, len(state.positions) + more)


def _short(state: State) -> bool:
    return state.phase is Phase.STOPPING and _there(state) < state.job.nnodes


def _waited(state: State, now: Seconds) -> str:
    """Why no machine is coming, in a clause; empty if some may be, or none is missing."""
    if not _short(state):
        return ""
    asking = any(isinstance(each, RequestMachines) for each in state.outstanding.values())
    if state.refused and not asking:
        return f"none is coming ({state.refused})"
    wait_s = state.job.policy.elastic_after_s
    if state.short_since is not None and now >= state.short_since + wait_s:
        return f"none came within {wait_s:g} s"
    return ""


def _why_not(state: State) -> str:
    """Why the number of replicas must not change now, in a clause; empty if it may."""
    elastic = _full(state).elastic
    if elastic is None:
        return "the job is not elastic"
    if not elastic.sharded:
        unequal = state.unequal
        return f"its state is not replicated, since {unequal}" if unequal else ""
    if not state.published and _done(state) > NO_STEP:
        return "its state is sharded and no step is on disk yet"
    if state.phase is Phase.RUNNING and not _published_here(state):
        return "no step of this generation is on disk yet"
    return ""


def _done(state: State) -> Step:
    """The newest step that is finished, as far as is known before ranks start."""
    return max([state.furthest, *(machine.finished for machine in state.members())])


def _published_here(state: State) -> bool:
    return any(each.generation == state.generation for each in state.published)


# --- words ---------------------------------------------------------------------------------------


def _missing(state: State) -> str:
    missing = state.job.nnodes - _there(state)
    verb = "is" if missing == 1 else "are"
    return f"{missing} of {state.job.nnodes} positions {verb} free"


def _advice(state: State) -> str:
    full = _full(state)
    why_not = _why_not(state)
    if full.elastic is None:
        return "; give it a machine, or submit it with --elastic-dp to go on with fewer replicas"
    if why_not:
        return f", because {why_not}; give it a machine"
    return f", because {_there(state)} machines do not hold {full.elastic.dp_min} of its replicas"


def _by_way_of_disk(state: State) -> str:
    """How long it takes, and what is done again, where the state is sharded."""
    elastic = _full(state).elastic
    if elastic is None or not elastic.sharded or not state.published:
        return ""
    newest = state.published[-1]
    again = max(0, _done(state) - newest.step)
    text = (
        f"; its state is sharded, so step {newest.step} is loaded from disk by way of torch's own"
        f" format, and {again} steps are done again"
    )
    if not state.stored_bytes:
        return text
    took_s = 2 * state.stored_bytes / LOAD_BYTES_PER_S
    return f"{text}: {state.stored_bytes / 1e9:.3g} GB, about {max(1, round(took_s))} s"
