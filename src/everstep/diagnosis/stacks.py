"""Stack dumps of ranks: what py-spy, faulthandler, gdb and the kernel print, read as `Dump`s.

The command and the agents hand every text in; what is not a dump is None. outliers.py judges.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from everstep.diagnosis.findings import Finding, Place, Site
from everstep.diagnosis.frames import Dump, Frame, Thread
from everstep.diagnosis.headings import Heading, heading_of, heading_of_name, number_of_name
from everstep.diagnosis.jsontext import MALFORMED, documents
from everstep.diagnosis.outliers import analyse
from everstep.diagnosis.trainers import attempts_of
from everstep.model import Rank

_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PREFIX = re.compile(r"^\[(?:rank|default)?\d+\]:\s?|^\d{1,5}: ")
_PROCESS = re.compile(r"^(Parent )?Process (\d+)(?:: (.*))?$")
_SPY_THREAD = re.compile(r'^Thread (0x[0-9A-Fa-f]+|\d+) \(([\w+ ]+)\)(?:: "?([^"]*)"?)?$')
_SPY_FRAME = re.compile(r"^    (?! )(.+) \(([^()]*?|[^()]*\([^()]*\)[^()]*?)(?::(\d+))?\)$")
_FAULT_THREAD = re.compile(
    r"^(?:Current thread|Thread) 0x[0-9A-Fa-f]+(?: \[([^\]]*)\])?"
    r" \(most recent call (first|last)\):$"
)
_FAULT_FRAME = re.compile(r'^  File "([^"]*)", line (\d+|\?\?\?) in (.+)$')
_TRACE_FRAME = re.compile(r'^\s*File "([^"]*)", line (\d+),? in (.+)$')
_GDB_THREAD = re.compile(
    r'^Thread (\d+) \((?:Thread 0x[0-9a-f]+ )?\(?LWP (\d+)\)?(?: "([^"]*)")?[^)]*\)?\)?:?$'
)
_GDB_FRAME = re.compile(
    r"^#\d+\s+(?:0x[0-9a-f]+ in )?(.+?) \(.*?\)(?: (?:from|at) (\S+?)(?::(\d+))?)?$"
)
_KERNEL_FRAME = re.compile(r"^\s*\[<[0-9a-fx]+>\] (\w+)(?:\+0x|\b)")
_STATE = re.compile(r"^State:\s+([A-Z]) ")
_COUNT = re.compile(
    r"^\s*(\d+)x? (?:(?:of \d+ )?(?:processes|procs?|ranks|workers|others?)\b.*|(?:are )?in) ?:$"
)
_GIL = "Waiting for the GIL"
_FATAL = re.compile(r"^Fatal Python error: ")
_MARKS = (
    "Thread ",
    "thread 0x",
    '"frames"',
    "[<",
)


def read(text: str, file: str) -> list[Dump] | None:
    """All processes that a text shows, in its order; None if it shows none.

    The tool is recognised by what stands there: py-spy's text, also with --native, --locals and
    --subprocesses, its JSON, several documents in one file too; faulthandler's, unless it belongs
    to a fatal error of the interpreter, which is a crash and no hang; gdb's and pstack's threads;
    /proc/PID/stack. Ranks and machines come from headings between the dumps ("### rank 3 on
    node-10"), from labels before each line, and from the file's name.
    """
    if not any(mark in text for mark in _MARKS):
        return None
    try:
        dumps = _from_json(list(documents(text)), file) or _Reader(file).all(text)
    except MALFORMED:
        return None
    return _named(dumps, file) or None


def _named(dumps: list[Dump], file: str) -> list[Dump]:
    """Gives what no heading named the rank and machine of the file's name.

    A rank only if the file is about one process and its children.
    """
    label = heading_of_name(file)
    alone = sum(not dump.child for dump in dumps) == 1
    named = []
    for dump in dumps:
        rank = dump.rank if dump.rank is not None or not alone else label.rank
        local = dump.local_rank if dump.local_rank is not None or not alone else label.local_rank
        named.append(
            msgspec.structs.replace(
                dump, rank=rank, local_rank=local, machine=dump.machine or label.machine
            )
        )
    return named


# JSON


def _from_json(values: list[Any], file: str) -> list[Dump]:
    dumps: dict[tuple[object, ...], list[dict[str, Any]]] = {}
    labels: dict[tuple[object, ...], Heading] = {}
    for number, value in enumerate(values):
        for label, thread in _threads_in(value, Heading()):
            key = (number, thread.get("pid"), label.rank, label.machine)
            dumps.setdefault(key, []).append(thread)
            labels[key] = label
    return [_dump_of(threads, labels[key], file) for key, threads in dumps.items()]


def _threads_in(value: Any, label: Heading) -> Iterator[tuple[Heading, dict[str, Any]]]:
    """Every object with a list of frames, with the rank and machine of what it lies in."""
    if isinstance(value, list):
        for item in value:
            yield from _threads_in(item, label)
    elif isinstance(value, dict):
        if "profiling_name" in value:
            return  # an entry of a flight record, which has frames too
        if isinstance(value.get("frames"), list):
            yield label, value
            return
        label = _label_of_object(value, label)
        for key, item in value.items():
            if isinstance(item, list | dict):
                inner = label if label.rank is not None else _label_of_key(key, label)
                yield from _threads_in(item, inner)


def _label_of_object(value: dict[str, Any], outer: Heading) -> Heading:
    rank = next((value[k] for k in ("rank", "global_rank") if isinstance(value.get(k), int)), None)
    names = ("host", "hostname", "node", "machine")
    machine = next((value[k] for k in names if isinstance(value.get(k), str)), None)
    return Heading(
        rank=outer.rank if rank is None else Rank(rank), machine=machine or outer.machine
    )


def _label_of_key(key: str, outer: Heading) -> Heading:
    label = Heading(rank=Rank(int(key))) if key.isdigit() else heading_of(key)
    return Heading(rank=label.rank, machine=label.machine or outer.machine)


def _dump_of(threads: list[dict[str, Any]], label: Heading, file: str) -> Dump:
    first = threads[0]
    about = next((t["process_info"] for t in threads if t.get("process_info")), None) or {}
    pid = first.get("pid")
    return Dump(
        place=Place(file=file, line=1, text=f"py-spy --json of process {pid}"),
        threads=tuple(_thread_of(t) for t in threads),
        pid=pid,
        rank=label.rank,
        machine=label.machine,
        command=str(about.get("command_line") or ""),
        child=bool(about.get("parent")),
    )


def _thread_of(thread: dict[str, Any]) -> Thread:
    name = str(thread.get("thread_name") or "")
    tid = thread.get("os_thread_id")
    return Thread(
        name=name,
        main=name == "MainThread" or (tid is not None and tid == thread.get("pid")),
        active=thread.get("active"),
        holds_gil=bool(thread.get("owns_gil")),
        frames=tuple(
            Frame(
                name=str(f.get("name") or "?"),
                file=str(f.get("short_filename") or f.get("filename") or ""),
                line=int(f.get("line") or 0),
            )
            for f in thread["frames"]
            if isinstance(f, dict)
        ),
    )


# Text


class _Open:
    """A process whose lines are still coming."""

    def __init__(self, label: Heading, line: int, text: str) -> None:
        self.label, self.line, self.text = label, line, text
        self.pid: int | None = None
        self.command = ""
        self.child = False
        self.state = ""
        self.kernel: list[str] = []
        self.threads: list[tuple[dict[str, Any], list[Frame]]] = []

    @property
    def has_main(self) -> bool:
        """Whether its main thread has begun."""
        return any(about.get("main") for about, _ in self.threads)

    def begin(self, **thread: Any) -> None:
        self.threads.append((thread, []))

    def close(self, file: str) -> Dump | None:
        if not self.threads and not self.kernel:
            return None
        return Dump(
            place=Place(file=file, line=self.line, text=self.text[:200]),
            threads=tuple(_finished(about, frames) for about, frames in self.threads),
            pid=self.pid,
            rank=self.label.rank,
            local_rank=self.label.local_rank,
            machine=self.label.machine,
            command=self.command,
            child=self.child,
            state=self.state,
            kernel=tuple(self.kernel),
        )


def _finished(about: dict[str, Any], frames: list[Frame]) -> Thread:
    if about.pop("last_first", False):
        frames.reverse()
    return Thread(frames=tuple(frames), **about)


class _Reader:
    """Reads one text line by line; each method takes a line of one tool."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.label = Heading()
        self.open: _Open | None = None
        self.fatal = False
        self.inside = False
        """Lines of a thread are coming; any other line ends it, so that no traceback joins it."""
        self.done: list[Dump] = []
        self.bare: list[Dump] = []
        """Main threads in a row, of which only the last one shows the stack of all."""
        self.wanted, self.block = 0, 0
        """How many processes a line such as "6 processes are in:" speaks of, and since where."""

    def all(self, text: str) -> list[Dump]:
        for number, raw in enumerate(text.splitlines(), start=1):
            line = _COLOUR.sub("", raw).rstrip()
            mark = _PREFIX.match(line)
            if mark:
                heading = heading_of(mark.group())
                if heading.rank is not None and heading.rank != self.label.rank:
                    self._close()
                    self.label = heading
                line = line[mark.end() :]
            self._take(line, number)
        self._close()
        self._count(0)
        return self.done + self.bare

    def _take(self, line: str, number: int) -> None:
        if not line:
            return
        if line[0] in " \t#[" and self._frame(line):
            return
        if _FATAL.match(line):
            self._close()
            self.fatal = True
            return
        if self._process(line, number) or self._thread(line, number):
            return
        if not line[0].isspace():
            self._heading(line)

    def _frame(self, line: str) -> bool:
        if match := _KERNEL_FRAME.match(line):
            if self.open is None:
                self.open = _Open(self.label, 0, line.strip())
            self.open.kernel.append(match.group(1))
            return True
        if self.open is None or not self.open.threads or not self.inside:
            return False
        frames = self.open.threads[-1][1]
        if line.strip() == _GIL:
            frames.append(Frame(name="take_gil"))
            return True
        for pattern in (_FAULT_FRAME, _TRACE_FRAME):
            if match := pattern.match(line):
                file, at, name = match.groups()
                frames.append(Frame(name=name, file=file, line=_number(at)))
                return True
        for pattern in (_SPY_FRAME, _GDB_FRAME):
            if match := pattern.match(line):
                name, file, at = match.groups()
                frames.append(Frame(name=name, file=file or "", line=_number(at)))
                return True
        return False

    def _process(self, line: str, number: int) -> bool:
        match = _PROCESS.match(line)
        if not match:
            if (state := _STATE.match(line)) and self.open:
                self.open.state = state.group(1)
                return True
            return False
        parent, pid, command = match.groups()
        if parent:
            if self.open:
                self.open.child = True
            return True
        self._close()
        self.open = _Open(self.label, number, line)
        self.open.pid, self.open.command = int(pid), command or ""
        return True

    def _thread(self, line: str, number: int) -> bool:
        if match := _SPY_THREAD.match(line):
            tid, state, name = match.groups()
            process = self._current(line, number)
            if name == "MainThread" and process.has_main:
                process = self._next(line, number)
            if process.pid is None and name == "MainThread" and tid.isdigit():
                process.pid = int(tid)
            process.begin(
                name=name or "",
                main=name == "MainThread" or tid == str(process.pid),
                active="active" in state,
                holds_gil="gil" in state,
            )
        elif match := _FAULT_THREAD.match(line):
            if self.fatal:
                return True
            name, order = match.groups()
            process = self._current(line, number)
            process.begin(name=name or "", last_first=order == "last")
        elif match := _GDB_THREAD.match(line):
            which, tid, name = match.groups()
            process = self._current(line, number)
            process.begin(name=name or "", main=which == "1" or tid == str(process.pid))
        else:
            return False
        self.inside = True
        return True

    def _current(self, line: str, number: int) -> _Open:
        if self.open is None:
            self.open = _Open(self.label, number, line)
            self.open.pid = self.label.pid
        return self.open

    def _next(self, line: str, number: int) -> _Open:
        """Another process under the same heading, of which only the first one is that rank."""
        label = msgspec.structs.replace(self.label, rank=None, local_rank=None, pid=None)
        self._close()
        self.open = _Open(label, number, line)
        return self.open

    def _heading(self, line: str) -> None:
        """A line of none of the tools: it may name whose dump comes next."""
        self.fatal = self.inside = False
        if count := _COUNT.match(line):
            self._close()
            self._count(int(count.group(1)))
            return
        label = heading_of(line)
        if label.rank is None and label.local_rank is None and label.machine is None:
            return
        self._close()
        self._count(0)
        self.label = Heading(
            rank=label.rank,
            local_rank=label.local_rank,
            machine=label.machine or (self.label.machine if label.rank is None else None),
            pid=label.pid,
        )

    def _close(self) -> None:
        dump = self.open.close(self.file) if self.open else None
        self.open = None
        if dump is None:
            return
        if dump.main is not None and not any(thread.frames for thread in dump.threads):
            self.bare.append(dump)
            return
        self.done += [msgspec.structs.replace(each, threads=dump.threads) for each in self.bare]
        self.bare = []
        self.done.append(dump)

    def _count(self, wanted: int) -> None:
        """The end of what was counted: one stack stands for as many processes as were said."""
        made = len(self.done) - self.block
        if 0 < made < self.wanted:
            copy = msgspec.structs.replace(self.done[-1], rank=None, local_rank=None, pid=None)
            self.done += [copy] * (self.wanted - made)
        self.wanted, self.block = wanted, len(self.done)


def _number(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0


# For whoever collects inputs


class Stacks:
    """Collects the dumps of a job and judges them at the end."""

    def __init__(self) -> None:
        self._dumps: dict[int, list[Dump]] = {}

    def take(self, file: str, data: bytes, attempt: int = 0) -> bool:
        """Keep what a text shows; False if it shows no stacks."""
        dumps = read(data.decode("utf-8", errors="replace"), file)
        self._dumps.setdefault(attempt, []).extend(dumps or [])
        return dumps is not None

    def findings(self, site: Site) -> list[Finding]:
        """What all of them tell together."""
        runs = [
            run
            for attempt in sorted(self._dumps)
            for run in attempts_of(numbered(placed(self._dumps[attempt], site), site))
        ]
        return analyse(runs, site)


def placed(dumps: list[Dump], site: Site) -> list[Dump]:
    """Gives dumps that name a machine and a local rank the rank that the site has there."""
    per = site.ranks_per_machine or 0
    dumps = [_hosted(dump, site) for dump in dumps]
    return [
        msgspec.structs.replace(
            dump, rank=Rank(site.hosts.index(dump.machine) * per + dump.local_rank)
        )
        if dump.rank is None
        and dump.local_rank is not None
        and dump.local_rank < per
        and dump.machine in site.hosts
        else dump
        for dump in dumps
    ]


def _hosted(dump: Dump, site: Site) -> Dump:
    """With the machine whose name is a part of its file's name, if exactly one is."""
    if dump.machine is not None:
        return dump
    hosts = [host for host in site.hosts if re.search(rf"\b{re.escape(host)}\b", dump.place.file)]
    return msgspec.structs.replace(dump, machine=hosts[0]) if len(hosts) == 1 else dump


def numbered(dumps: list[Dump], site: Site) -> list[Dump]:
    """Takes the numbers of files for ranks where nothing else says it and no other sense fits.

    "stacks/7.txt" beside 0 to 6, one process in each, and as many as the job has ranks.
    """
    files = {dump.place.file for dump in dumps}
    numbers = {file: number_of_name(file) for file in files}
    said = any(d.rank is not None or d.local_rank is not None or d.machine for d in dumps)
    whole = set(numbers.values()) == set(range(len(files))) and len(files) > 1
    alone = sum(not dump.child for dump in dumps) == len(files)
    if said or not whole or not alone or site.size not in {0, len(files)}:
        return dumps
    ranks = {file: Rank(number) for file, number in numbers.items() if number is not None}
    return [msgspec.structs.replace(dump, rank=ranks[dump.place.file]) for dump in dumps]
