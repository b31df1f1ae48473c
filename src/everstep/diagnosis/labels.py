"""Who printed a line, as far as its labels say.

Used by logs.py on lines that a rule found. A number in front of a line is many things: torchrun's
[default5] and NCCL's [5] are local ranks, [rank37] is a global one, srun's "11:" is a task, a data
loader's "worker process 0" and "rank0" inside a path are none of them. What is not sure is left
out: an unknown speaker is better than a wrong one.
"""

from __future__ import annotations

import re

from everstep.diagnosis.findings import Speaker
from everstep.model import Rank

_HOST = r"(?P<machine>[A-Za-z][\w.-]*|\d{1,3}(?:\.\d{1,3}){3})"
_BARE = re.compile(rf"{_HOST}: (?=\S)")
"""What pdsh, DeepSpeed and mpirun put in front."""
_LABELS = (
    # torch's, and everstep's; others without brackets
    re.compile(r"\[rank[ _=:]?(?P<rank>\d+)\]:?", re.IGNORECASE),
    re.compile(r"\(rank[ _=:]?(?P<rank>\d+)\):?", re.IGNORECASE),
    re.compile(r"(?:global_)?rank[ _=:]?(?P<rank>\d+)(?::(?= )|(?= [|:-] )|\t)", re.IGNORECASE),
    re.compile(r"rank=(?P<rank>\d+)(?=[\s,;|])"),
    # Open MPI: job and rank
    re.compile(r"\[\d+,(?P<rank>\d+)\]<std(?:out|err)>:"),
    # torchrun's --tee, alone or before torch's own label
    re.compile(r"\[[A-Za-z_]+(?P<local>\d+)\]:"),
    # NCCL: host:pid:tid [local rank]; newer ones put the time in front
    re.compile(r"(?P<machine>[\w.-]+):(?P<pid>\d+):\d+ \[(?P<local>\d+)\]"),
    # Ray
    re.compile(r"\([\w<>. ]+ pid=(?P<pid>\d+)(?:, ip=(?P<machine>[\w.-]+))?\)"),
    # Composer
    re.compile(r"rank(?P<rank>\d+)\[(?P<pid>\d+)\]\[\w+\]:"),
    # agents and trainers of several houses
    re.compile(rf"\[(?:agent|node|host)[ =:]{_HOST}\]"),
    # c10d within its messages
    re.compile(r"\[(?:PG [^\]]*? )?Rank (?P<rank>\d+)\]"),
    _BARE,
    # the kernel's and other daemons' lines, whose time was passed by
    re.compile(r"(?P<machine>[\w.-]*\d[\w.-]*) (?:kernel|systemd|[\w./-]+\[\d+\]):(?= )"),
    # syslog
    re.compile(rf"[A-Z][a-z]{{2}} [ \d]\d \d\d:\d\d:\d\d {_HOST} [\w./-]+(?:\[\d+\])?:"),
    # journalctl -o short-iso
    re.compile(rf"\d{{4}}-\d\d-\d\dT[\d:.]+(?:[+-][\d:]+|Z) {_HOST} [\w./-]+(?:\[\d+\])?:"),
)
_BETWEEN = re.compile(
    r"\s*(?:\[?20\d\d[-/]\d\d[-/]\d\d[ T_][\d:.,]+(?:Z|[+-]\d\d:?\d\d)?\]?"
    r"|\[?\d\d:\d\d:\d\d(?:[.,]\d+)?\]?"
    r"|\[?[IWEF]\d{3,4} [\d:.]+ (?:\d+ )?[\w./-]+:\d+\]"
    r"|std(?:out|err) [FP](?= )|[A-Za-z][\w.-]*-\d+ +\|(?= )|\[pod/[\w./-]+\](?= )"
    r"|\[?(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\]?:?|\d{1,5}:(?= )|-)[\s,]*"
)
"""What may stand before and between labels: times, levels, the task number of srun, and what
container runtimes, Compose and kubectl put in front (their names are of containers, not hosts)."""
_REPEATED = re.compile(r"\[repeated (?P<times>\d+)x across cluster\]")


def speaker_of(line: str) -> tuple[Speaker, str]:
    """The speaker, and the line without the labels that told."""
    rank = local = pid = None
    machine: str | None = None
    at = _skip(line, 0)
    while True:
        found = _label_at(line, at)
        if found is None:
            break
        groups = found.groupdict()
        rank = _first(rank, groups.get("rank"))
        local = _first(local, groups.get("local"))
        pid = _first(pid, groups.get("pid"))
        machine = machine or groups.get("machine")
        at = _skip(line, found.end())
    return (
        Speaker(
            rank=None if rank is None else Rank(rank), local_rank=local, machine=machine, pid=pid
        ),
        line[at:],
    )


def repeated(line: str) -> int:
    """On how many ranks a line stands that a launcher shows once."""
    found = _REPEATED.search(line)
    return 1 + int(found["times"]) if found else 1


def _label_at(line: str, at: int) -> re.Match[str] | None:
    for label in _LABELS:
        found = label.match(line, at)
        if found is None or found.end() == at:
            continue
        machine = found.groupdict().get("machine")
        if machine is not None and label is _BARE and not _is_host(machine):
            continue
        return found
    return None


def _is_host(name: str) -> bool:
    """Whether a bare word before a colon looks like a machine: it has a digit, as they do."""
    return any(char.isdigit() for char in name) and not name.endswith((".py", ".cc", ".cpp", ".c"))


def _skip(line: str, at: int) -> int:
    while True:
        found = _BETWEEN.match(line, at)
        if found is None or found.end() == at:
            break
        at = found.end()
    while at < len(line) and line[at] == " ":
        at += 1
    return at


def _first(known: int | None, found: str | None) -> int | None:
    return known if known is not None or found is None else int(found)


# --- names of files ------------------------------------------------------------------------------

_RANK_FILE = re.compile(r"(?:^|[/_.-])rank[_-]?(?P<rank>\d+)(?=[/_.-]|$)", re.IGNORECASE)
_HOST_FILE = re.compile(
    r"(?:^|/)(?:[a-z]+[_.-])??"
    r"(?P<machine>(?:node|host|worker|gpu|machine|ip)[\w-]*?\d[\w-]*)(?=[/.]|$)"
)
_KERNEL_FILE = re.compile(
    r"(?:^|[/_.-])(?:dmesg|console|kern(?:el)?|journal|syslog|messages|kmsg)[_.-]"
    r"(?P<machine>[A-Za-z][A-Za-z-]*\d[A-Za-z0-9-]*)(?=\.|$)"
    r"|(?:^|/)(?P<owner>[A-Za-z][A-Za-z-]*\d[A-Za-z0-9-]*)[_.-]"
    r"(?:dmesg|console|kern(?:el)?|journal|syslog|messages|kmsg)(?=[_.-]|$)"
)
"""The kernel's log is kept under its machine's name, whatever that looks like."""
_SECTION = re.compile(r"==> (?P<file>\S+) <==")


def speaker_of_file(name: str) -> Speaker:
    """Whose output a file is, if its name says so: rank-3.log, logs/node-07/stderr.log."""
    rank = _RANK_FILE.search(name)
    kernel, host = _KERNEL_FILE.search(name), _HOST_FILE.search(name)
    machine = (kernel["machine"] or kernel["owner"]) if kernel else host and host["machine"]
    return Speaker(rank=Rank(int(rank["rank"])) if rank else None, machine=machine or None)


def section_of(line: str) -> str | None:
    """The file that follows in the output of `tail file file ...`, if this line begins one."""
    found = _SECTION.fullmatch(line.strip())
    return found["file"] if found else None
