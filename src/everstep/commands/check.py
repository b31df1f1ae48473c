"""`everstep check`: looks at this machine once, with all checks, and says what it found.

For people, for Nagios and its like, and for Slurm's prolog and HealthCheckProgram. Needs no job.
Counters are compared with the call before, whose samples lie in a small file; the first call looks
twice, so that rates exist. Sources that may hang are asked in children, all at the same time.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from everstep.agent.checks import node
from everstep.agent.checks.check import AnyCheck, Here
from everstep.agent.checks.kernel.kmsg import boot_id
from everstep.agent.checks.looking import Looking
from everstep.agent.checks.memory import ChecksMemory, KeptChild
from everstep.agent.checks.monitor import Monitor, Remembered
from everstep.agent.checks.node import DEFAULT_SOCKET
from everstep.agent.checks.registry import SOURCES, make_source
from everstep.agent.tracing.spy import Spy, WhyNot
from everstep.commands import check_report
from everstep.commands.check_choice import chosen, listed, read_limits
from everstep.commands.check_report import Absent, Report, Unseen
from everstep.commands.drain import drain
from everstep.commands.plugin import TIME_LIMIT_S, Status
from everstep.commands.screen import console
from everstep.commands.show import print_json
from everstep.diagnosis.words import Verdict
from everstep.health import Result
from everstep.model import MachineId, Seconds
from everstep.processes import identify
from everstep.trainer import traced

__all__ = ["DEFAULT_SOCKET", "TIME_LIMIT_S", "Asked", "check", "serve", "show_list"]

INTERRUPTED = 130
_STATE_FILE = "samples.msgpack"
_RIGHTS = ("permission denied", "operation not permitted", "only root")
_NO_CHILD = "its child process"
"""What cannot be started here says nothing of the rights to look."""
_COULD_NOT = "Find out why: until then nobody watches this here."
_MAY_NOT = "Run it as root."
_STACKS = {
    WhyNot.MISSING: "Install everstep[agent]: else a hang shows little of what its ranks do.",
    WhyNot.DENIED: "Until it may (as root, or with kernel.yama.ptrace_scope=1 or 0) ranks write"
    " them themselves, and their children's are not seen.",
}
"""Why stacks of ranks cannot be seen, and what to do."""
STACKS_WITHIN_S: Seconds = 3.0


class Asked(NamedTuple):
    """What the flags say."""

    only: Sequence[str] = ()
    limits: Path | None = None
    state: Path | None = None
    root: str = "/"
    socket: Path = DEFAULT_SOCKET
    """Of the node service, which is asked for what only root may read."""
    time_limit_s: Seconds = TIME_LIMIT_S
    json: bool = False
    everything: bool = False
    """Print what passed as well."""
    drain: bool = False
    dry_run: bool = False


def check(asked: Asked, environ: Mapping[str, str]) -> int:
    """Look, print, drain if asked; the exit code."""
    checks = chosen(asked.only, read_limits(asked.limits))
    try:
        told = asyncio.run(_Look(asked, checks, _state_dir(asked, environ)).report())
    except KeyboardInterrupt:
        sys.stderr.write("everstep: interrupted; nothing is known of this machine.\n")
        return INTERRUPTED
    if asked.drain:
        told = _drained(told, environ, dry_run=asked.dry_run)
    if asked.json:
        print_json(told)
    else:
        _print(told, everything=asked.everything)
    return told.exit_code


def _drained(told: Report, environ: Mapping[str, str], *, dry_run: bool) -> Report:
    """With a note of what became of the node."""
    if told.exit_code == Status.CRITICAL:
        said = drain(check_report.worst(told), environ, dry_run=dry_run).say
    elif dry_run:
        said = "Nothing here would drain this node."
    else:
        return told
    return msgspec.structs.replace(told, notes=(*told.notes, said))


def show_list(*, json: bool) -> None:
    """All checks with their limits."""
    if json:
        print_json(listed())
    else:
        console().print(check_report.list_table(listed()))
        sys.stdout.write("every check also has the limits off=False and at_most='evict'\n")


def serve(socket: Path, group: str, root: str) -> None:
    """Be the node service until told to end."""
    node.serve(socket, group, root)


def _print(told: Report, *, everything: bool) -> None:
    screen = console()
    screen.print(told.summary, soft_wrap=True, markup=False)
    for table in check_report.tables(told, everything=everything):
        screen.print(table)
    for line in check_report.lines(told, everything=everything):
        screen.print(line, soft_wrap=not screen.is_terminal, markup=False)


def _state_dir(asked: Asked, environ: Mapping[str, str]) -> Path:
    if asked.state is not None:
        return asked.state
    users = "/var/lib" if os.geteuid() == 0 else f"{environ.get('HOME', '')}/.local/state"
    return Path(environ.get("XDG_STATE_HOME") or users) / "everstep" / "check"


class _Look:
    """One look at this machine."""

    def __init__(self, asked: Asked, checks: Sequence[AnyCheck], state: Path) -> None:
        socket = str(asked.socket)
        self._here = Here(root=asked.root, boot_id=boot_id(Path(asked.root)), node_socket=socket)
        self._limit_s = asked.time_limit_s
        self._one_thing = bool(asked.only)
        self._late = f"there was no answer within the {self._limit_s:g} s of --time-limit"
        self._state = state
        self._memory = ChecksMemory(state / _STATE_FILE, self._here.boot_id)
        self._notes: list[str] = []
        self._lock = -1
        self._checks = checks
        remembered, self._former = self._remembered()
        self._monitor = Monitor(MachineId(""), checks, remembered)
        self._looking = Looking(checks, self._monitor, state, self._former)

    async def report(self) -> Report:
        began = time.monotonic()
        try:
            _, stacks = await asyncio.gather(
                self._looking.look(self._here, self._limit_s, self._late), self._stacks()
            )
        finally:
            await self._looking.close()
        if self._lock >= 0:
            self._keep()
            os.close(self._lock)
        results = self._looking.results
        made = check_report.report(
            [_with_advice(each) for each in results if not _may_not(each)],
            self._grouped_absent(),
            [*_unseen(filter(_may_not, results)), *stacks],
            sorted(name for name, found in self._monitor.latest.items() if not found),
        )
        seconds = round(time.monotonic() - began, 3)
        return msgspec.structs.replace(made, notes=tuple(self._notes), seconds=seconds)

    async def _stacks(self) -> list[Unseen]:
        """Whether py-spy may look into processes of this user: tried on this one."""
        process = None if self._one_thing else identify(os.getpid())
        if process is None:
            return []
        traced.let_be_traced()  # as ranks do
        answer = await Spy().dump(process, STACKS_WITHIN_S)
        if answer.dump is not None or answer.why not in _STACKS:
            return []
        do = _STACKS[answer.why]
        return [Unseen(checks=("stacks of ranks",), why=str(answer.why), do=do)]

    # --- from call to call ---

    def _remembered(self) -> tuple[Remembered, dict[str, KeptChild]]:
        """Of all sources, whichever are asked now: what is not asked is kept."""
        try:
            self._state.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.access(self._state, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError(13, os.strerror(13))
            self._lock = _locked(self._state)
        except OSError as error:
            self._note(error.strerror or str(error))
        remembered, children = self._memory.read({name: make_source(name) for name in SOURCES})
        return Remembered(histories=remembered.histories), children

    def _keep(self) -> None:
        kept = {name: child.kept for name, child in self._looking.children.items()}
        others = {name: child for name, child in self._former.items() if name not in kept}
        children = {**others, **{name: child for name, child in kept.items() if child}}
        histories = self._monitor.remembered().histories
        before = _version(self._state / _STATE_FILE)
        self._memory.write(Remembered(histories=histories), children)
        if _version(self._state / _STATE_FILE) == before:
            self._note("it could not be written: is the disk full?")

    def _note(self, why: str) -> None:
        self._notes.append(
            f"the state in {self._state} cannot be kept ({why}): counters are compared within this "
            "call only; name another directory with --state"
        )

    def _grouped_absent(self) -> list[Absent]:
        names: dict[str, list[str]] = {}
        for each in self._checks:
            if each.source in self._looking.absent:
                names.setdefault(self._looking.absent[each.source], []).append(each.name)
        return [Absent(checks=tuple(checks), why=why) for why, checks in names.items()]


def _locked(directory: Path) -> int:
    """A descriptor that holds the lock; -1 if another call has it, which writes what it saw.

    A prolog and a health program may run at the same time; two that write lose each other's.
    """
    held = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        return -1
    return held


def _version(file: Path) -> tuple[int, int] | None:
    """Another one whenever it is replaced; None if there is no such file."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _may_not(result: Result) -> bool:
    """Whether it is this user's rights that are missing, and nothing of the machine."""
    why = result.why.lower()
    missing = any(text in why for text in _RIGHTS) and not why.startswith(_NO_CHILD)
    return missing and result.verdict is Verdict.ERROR


def _with_advice(result: Result) -> Result:
    if result.verdict is not Verdict.ERROR or result.do:
        return result
    return msgspec.structs.replace(result, do=_COULD_NOT)


def _unseen(results: Iterable[Result]) -> list[Unseen]:
    """One for each reason."""
    names: dict[tuple[str, str], list[str]] = {}
    for each in results:
        names.setdefault((each.why, each.do or _MAY_NOT), []).append(each.check)
    return [
        Unseen(checks=tuple(dict.fromkeys(checks)), why=why, do=do)
        for (why, do), checks in names.items()
    ]
