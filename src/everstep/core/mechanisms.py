"""Which mechanisms are on that need parallel groups or rights, and why the others are off.

Asked by controller/views.py, for `status`. A mechanism that cannot do its work for want of a layout
or of a permission is off, and says what that may cost and what would turn it on.
"""

from __future__ import annotations

from everstep.core.groups import groups_of
from everstep.core.keeping import placement_of
from everstep.core.layouts import known_layout
from everstep.core.look_state import Look
from everstep.core.state import State
from everstep.model import Value

ADVICE = "give --layout, or attach(mesh=...) in the script"


class Mechanism(Value, frozen=True, kw_only=True):
    """One line for people."""

    name: str
    on: bool
    why: str


def mechanisms(state: State) -> tuple[Mechanism, ...]:
    return (_backup_placement(state), _over_eviction(state), _stack_traces(state))


def _backup_placement(state: State) -> Mechanism:
    """Backups may lie on another machine all the same: what is off then is what groups are for."""
    on, why = _placed(state)
    return Mechanism(name="backup placement", on=on, why=why)


def _placed(state: State) -> tuple[bool, str]:
    job = state.job
    if not job.checkpoint.backup:
        return False, "--no-backup: the loss of a machine costs the steps since the last disk copy"
    if job.nnodes == 1:
        return False, "the job has one machine: there is no other that could keep its shards"
    placement = placement_of(state)
    if known_layout(state).layout is None:
        cost = "losing a whole parallel group (a pipeline stage, say) may lose both memory copies"
        return False, f"{placement.why}, no layout is known: {cost}; {ADVICE}"
    if placement.uncovered:
        kinds = " or ".join(placement.uncovered)
        cost = f"losing all machines of one group ({kinds}) loses both memory copies"
        return False, f"{placement.why}: {cost}, which this layout does not let avoid"
    return True, f"{placement.why}: no parallel group covers a shard and its backup"


def _over_eviction(state: State) -> Mechanism:
    on, why = _group_may_go(state)
    return Mechanism(name="over-eviction", on=on, why=why)


def _group_may_go(state: State) -> tuple[bool, str]:
    """Whether the machines of a whole parallel group can be replaced for a hang."""
    job, layout = state.job, known_layout(state).layout
    alone = "in a hang only machines that are outliers themselves can go"
    if not job.policy.looks:
        return False, "--no-hang-detection: nothing is looked into by itself"
    if job.nnodes == 1:
        return False, "the job has one machine"
    if not job.standbys and not job.auto_standbys:
        return False, "nothing can take the place of machines: give --standbys"
    if layout is None:
        return False, f"no layout is known: {alone}; {ADVICE}"
    # All groups of a kind are alike, so the first one tells.
    firsts = ((each.name, groups_of(each.factors, layout.world_size)) for each in layout.shapes)
    kinds = [
        name or "unnamed"
        for name, groups in firsts
        if len(layout.machines_of(next(groups))) < layout.machines
    ]
    if not kinds:
        return False, f"every parallel group of this layout is on all machines: {alone}"
    return True, (
        f"in a hang all machines of one group ({', '.join(kinds)}) may go, as many as there are"
        " standbys"
    )


def _stack_traces(state: State) -> Mechanism:
    """Whether agents see the stacks of ranks, as far as looks have shown."""
    on, why = _seen_stacks(state)
    return Mechanism(name="stack traces", on=on, why=why)


def _seen_stacks(state: State) -> tuple[bool, str]:
    if not state.job.policy.looks:
        when = "only when `everstep stacks` asks"
    else:
        when = "taken when nothing advances"
    look = _newest_taken(state)
    if look is None:
        return True, f"{when}; no look was taken yet"
    seen = any(cluster.posture.rank.stack for cluster in look.clusters)
    why = "; ".join(dict.fromkeys(look.remarks))
    if not seen:
        return False, why or f"look {look.number} showed no stack"
    return True, why or when


def _newest_taken(state: State) -> Look | None:
    watched = state.watching.looks if state.watching is not None else []
    taken = [look for look in (*state.looks, *watched) if look.clusters]
    return max(taken, key=lambda look: look.number, default=None)
