"""What is noted of looks at the stacks of all ranks: what was asked, what came, what it means.

observe.py has facts noted here and commit.py decisions; looking.py decides by what is here.

There is one look at a time. It ends with JudgeStacks, or is dropped when its ranks are stopped.
"""

from __future__ import annotations

from collections.abc import Iterable

from everstep.actions import (
    CollectStacks,
    JudgeStacks,
    SendStacks,
)
from everstep.core import stalls, verdicts
from everstep.core.ettr import Owner
from everstep.core.look_state import Look, Watching
from everstep.core.state import Failure, FailureKind, State
from everstep.looks import (
    Cluster,
    Fingerprint,
    LookResult,
    Posture,
    Purpose,
    Ranges,
    joined,
)
from everstep.model import NodeRank, Seconds
from everstep.sightings import StacksRequested, StacksSent, StacksTaken

LOOKS_MAX = 10
"""Of looks that are over, so many are kept for people,"""
WHOLE_MAX = 3
"""of so many all that they showed."""
COMPARED_MAX = 2
"""Of the looks at one stall, so many: each is compared with the one before."""


def stacks_requested(state: State, event: StacksRequested, now: Seconds) -> None:
    """A person wants to see them."""
    del now
    state.stacks_wanted_by = event.by


def stacks_taken(state: State, event: StacksTaken, now: Seconds) -> None:
    """What machines answered. What comes too late for its look is of no use."""
    look = under_way(state)
    mine = look is not None and (look.number, look.generation) == (event.look, event.generation)
    owed = set(look.awaiting.values()) if look is not None and not mine else set()
    for action in set(event.actions) - owed:
        state.outstanding.pop(action, None)
    if look is None or not mine:
        return
    for machine in event.machines:
        state.outstanding.pop(look.awaiting.pop(machine, ""), None)
    answered = set(event.actions)
    look.awaiting = {m: order for m, order in look.awaiting.items() if order not in answered}
    look.clusters = _merged([*look.clusters, *event.clusters])
    look.stood += event.stood
    look.peers += event.peers
    look.unreached += event.unreached
    look.remarks = list(dict.fromkeys([*look.remarks, *event.remarks]))
    if not look.awaiting:
        look.taken_at = now
    _recall_texts(state, look)


def _merged(clusters: Iterable[Cluster]) -> list[Cluster]:
    """Those that show the same as one, in the order in which they were told first."""
    ranks: dict[Posture, list[tuple[int, int]]] = {}
    for cluster in clusters:
        ranks.setdefault(cluster.posture, []).extend(cluster.ranks)
    return [Cluster(posture=posture, ranks=joined(pairs)) for posture, pairs in ranks.items()]


def _recall_texts(state: State, look: Look) -> None:
    """Texts that an earlier look brought need not travel again."""
    former = state.watching.looks[:-1] if state.watching is not None else []
    for fingerprint in shown_in(look):
        for other in (*reversed(former), *reversed(state.looks)):
            if fingerprint not in look.stacks and fingerprint in other.stacks:
                look.stacks[fingerprint] = other.stacks[fingerprint]


def stacks_sent(state: State, event: StacksSent, now: Seconds) -> None:
    """Texts came. What a machine has no more, nobody is asked for again."""
    del now
    state.outstanding.pop(event.action, None)
    look = under_way(state)
    if look is None or look.number != event.look:
        return
    look.stacks |= {stack.fingerprint: stack for stack in event.stacks}
    for fingerprint, action in list(look.fetching.items()):
        if action == event.action:
            del look.fetching[fingerprint]
            if fingerprint not in look.stacks:
                look.untold.append(fingerprint)


def collect_stacks(state: State, action: CollectStacks, now: Seconds) -> None:
    """A machine was asked; the first one begins the look."""
    state.outstanding[action.id] = action
    if action.look > state.looked:
        _begin_look(state, action, now)
    look = under_way(state)
    if look is not None and look.number == action.look:
        look.awaiting[action.machine] = action.id
        look.asked.append(action.machine)


def _begin_look(state: State, action: CollectStacks, now: Seconds) -> None:
    state.looked, watching = action.look, state.watching
    urgent = action.purpose is Purpose.HANG
    if watching is None or (urgent and watching.purpose is not Purpose.HANG):
        stop_watching(state)
        watching = state.watching = _new_watching(state, action.purpose, now)
    if action.purpose is watching.purpose:
        watching.next_at = None
    rounds = [look.round for look in watching.looks if look.purpose is action.purpose]
    look = Look(
        number=action.look,
        purpose=action.purpose,
        why=action.why,
        generation=action.generation,
        round=max(rounds, default=0) + 1,
        asked_at=now,
        silent=[m.machine for m in state.members() if not m.connected],
    )
    watching.looks.append(look)


def _new_watching(state: State, purpose: Purpose, now: Seconds) -> Watching:
    found = stalls.stall(state) if purpose is Purpose.HANG else None
    since = found.since if found is not None else now
    if purpose is Purpose.SLOW and state.pace.told_at is not None:
        since = state.pace.told_at
    return Watching(
        purpose=purpose,
        incident=state.incident.incident if state.incident is not None else "",
        since=since,
        noticed_at=now,
        step=state.finished_by_all,
        phase=state.patience.phase,
        quiet=found is not None and found.quiet,
    )


def send_stacks(state: State, action: SendStacks, now: Seconds) -> None:
    """A machine was asked for texts."""
    state.outstanding[action.id] = action
    look = under_way(state)
    if look is not None and look.number == action.look:
        look.fetching |= dict.fromkeys(action.stacks, action.id)
        look.fetched_at = now


def judge_stacks(state: State, action: JudgeStacks, now: Seconds) -> None:
    """A look is judged: it is over, and maybe what it was taken for."""
    watching = state.watching
    look = _numbered(watching, action.look)
    if watching is None or look is None:
        return
    _note_verdict(state, look, action, now)
    _forget_orders(state)
    if look.purpose is Purpose.ASKED:
        state.stacks_wanted_by = ""
        if watching.purpose is Purpose.ASKED:
            stop_watching(state)
    elif action.result in verdicts.GOES_ON:
        watching.next_at = verdicts.next_at(state, watching, look, now)
        _count_flags(watching, look, action)
        _keep_little(watching.looks, COMPARED_MAX)
        del watching.looks[: -max(LOOKS_MAX, state.job.policy.looks_max + 1)]
    else:
        _end(state, watching, look, now)


def _note_verdict(state: State, look: Look, action: JudgeStacks, now: Seconds) -> None:
    look.result, look.verdict = action.result, action.why
    look.judged_at, look.event = now, state.seq
    if action.result is not LookResult.WENT_ON:
        look.silent += list(look.awaiting)
    look.taken_at = now if look.taken_at is None else look.taken_at
    look.machines, look.ranks = list(action.machines), list(action.ranks)
    look.group = action.group
    on = {NodeRank(rank // state.job.nproc_per_node) for rank in action.ranks}
    outliers = [state.positions[n] for n in sorted(on) if n in state.positions]
    look.outliers = [name for name in outliers if name in look.machines]


def _count_flags(watching: Watching, look: Look, action: JudgeStacks) -> None:
    if look.purpose is Purpose.SLOW:
        for group in filter(None, action.group.split(verdicts.BETWEEN)):
            watching.flags[group] = watching.flags.get(group, 0) + 1


def _end(state: State, watching: Watching, look: Look, now: Seconds) -> None:
    """What follows for the job from the last look at this matter."""
    result = look.result
    if watching.purpose is Purpose.SLOW:
        state.pace.looked_at, state.straggler = now, None
    elif result is LookResult.WENT_ON:
        stalls.went_on(state, watching)
    stop_watching(state)
    if result is LookResult.WENT_ON:
        return
    if watching.purpose is Purpose.HANG or result is LookResult.MACHINES:
        state.judged = look
        _give_up_generation(state, watching, look, now)


def _give_up_generation(state: State, watching: Watching, look: Look, now: Seconds) -> None:
    """Its ranks still run, maybe; but what they do is worth nothing, or costs too much.

    Of a hang, time was lost from the moment at which the next step should have been finished.
    """
    if watching.purpose is Purpose.HANG:
        account, incident = state.account, watching.incident
        due_at = min(watching.since + (state.step_s or 0.0), watching.noticed_at)
        account.switch(Owner.DETECTING, due_at, incident)
        account.switch(Owner.LOCATING, watching.noticed_at, incident)
    machine = look.machines[0] if look.machines else None
    state.failures.append(
        Failure(
            event=state.seq,
            at=now,
            text=look.verdict,
            kind=FailureKind.HANG,
            machine=machine,
        )
    )


def stop_watching(state: State) -> None:
    """The matter is over, or its ranks are stopped: whatever was asked for is of no use."""
    watching = state.watching
    _forget_orders(state)
    if watching is None:
        return
    look = under_way(state)
    if look is not None:
        look.verdict = "its ranks were stopped meanwhile"
    state.looks = [*state.looks, *watching.looks][-LOOKS_MAX:]
    _keep_little(state.looks, WHOLE_MAX)
    state.watching = None


def _forget_orders(state: State) -> None:
    look = under_way(state) or (state.watching.looks[-1] if state.watching is not None else None)
    if look is None:
        return
    for action in (*look.awaiting.values(), *look.fetching.values()):
        state.outstanding.pop(action, None)
    look.awaiting, look.fetching = {}, {}


def _keep_little(looks: list[Look], whole: int) -> None:
    """Of all but the newest, what was concluded."""
    for look in looks[:-whole]:
        look.clusters, look.stood, look.peers = [], [], []
        look.unreached, look.stacks, look.untold = [], {}, []
        look.asked = []


def new_term(state: State, now: Seconds) -> None:
    """Every patience starts anew; agents are asked again, and answer again."""
    look = under_way(state)
    if look is not None:
        look.asked_at = look.fetched_at = now
    elif state.watching is not None and state.watching.next_at is not None:
        wait_s = state.job.policy.look_again_s
        state.watching.next_at = max(state.watching.next_at, now + wait_s)


def under_way(state: State) -> Look | None:
    """The look that is not judged yet."""
    looks = state.watching.looks if state.watching is not None else []
    return looks[-1] if looks and looks[-1].result is None else None


def _numbered(watching: Watching | None, number: int) -> Look | None:
    looks = watching.looks if watching is not None else []
    return next((look for look in reversed(looks) if look.number == number), None)


def shown_in(current: Look) -> dict[Fingerprint, Ranges]:
    """All fingerprints, each with the ranks of a cluster that shows it."""
    found: dict[Fingerprint, Ranges] = {}
    for cluster in current.clusters:
        posture = cluster.posture
        for shown in (posture.rank, *(child.shown for child in posture.children)):
            found.setdefault(shown.stack, cluster.ranks)
    return found
