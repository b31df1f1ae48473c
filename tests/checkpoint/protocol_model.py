"""A model of the every-step checkpoint, small enough to visit every state it can be in.

A few ranks train in lockstep as a collective makes them: nobody finishes update s+1 before
everybody has finished update s. Each rank's copy of s runs beside the computation of s+1, and its
update of s+1 waits for the commit of s. Agents pin and release steps at any moment. Everything dies
at any moment and restarts from the newest common step. The rotation is not modelled: it is the real
choose_slot().

Ranks may also be the stages of a pipeline, which no collective joins: then each waits for its
neighbours' microbatches only, forward from the stage before and backward from the one after.

A run begins with what it restored: to start afresh is to have a copy of the step before the first.
Steps are kept relative to the newest step that all ranks finished, so the states are finitely many
and visiting them all covers runs of any length.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from everstep.checkpoint.pins import Pins
from everstep.checkpoint.slots import Held, choose_slot
from everstep.model import Generation, Step

NEVER = -99
Slot = tuple[int, int]
"""(step, generation) of a committed slot."""
TORN: Slot = (NEVER, 0)
"""A torn or empty slot."""
FAR = 100
"""Makes relative steps positive for the real code."""
OLDEST = -4
"""Steps before this are as good as this one: only "older than all others" matters."""


class Rank(NamedTuple):
    updated: int
    """Newest step whose optimizer update this rank finished."""
    pending: bool
    """Its copy is not committed yet."""
    writing: bool
    """One of the torn slots is the one that is being written."""
    pin: int
    """Pinned step, NEVER for none."""
    slots: tuple[Slot, ...]
    """Newest first, torn ones last: which file holds which copy makes no difference."""
    forwards: int = 0
    """Microbatches of the next step that went forward through this stage of a pipeline."""
    backwards: int = 0


State = tuple[Rank, ...]


class Model(NamedTuple):
    """What to explore."""

    ranks: int
    slots: int
    pins: tuple[int, ...] = ()
    """Which steps may be pinned, relative to the rank's own newest; releases come with them."""
    pinned_at_once: int = 3
    """Ranks that hold a pin at the same time, at most."""
    restarts: bool = False
    microbatches: int = 0
    """Of each step; the ranks are the stages of a pipeline, in order. 0: they run in lockstep."""


class Found(NamedTuple):
    """The outcome: how many states there are, and how the promise was broken, if it was."""

    states: int
    story: list[str] | None


def explore(model: Model) -> Found:
    """Visit every reachable state, and check the promise in each: a kill may strike there."""
    _choose.cache_clear()  # tests change what the code does
    initial: tuple[Slot, ...] = ((0, 0), *(TORN,) * (model.slots - 1))
    start = (Rank(0, False, False, NEVER, initial),) * model.ranks
    first = _normal(model, start)
    came_from: dict[State, tuple[State, str] | None] = {first: None}
    frontier = [first]
    while frontier:
        state = frontier.pop()
        if newest_common(state) < min(rank.updated for rank in state) - 1:
            return Found(len(came_from), _story(came_from, state))
        for name, following in _moves(model, state):
            normal = _normal(model, following)
            if normal not in came_from:
                came_from[normal] = (state, name)
                frontier.append(normal)
    return Found(len(came_from), None)


def newest_common(state: State) -> int:
    """Newest step of which all ranks hold a committed copy by one generation."""
    held = [{slot for slot in rank.slots if slot != TORN} for rank in state]
    common = set.intersection(*held)
    return max((step for step, _ in common), default=NEVER)


def _moves(model: Model, state: State) -> Iterator[tuple[str, State]]:
    slowest = min(rank.updated for rank in state)
    pinned = sum(rank.pin != NEVER for rank in state)
    pins = model.pins if pinned < model.pinned_at_once else ()
    for number, rank in enumerate(state):
        moves = [*_rank_moves(pins, rank)]
        if model.microbatches:
            moves += _stage_moves(model.microbatches, state, number)
        elif not rank.pending and rank.updated == slowest:
            moves.append(("updates", rank._replace(updated=rank.updated + 1, pending=True)))
        for name, after in moves:
            yield f"rank {number} {name}", (*state[:number], after, *state[number + 1 :])
    if model.restarts:
        yield "all killed and restarted", _restart(state)


def _stage_moves(microbatches: int, state: State, number: int) -> Iterator[tuple[str, Rank]]:
    """Any schedule: whatever has its input may run, backward as soon as it can or after all."""
    rank = state[number]
    before, after = state[number - 1 : number], state[number + 1 : number + 2]
    went = [stage.updated * microbatches + stage.forwards for stage in (*before, rank)]
    came = [stage.updated * microbatches + stage.backwards for stage in (rank, *after)]
    if rank.forwards < microbatches and (not before or went[0] > went[1]):
        yield "goes forward", rank._replace(forwards=rank.forwards + 1)
    if rank.backwards < rank.forwards and (not after or came[1] > came[0]):
        yield "goes backward", rank._replace(backwards=rank.backwards + 1)
    if rank.backwards == microbatches and not rank.pending:
        assert rank.updated == min(stage.updated for stage in state), "lockstep forbids this"
        yield (
            "updates",
            rank._replace(updated=rank.updated + 1, pending=True, forwards=0, backwards=0),
        )


def _rank_moves(pins: tuple[int, ...], rank: Rank) -> Iterator[tuple[str, Rank]]:
    if rank.pending and not rank.writing:
        index = _choose(rank.slots, rank.updated, rank.pin)
        overwritten, pin = rank.slots[index][0], rank.pin
        assert overwritten == NEVER or overwritten != pin, "a pinned slot was chosen"
        yield "begins", rank._replace(writing=True, slots=_with(rank.slots, index, TORN))
    if rank.writing:
        torn = rank.slots.index(TORN)
        slots = _with(rank.slots, torn, (rank.updated, 0))
        yield "commits", rank._replace(pending=False, writing=False, slots=slots)
    if rank.pin != NEVER:
        yield "is unpinned", rank._replace(pin=NEVER)
    else:
        for ahead in pins:
            step = rank.updated + ahead
            yield f"is pinned to {step}", rank._replace(pin=step)


def _restart(state: State) -> State:
    """The next generation begins at the newest common step; newer copies are dropped."""
    restored = newest_common(state)
    return tuple(
        Rank(
            updated=restored,
            pending=False,
            writing=False,
            pin=rank.pin,
            slots=tuple(
                (slot[0], slot[1] - 1) if NEVER < slot[0] <= restored else TORN
                for slot in rank.slots
            ),
        )
        for rank in state
    )


def _with(slots: tuple[Slot, ...], index: int, slot: Slot) -> tuple[Slot, ...]:
    return (*slots[:index], slot, *slots[index + 1 :])


@cache
def _choose(slots: tuple[Slot, ...], step: int, pin: int) -> int:
    """Ask the code that ranks run."""
    held = [
        None if slot == TORN else Held(step=Step(slot[0] + FAR), generation=Generation(slot[1]))
        for slot in slots
    ]
    return choose_slot(held, Step(step + FAR), Pins(safe=None if pin == NEVER else Step(pin + FAR)))


def _normal(model: Model, state: State) -> State:
    """The same situation with the slowest rank at step 0, few generations, and ranks in order.

    Stages of a pipeline are no equals and stay where they are.
    """
    zero = min(rank.updated for rank in state)
    known = {slot[1] for rank in state for slot in rank.slots} | {0}
    names = {generation: -place for place, generation in enumerate(sorted(known, reverse=True))}
    shifted = [_shifted(rank, zero, names) for rank in state]
    return tuple(shifted if model.microbatches else sorted(shifted))


def _shifted(rank: Rank, zero: int, names: dict[int, int]) -> Rank:
    slots = [
        slot if slot == TORN else (max(slot[0] - zero, OLDEST), names[slot[1]])
        for slot in rank.slots
    ]
    slots.sort(reverse=True)
    pin = rank.pin
    if pin < zero and not any(slot[0] == pin for slot in rank.slots):
        pin = NEVER  # that copy is gone and will not be made again
    if pin != NEVER:
        pin = max(pin - zero, OLDEST)
    return rank._replace(updated=rank.updated - zero, pin=pin, slots=tuple(slots))


def _story(came_from: dict[State, tuple[State, str] | None], state: State) -> list[str]:
    lines = [f"then: {state}"]
    before = came_from[state]
    while before is not None:
        state, name = before
        lines.append(name)
        before = came_from[state]
    return lines[::-1]
