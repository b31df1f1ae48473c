"""A model of backups: ranks on machines of their own, each keeping the backup of the one before it.

Ranks train and save as in protocol_model.py. Beside that the controller names backup steps for the
whole job, orders reach the ranks one by one, shards are sent, arrive or fail, and everything may be
killed or one machine lost at any moment. The decisions are those of the real code: choose_slot()
with its pins, choose_kept(), and core/restore.py's choose().

Promises, checked in every state:
  * a kill of all processes costs no rank more than the step it was computing;
  * the loss of any one machine leaves the machine-safe step or a newer one, the same on all ranks;
  * a backup that nothing disturbs succeeds: no rank overwrites what it has to send.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from everstep.checkpoint.kept import choose_kept
from everstep.checkpoint.pins import Pins
from everstep.checkpoint.slots import Held, choose_slot
from everstep.core.restore import Copies, choose
from everstep.model import Copy, Generation, MachineId, Rank, Step

NEVER = -99
FAR = 100
"""Makes relative steps positive for the real code."""
OLD = -3
"""Steps before this, relative to the slowest rank, are as good as any other old ones."""
IDLE, ORDERED, SENDING, SENT, FAILED = range(5)
"""How far a rank is with the job's backup step."""


class Machine(NamedTuple):
    """One rank and its machine."""

    updated: int
    """Newest step whose optimizer update the rank finished."""
    saving: bool
    """Its copy is not committed yet; a slot was voided for it."""
    slots: tuple[int, ...]
    """Steps of the rank's own copies, newest first; NEVER for a torn slot."""
    backup_pin: int
    safe_pin: int
    stage: int
    kept: tuple[int, ...]
    """Steps of the other rank's backups here, newest first; NEVER for a torn slot."""


class State(NamedTuple):
    """The job."""

    machines: tuple[Machine, ...]
    backup: int
    """The backup step that is under way; NEVER for none."""
    safe: int
    """The newest step that all peers held when it was declared so."""
    covered: bool
    """Whether all peers hold it still: not after a loss, until the next backup is complete."""
    mishaps: int
    """Transfers that may still fail, kills and losses that may still happen."""


class Model(NamedTuple):
    """What to explore."""

    machines: int
    slots: int = 5
    mishaps: int = 0
    """Failed transfers, kills and lost machines together, each at any moment."""
    pins_safe: bool = True
    """False: the former step is released when the next is begun. (A mistake to be found.)"""
    keeps_safe: bool = True
    """False: the peer overwrites its older slot, whatever it holds. (A mistake to be found.)"""


class Found(NamedTuple):
    """The outcome: how many states there are, and how a promise was broken, if one was."""

    states: int
    story: list[str] | None


def explore(model: Model, most: int = 1 << 20) -> Found:
    """Visit every reachable state."""
    _choose.cache_clear()  # tests change what the code does
    fresh = Machine(
        updated=0,
        saving=False,
        slots=(0, *(NEVER,) * (model.slots - 1)),
        backup_pin=NEVER,
        safe_pin=NEVER,
        stage=IDLE,
        kept=(NEVER, NEVER),
    )
    first = State((fresh,) * model.machines, NEVER, NEVER, covered=False, mishaps=model.mishaps)
    came_from: dict[State, tuple[State, str] | None] = {first: None}
    frontier = deque([first])
    while frontier:
        state = frontier.popleft()
        broken = _broken(state)
        if broken:
            return Found(len(came_from), [*_story(came_from, state), broken])
        for name, following in _moves(model, state):
            normal = _normal(following)
            if normal not in came_from:
                came_from[normal] = (state, name)
                frontier.append(normal)
        assert len(came_from) < most, f"more than {most} states"
    return Found(len(came_from), None)


# --- promises ------------------------------------------------------------------------------------


def _broken(state: State) -> str:
    slowest = min(machine.updated for machine in state.machines)
    newest = restorable(state, lost=NEVER)
    if newest < slowest - 1:
        return f"a kill leaves step {newest}, all had finished {slowest}"
    if state.covered:
        for lost in range(len(state.machines)):
            left = restorable(state, lost)
            if left < state.safe:
                return f"the loss of machine {lost} leaves step {left}, {state.safe} was safe"
    for number, machine in enumerate(state.machines):
        if machine.stage == ORDERED and state.backup not in _saved_or_to_come(machine):
            return f"machine {number} overwrote step {state.backup} before it was sent"
    return ""


def _saved_or_to_come(machine: Machine) -> set[int]:
    return {*machine.slots, *range(machine.updated, machine.updated + 9)}


def restorable(state: State, lost: int) -> int:
    """The step that the controller chooses if this machine's memory is gone."""
    return _chosen(
        tuple(
            ((), ()) if number == lost else (machine.slots, machine.kept)
            for number, machine in enumerate(state.machines)
        )
    )


@cache
def _chosen(memories: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]) -> int:
    count = len(memories)
    local = [
        _copy(rank, step)
        for rank, (slots, _) in enumerate(memories)
        for step in slots
        if step > NEVER
    ]
    backups = [
        (MachineId(str(place)), _copy((place - 1) % count, step))
        for place, (_, kept) in enumerate(memories)
        for step in kept
        if step > NEVER
    ]
    ranks = [Rank(rank) for rank in range(count)]
    choice = choose(ranks, Copies(local=tuple(local), backups=tuple(backups)))
    return choice.copy.step - FAR if choice.copy.step >= 0 else NEVER


def _copy(rank: int, step: int) -> Copy:
    return Copy(rank=Rank(rank), step=Step(step + FAR), generation=Generation(1))


# --- moves ---------------------------------------------------------------------------------------


def _moves(model: Model, state: State) -> Iterator[tuple[str, State]]:
    slowest = min(machine.updated for machine in state.machines)
    for number, machine in enumerate(state.machines):
        for name, after in _training(state, machine, slowest):
            yield f"rank {number} {name}", _with(state, number, after)
        for name, following in _backing_up(model, state, number):
            yield f"machine {number} {name}", following
    yield from _deciding(state)
    if not state.mishaps:
        return
    rest = state._replace(mishaps=state.mishaps - 1)
    yield "all are killed and restarted", _restart(rest, restorable(rest, NEVER))
    if state.covered:
        for lost in range(len(state.machines)):
            yield f"machine {lost} is lost and replaced", _lose(model, rest, lost)


def _training(state: State, machine: Machine, slowest: int) -> Iterator[tuple[str, Machine]]:
    # The order to keep a step is given early enough: it is there before the step is saved.
    uninformed = machine.stage == IDLE and machine.updated + 1 == state.backup
    if not machine.saving and machine.updated == slowest and not uninformed:
        step = machine.updated + 1
        index = _choose(machine.slots, step, machine.backup_pin, machine.safe_pin)
        slots = _put(machine.slots, index, NEVER)
        yield f"saves step {step}", machine._replace(updated=step, saving=True, slots=slots)
    if machine.saving:
        slots = _put(machine.slots, machine.slots.index(NEVER), machine.updated)
        yield "commits", machine._replace(saving=False, slots=slots)


def _backing_up(model: Model, state: State, number: int) -> Iterator[tuple[str, State]]:
    machine = state.machines[number]
    to = (number + 1) % len(state.machines)
    peer = state.machines[to]
    if state.backup == NEVER:
        return
    if machine.stage == IDLE:
        safe = state.safe if model.pins_safe else NEVER
        pinned = machine._replace(stage=ORDERED, backup_pin=state.backup, safe_pin=safe)
        yield f"hears of backup step {state.backup}", _with(state, number, pinned)
    if machine.stage == ORDERED and state.backup in machine.slots:
        index = choose_kept_at(peer.kept, state.backup, state.safe if model.keeps_safe else NEVER)
        sending = _with(state, number, machine._replace(stage=SENDING))
        voided = sending.machines[to]._replace(kept=_put(peer.kept, index, NEVER))
        yield "begins to send", _with(sending, to, voided)
    if machine.stage == SENDING:
        sent = _with(state, number, machine._replace(stage=SENT))
        stored = sent.machines[to]
        kept = _put(stored.kept, stored.kept.index(NEVER), state.backup)
        yield "has sent", _with(sent, to, stored._replace(kept=kept))
    if state.mishaps and machine.stage in (ORDERED, SENDING):
        failed = machine._replace(stage=FAILED, backup_pin=NEVER)
        rest = state._replace(mishaps=state.mishaps - 1)
        yield "fails to send", _with(rest, number, failed)


def _deciding(state: State) -> Iterator[tuple[str, State]]:
    stages = {machine.stage for machine in state.machines}
    if state.backup == NEVER:
        ahead = max(machine.updated for machine in state.machines) + 1
        yield f"backup step {ahead} is ordered", state._replace(backup=ahead)
    elif stages <= {SENT, FAILED}:
        idle = tuple(machine._replace(stage=IDLE) for machine in state.machines)
        after = state._replace(machines=idle, backup=NEVER)
        if stages == {SENT}:
            after = after._replace(safe=state.backup, covered=True)
        yield f"the backup of step {state.backup} is over", after


def _lose(model: Model, state: State, lost: int) -> State:
    """Another machine takes its place, with nothing in its memory."""
    restored = restorable(state, lost)
    blank = Machine(
        updated=restored,
        saving=False,
        slots=(NEVER,) * model.slots,
        backup_pin=NEVER,
        safe_pin=NEVER,
        stage=IDLE,
        kept=(NEVER, NEVER),
    )
    return _restart(_with(state, lost, blank)._replace(covered=False), restored)


def _restart(state: State, restored: int) -> State:
    """The next generation: newer copies are dropped, missing ones are fetched, pins looked at."""
    machines = tuple(_restarted(machine, restored) for machine in state.machines)
    safe = state.safe if state.safe <= restored else NEVER
    covered = state.covered and safe != NEVER
    return State(machines, NEVER, safe, covered, state.mishaps)


def _restarted(machine: Machine, restored: int) -> Machine:
    slots = tuple(step if step <= restored else NEVER for step in machine.slots)
    if restored not in slots:
        index = _choose(slots, restored, machine.backup_pin, machine.safe_pin)
        slots = _put(slots, index, restored)
    return Machine(
        updated=restored,
        saving=False,
        slots=slots,
        backup_pin=machine.backup_pin if machine.backup_pin in slots else NEVER,
        safe_pin=machine.safe_pin if machine.safe_pin in slots else restored,
        stage=IDLE,
        kept=tuple(step if step <= restored else NEVER for step in machine.kept),
    )


def _with(state: State, number: int, machine: Machine) -> State:
    machines = (*state.machines[:number], machine, *state.machines[number + 1 :])
    return state._replace(machines=machines)


def _put(steps: tuple[int, ...], index: int, step: int) -> tuple[int, ...]:
    return (*steps[:index], step, *steps[index + 1 :])


# --- the real code -------------------------------------------------------------------------------


@cache
def _choose(slots: tuple[int, ...], step: int, backup: int, safe: int) -> int:
    pins = Pins(backup=_step(backup), safe=_step(safe))
    return choose_slot(_held(slots), Step(step + FAR), pins)


@cache
def choose_kept_at(kept: tuple[int, ...], step: int, safe: int) -> int:
    index = choose_kept(_held(kept), Step(step + FAR), Step(safe + FAR))
    assert index is not None
    return index


def _step(step: int) -> Step | None:
    return None if step == NEVER else Step(step + FAR)


def _held(steps: tuple[int, ...]) -> list[Held | None]:
    return [
        None if step == NEVER else Held(step=Step(step + FAR), generation=Generation(1))
        for step in steps
    ]


# --- fewer states --------------------------------------------------------------------------------


def _normal(state: State) -> State:
    """The same situation with the slowest rank at step 0, and turned so that it comes first.

    Of steps long ago only the order matters: they are counted down from OLD without gaps. Copies of
    a step that can never be complete on all ranks again are as good as torn ones where they are
    overwritten first anyway.
    """
    zero = min(machine.updated for machine in state.machines)
    machines = _without_useless(state, zero)
    steps = {state.backup, state.safe}
    for machine in machines:
        steps.update(machine.slots, machine.kept, (machine.backup_pin, machine.safe_pin))
    old = sorted((step for step in steps if NEVER < step < zero + OLD), reverse=True)
    names = {step: step - zero for step in steps if step > NEVER}
    names |= {step: OLD - 1 - place for place, step in enumerate(old)} | {NEVER: NEVER}
    shifted = tuple(_shifted(machine, zero, names) for machine in machines)
    turns = (shifted[number:] + shifted[:number] for number in range(len(shifted)))
    return State(
        machines=min(turns),
        backup=names[state.backup],
        safe=names[state.safe],
        covered=state.covered,
        mishaps=state.mishaps,
    )


def _without_useless(state: State, zero: int) -> tuple[Machine, ...]:
    count = len(state.machines)
    useful = {state.safe, state.backup} | set.intersection(
        *(
            {*machine.slots, *state.machines[(number + 1) % count].kept}
            for number, machine in enumerate(state.machines)
        )
    )
    useful.update(range(zero - 1, zero + 9))
    return tuple(
        machine._replace(
            slots=_forget(machine.slots, useful, (machine.backup_pin, machine.safe_pin)),
            kept=_forget(machine.kept, useful, (state.safe,)),
        )
        for machine in state.machines
    )


def _forget(steps: tuple[int, ...], useful: set[int], pins: tuple[int, ...]) -> tuple[int, ...]:
    oldest = min((step for step in steps if step in useful and step not in pins), default=FAR)
    return tuple(
        step if step in useful or step in pins or step > oldest else NEVER for step in steps
    )


def _shifted(machine: Machine, zero: int, names: dict[int, int]) -> Machine:
    held = machine.slots
    return Machine(
        updated=machine.updated - zero,
        saving=machine.saving,
        slots=tuple(sorted((names[step] for step in held), reverse=True)),
        backup_pin=_pin(machine, machine.backup_pin, names),
        safe_pin=_pin(machine, machine.safe_pin, names),
        stage=machine.stage,
        kept=tuple(sorted((names[step] for step in machine.kept), reverse=True)),
    )


def _pin(machine: Machine, pin: int, names: dict[int, int]) -> int:
    if pin < machine.updated and pin not in machine.slots:
        return NEVER  # that copy is gone and will not be made again
    return names[pin]


def _story(came_from: dict[State, tuple[State, str] | None], state: State) -> list[str]:
    lines = [f"then: {state}"]
    before = came_from[state]
    while before is not None:
        state, name = before
        lines.append(name)
        before = came_from[state]
    return lines[::-1]
