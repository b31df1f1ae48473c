"""The interface of every check: where samples come from, and what a judge may look at.

Written for whoever adds a check: subclass Source if nobody reads that signal yet, subclass Check to
judge it, and name both in the list of their package (gpu, net, host, kernel).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result
from everstep.model import Seconds, Value

FOREVER: Seconds = float("inf")


class Here(Value, frozen=True, kw_only=True):
    """The machine that checks look at, and what the job needs of it. Travels to child processes."""

    root: str = "/"
    """Prefix of /proc, /sys and /dev; another one in tests."""
    boot_id: str = ""
    interfaces: tuple[str, ...] = ()
    """Network interfaces that the job is known to use; empty: those with a default route count."""
    hcas: tuple[str, ...] = ()
    """InfiniBand and RoCE devices that the job is known to use, for example "mlx5_0"; empty: all.
    """
    gpus: tuple[str, ...] = ()
    """PCI addresses of the NVIDIA GPUs that the job is known to use, for example "0000:3b:00.0";
    empty: all that this process may see."""
    paths: tuple[str, ...] = ()
    """Directories that the job needs: working directory, checkpoints, logs."""
    addresses: tuple[str, ...] = ()
    """Addresses outside this machine that it must reach, as HOST or HOST:PORT."""
    pids: tuple[int, ...] = ()
    """The job's ranks here, as far as they run."""
    node_socket: str = ""
    """Where the node service listens, which sees what only root may; empty: it is not asked."""

    def path(self, absolute: str) -> Path:
        """The file that is at this absolute path on the machine."""
        return Path(self.root) / absolute.lstrip("/")


class Limits(Value, frozen=True, kw_only=True):
    """Base of a check's thresholds, which a site may set. Every check has these two."""

    off: bool = False
    """Do not run it here."""
    at_most: Verdict = Verdict.EVICT
    """Weaken what it says to this: `warn` lets a new check be watched before it may evict."""


S = TypeVar("S", bound=Value)
L = TypeVar("L", bound=Limits)


class Stamped(Value, Generic[S], frozen=True, kw_only=True):
    """A sample and its time, on a clock that goes on while the machine sleeps (CLOCK_BOOTTIME)."""

    at: Seconds
    sample: S


class History(Value, Generic[S], frozen=True, kw_only=True):
    """What a judge may look at. It outlives the agent, but no reboot."""

    first: Stamped[S]
    """The baseline: the first sample since this machine came to the job."""
    past: tuple[Stamped[S], ...] = ()
    """Samples before the newest, oldest first, at most `Check.keep`."""
    now: Stamped[S]

    def since(self, seconds: Seconds) -> tuple[Stamped[S], ...]:
        """Samples of the last `seconds`, the newest included, oldest first."""
        every = (*self.past, self.now)
        return tuple(each for each in every if each.at >= self.now.at - seconds)


class NotReadable(Exception):
    """A source cannot read its signal: the result is "could not run", with this reason.

    OSError and ValueError from `sample` count the same.
    """


class Source(ABC, Generic[S]):
    """Takes samples of one kind. An instance may keep handles between two samples."""

    name: ClassVar[str]
    """For example "nvml"."""
    kind: ClassVar[type[Value]]
    """The type of its samples."""
    every_s: ClassVar[Seconds]
    """Between two samples. 0: again at once; then `sample` waits for news itself, in a child."""
    blocks: ClassVar[bool] = False
    """Whether `sample` may hang: it is then called in a child process of its own."""
    within_s: ClassVar[Seconds] = 5.0
    """In a child: time for one sample before it counts as unanswered."""

    @abstractmethod
    def absent(self, here: Here) -> str:
        """Why this signal does not exist on this machine, as a clause; empty if it does.

        Absent is neither a fault nor a failure to run: a host without InfiniBand is healthy.
        Called in the agent's loop: must not block.
        """

    @abstractmethod
    def sample(self, here: Here) -> S:
        """Look once. NotReadable, OSError or ValueError: could not run, never a fault."""

    def fileno(self, here: Here) -> int | None:
        """A descriptor that is readable when there is something new; None: sampled by time.

        With one, `every_s` is only the longest time between two looks.
        """
        del here
        return None

    def unanswered(self, for_s: Seconds, times: int) -> Result | None:
        """What it means that the child has not answered for so long, so often in a row.

        None: nothing yet. A driver that does not answer is the strongest sign there is. Pure.
        """
        del for_s, times
        return None


class Check(ABC, Generic[S, L]):
    """Judges samples of one source. Pure: no clock, no file, no memory but `history`."""

    name: ClassVar[str]
    """Topic, dot, signal: "gpu.lost"."""
    source: ClassVar[str]
    """Name of the source."""
    about: ClassVar[str]
    """One line for `everstep check --list`: what it finds, and from where."""
    limits_type: ClassVar[type[Limits]] = Limits
    keep: ClassVar[int] = 1
    """Samples before the newest that the judge wants to see."""
    again_s: ClassVar[Seconds] = FOREVER
    """A fail that goes on is told again after this; for results that count twice."""
    clear_after_s: ClassVar[Seconds] = 60.0
    """A fail is over when it has passed for so long: what flaps is one alert, not many."""

    def __init__(self, limits: L) -> None:
        self.limits = limits

    @abstractmethod
    def judge(self, here: Here, history: History[S]) -> Iterable[Result]:
        """One result per item that was looked at, in a stable order."""

    # --- for judges: results of this check ---

    def passed(self, why: str, item: str = "", **values: float) -> Result:
        return Result(
            check=self.name, item=item, verdict=Verdict.INFO, why=why, values=dict(values)
        )

    def could_not_run(self, why: str, item: str = "", do: str = "") -> Result:
        return Result(check=self.name, item=item, verdict=Verdict.ERROR, why=why, do=do)

    def found(self, verdict: Verdict, category: Category, why: str, do: str, **more: Any) -> Result:
        """A fail; `more` are other fields of Result."""
        return Result(check=self.name, verdict=verdict, category=category, why=why, do=do, **more)


AnyCheck = Check[Any, Any]
AnySource = Source[Any]
MakeCheck = type[AnyCheck]
MakeSource = type[AnySource]
