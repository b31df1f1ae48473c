"""Facts about ranks that run: what their processes show, whether they do anything, who is slow.

A part of events.py, which says who tells them and who folds them.
"""

from __future__ import annotations

from everstep.diagnosis.standing import Peer
from everstep.looks import Cluster, RankLook, Stack, Stood
from everstep.model import Fact, Generation, MachineId, Rank, Seconds, Step, Value

# --- stacks --------------------------------------------------------------------------------------


class MachineStacks(Fact, frozen=True, kw_only=True):
    """What the processes of a machine's ranks show. Answer to CollectStacks; folded by intake."""

    machine: MachineId
    action: str
    generation: Generation
    look: int
    ranks: tuple[RankLook, ...] = ()
    stood: tuple[Stood, ...] = ()
    peers: tuple[Peer, ...] = ()
    """Sends and receives that are pending."""
    unreached: tuple[MachineId, ...] = ()
    """Neighbours that could not be reached from here."""
    remark: str = ""
    """Why it shows less than it could: "py-spy may not look into processes of others"."""
    took_s: Seconds = 0.0


class StacksTaken(Fact, frozen=True, kw_only=True):
    """What intake.py makes of what machines answered since it last told of this look."""

    generation: Generation
    look: int
    actions: tuple[str, ...]
    """The orders that are answered."""
    machines: tuple[MachineId, ...]
    """By whom, in the same order."""
    clusters: tuple[Cluster, ...] = ()
    stood: tuple[Stood, ...] = ()
    peers: tuple[Peer, ...] = ()
    unreached: tuple[tuple[MachineId, MachineId], ...] = ()
    """(who tried, whom it could not reach)."""
    remarks: tuple[str, ...] = ()


class StacksSent(Fact, frozen=True, kw_only=True):
    """The text of stacks. Answer to SendStacks."""

    machine: MachineId
    action: str
    look: int
    stacks: tuple[Stack, ...]
    """Those that it still has."""


class StacksRequested(Fact, frozen=True, kw_only=True):
    """A person wants to see the stacks of all ranks now (`everstep stacks`)."""

    by: str


# --- activity ------------------------------------------------------------------------------------


class MachineActivity(Fact, frozen=True, kw_only=True):
    """Whether the ranks of a machine do anything, whatever they report of themselves."""

    machine: MachineId
    generation: Generation
    quiet_s: Seconds
    """For how long no rank here printed anything, and none used its processor or none had traffic.
    """
    no_traffic_s: Seconds | None = None
    """For how long its network carried next to nothing. None: it cannot be told."""
    idle_s: Seconds | None = None
    """For how long its ranks used next to no processor time."""


class ActivitySeen(Fact, frozen=True, kw_only=True):
    """What intake.py makes of that: for how long the whole job has been quiet. Told when it has
    become so, when it lasts, and once when it is over.
    """

    generation: Generation
    quiet_s: Seconds
    no_traffic_s: Seconds | None = None
    idle_s: Seconds | None = None


# --- speed ---------------------------------------------------------------------------------------


class Computes(Value, frozen=True, kw_only=True, array_like=True):
    """How long a rank computes in a step: the median of recent ones, without waits for others."""

    rank: Rank
    seconds: Seconds


class StragglerSeen(Fact, frozen=True, kw_only=True):
    """What intake.py makes of that: one rank holds up all others, or none does any more."""

    generation: Generation
    rank: Rank | None
    """None: it is over."""
    machine: MachineId | None = None
    compute_s: Seconds = 0.0
    usual_s: Seconds = 0.0
    """Of those that do the same work."""
    costs: float = 0.0
    """The share of each step that all others wait for it."""
    why: str = ""


# --- numbers -------------------------------------------------------------------------------------


class BadNumber(Value, frozen=True, kw_only=True):
    """A rank, and the first step at which its loss was not finite or not the same as before."""

    rank: Rank
    step: Step


class LossesCompared(Fact, frozen=True, kw_only=True):
    """The ranks of a machine did steps again, and their losses were compared bit for bit.

    Said once, after the last step that StartRanks names in `compare_through`.
    """

    machine: MachineId
    generation: Generation
    first: Step
    last: Step
    compared: int
    """Losses of ranks that could be compared: of so many nothing was known before."""
    differs: BadNumber | None = None
    """The first that has other bits."""
    before: float | None = None
    after: float | None = None
    """The two losses, if one differs."""


class Numbers(Value, frozen=True, kw_only=True):
    """What one rank reported about one step, by run.report or in a line of its log."""

    step: Step
    loss: float | None = None
    grad_norm: float | None = None
    speed: float | None = None
    """What is done per second, in whatever unit; None if unknown or too short to be judged."""
    loss_scale: float | None = None
    skipped: int = 0
    lr: float | None = None


class MachineNumbers(Fact, frozen=True, kw_only=True):
    """Numbers of one rank of a machine since it last told of them, and the first bad one of all."""

    machine: MachineId
    generation: Generation
    rank: Rank | None = None
    logged: bool = False
    """Read in its log: the script is not attached."""
    numbers: tuple[Numbers, ...] = ()
    bad: BadNumber | None = None
    """The first loss of all ranks that was not finite."""
    differs: BadNumber | None = None
    """The first loss of all ranks that came out otherwise than when its step was done before."""
