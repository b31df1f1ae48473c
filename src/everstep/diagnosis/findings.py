"""What the analysers find, before anybody judges it.

logs.py, stacks.py, flight.py, ras.py, kernel.py and series.py make findings; judge.py weighs them.
"""

from __future__ import annotations

from everstep.diagnosis.words import Category, FirstAction, Grade, Role, RootClass
from everstep.model import Rank, Seconds, Value


class Site(Value, frozen=True, kw_only=True):
    """What is known of the job beside its texts; everything may be missing."""

    world_size: int | None = None
    ranks_per_machine: int | None = None
    hosts: tuple[str, ...] = ()
    """In the order of ranks."""

    def host_of(self, rank: Rank) -> str | None:
        """The machine that ran a rank, if the site says so."""
        if self.ranks_per_machine is None or not 0 <= rank < self.size:
            return None
        at = rank // self.ranks_per_machine
        return self.hosts[at] if at < len(self.hosts) else None

    @property
    def size(self) -> int:
        """World size, 0 if unknown."""
        return self.world_size or 0


class Place(Value, frozen=True, kw_only=True):
    """Where a line stands."""

    file: str
    line: int
    """Counted from 1."""
    text: str
    """The line without colours, cut to a readable length."""


class Speaker(Value, frozen=True, kw_only=True):
    """Who printed a line, as far as its labels say."""

    rank: Rank | None = None
    """Global. A local rank alone, a loader's worker or a launcher's task is none."""
    local_rank: int | None = None
    machine: str | None = None
    pid: int | None = None


NOBODY = Speaker()


class Finding(Value, frozen=True, kw_only=True):
    """One fact that speaks about a cause."""

    rule: str
    """Id of the rule, or of what an analyser found: "stacks.outlier"."""
    role: Role
    category: Category
    root: RootClass
    grade: Grade
    action: FirstAction
    why: str
    """One sentence, with its numbers."""
    place: Place | None = None
    speaker: Speaker = NOBODY
    accused_ranks: tuple[Rank, ...] = ()
    accused_machines: tuple[str, ...] = ()
    at: Seconds | None = None
    """The line's own time: seconds since the epoch, or of an unnamed day if it has no date."""
    attempt: int = 0
    """Which run of the job, counted from 0 in the order of time."""
    repeated: int = 1
    """How often it stands there, with what a launcher's "repeated 30x" says."""
    last_line: int = 0
    """Where it stands for the last time, in the text of `place`; 0: only there."""
    undecided: str = ""
    """What would change the verdict: a test, a fact that is missing. Empty: nothing would."""
    traits: tuple[str, ...] = ()
    """Circumstances that rules ask for, as tracebacks.Trace has them."""
    step: int | None = None
    """The last step that the same text had reported before."""
    named: tuple[str, ...] = ()
    """Ranks ("rank 3"), machines and addresses that the line itself names."""


class Exit(Value, frozen=True, kw_only=True):
    """How one process ended, as a launcher tells it."""

    code: int
    """Python's: a signal is negative."""
    speaker: Speaker
    place: Place
    at: Seconds | None = None
    attempt: int = 0

    @property
    def bad(self) -> bool:
        """Whether it was neither well nor asked for."""
        return self.code not in {0, -15}
