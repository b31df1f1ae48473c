"""What must hold of the controller's state between any two events.

Called by the property tests and the simulator; the live controller may call it too. It judges the
state alone; invariants.py judges what was decided.
"""

from __future__ import annotations

from itertools import pairwise

from everstep.actions import CollectStacks, SendStacks
from everstep.core.alerts import ALERTS_MAX, STRIKES_MAX, usable
from everstep.core.ettr import spent
from everstep.core.history import Condition
from everstep.core.looked import LOOKS_MAX, WHOLE_MAX, under_way
from everstep.core.must import must
from everstep.core.state import Phase, State
from everstep.model import Seconds

ACCOUNT_TOLERANCE_S: Seconds = 1e-6
"""Sums of some thousand floating point numbers may differ by this much."""


def check_state(state: State, now: Seconds) -> None:
    """Judge the state between two events. Raises InvariantBroken."""
    if state.spec is None:
        return
    _check_positions(state)
    _check_waiting(state)
    _check_account(state, now)
    _check_incidents(state)
    _check_alerts(state)
    _check_versions(state)
    _check_looks(state)


def _check_looks(state: State) -> None:
    """Looks are of ranks that run, who is waited for was asked, and what is kept is bounded."""
    must(len(state.looks) <= LOOKS_MAX, f"{len(state.looks)} looks are kept")
    whole = sum(bool(look.stacks or look.clusters) for look in state.looks)
    must(whole <= WHOLE_MAX, f"of {whole} looks all is kept")
    look, asked = under_way(state), {}
    if state.watching is not None:
        must(state.phase is Phase.RUNNING, f"ranks are looked at while it is {state.phase}")
    if look is not None:
        asked = dict.fromkeys([*look.awaiting.values(), *look.fetching.values()])
    for action in state.outstanding.values():
        owed = isinstance(action, CollectStacks | SendStacks)
        must(not owed or action.id in asked, f"{action.id} is waited for by no look")
    for key in asked:
        must(key in state.outstanding, f"{key} is of a look, but was answered")


def _check_versions(state: State) -> None:
    """What runs is the one version that runs, and people's names for them are unique."""
    runs = [v for v, book in state.versions.items() if book.condition is Condition.RUNNING]
    must(runs == ([state.version] if state.version else []), f"versions {runs} run at once")
    numbers = sorted(book.number for book in state.versions.values())
    must(numbers == list(range(1, len(numbers) + 1)), f"versions have the numbers {numbers}")
    for version, book in state.versions.items():
        must(book.code.version == version, f"{version} has become {book.code.version}")
        still = [run for run in book.runs if run.until is None]
        must(len(still) == (version == state.version), f"v{book.number} runs {len(still)} times")


def _check_alerts(state: State) -> None:
    """However much is said, what is kept is bounded; and probes are of those who are silent."""
    for name in state.alerted:
        machine = state.machines[name]
        must(len(machine.alerts) <= ALERTS_MAX, f"{name} has {len(machine.alerts)} alerts")
        must(usable(machine), f"{name} is gone, and what is said of it still counts")
        must(len(machine.strikes) <= STRIKES_MAX, f"{name} has {len(machine.strikes)} strikes")
    for name in state.probes:
        must(not state.machines[name].connected, f"{name} is heard of, and still probed")


def _check_positions(state: State) -> None:
    for node_rank, name in state.positions.items():
        machine = state.machines[name]
        must(machine.node_rank == node_rank, f"{name} disagrees about position {node_rank}")
        must(not machine.evicted, f"{name} has position {node_rank} and was evicted")
        must(0 <= node_rank < state.job.nnodes, f"position {node_rank} does not exist")
    placed = sum(machine.node_rank is not None for machine in state.machines.values())
    must(placed == len(state.positions), f"{placed} machines have {len(state.positions)} positions")


def _check_waiting(state: State) -> None:
    """Whoever is waited for was asked something, and is not one that cannot answer any more."""
    for name, action in state.awaiting.items():
        machine = state.machines[name]
        if state.phase is not Phase.ENDING and state.phase is not Phase.ENDED:
            must(not machine.evicted, f"{name} was evicted and is waited for")
        must(action in state.outstanding, f"{name} is waited for, but {action} was answered")
    if state.phase is Phase.STARTING:
        must(state.awaiting or state.failures, "the ranks' start is waited for by nobody")


def _check_account(state: State, now: Seconds) -> None:
    """Every second since the submission has exactly one owner."""
    segments = state.account.segments
    must(segments, "no second of the job has an owner")
    # Only the last ones can have changed; all are checked when the job is over.
    recent = segments if state.phase is Phase.ENDED else segments[-3:]
    for before, after in pairwise(recent):
        must(before.since <= after.since, f"time of {after.owner} begins before {before.owner}'s")
    must(segments[-1].since <= now, f"{segments[-1].owner} owns time from the future")
    if state.phase is Phase.ENDED:
        end = state.account.ended_at if state.account.ended_at is not None else now
        wall = end - segments[0].since
        total = sum(spent(state.account, now).values())
        must(
            abs(total - wall) <= ACCOUNT_TOLERANCE_S,
            f"the job took {wall} s and its owners own {total} s",
        )


def _check_incidents(state: State) -> None:
    still_open = [one.incident for one in state.incidents if one.closed_at is None]
    must(len(still_open) <= 1, f"incidents {', '.join(still_open)} are open at once")
    if state.phase is Phase.ENDED:
        must(not still_open, f"{', '.join(still_open)} is open although the job is over")
