"""Which mechanisms that need parallel groups are on, and why the others are off: for `status`.

Asked by controller/views.py. A mechanism that cannot do its work for want of a layout is off, and
says what that may cost and what would turn it on.
"""

from __future__ import annotations

from everstep.core.keeping import placement_of
from everstep.core.layouts import known_layout
from everstep.core.state import State
from everstep.model import Value

ADVICE = "give --layout, or attach(mesh=...) in the script"


class Mechanism(Value, frozen=True, kw_only=True):
    """One line for people."""

    name: str
    on: bool
    why: str


def mechanisms(state: State) -> tuple[Mechanism, ...]:
    return (_backup_placement(state),)


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
