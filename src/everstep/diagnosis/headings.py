"""Whose dump it is: ranks and machines in the headings and file names around dumps.

stacks.py, flight.py and ras.py read dumps that do not say it themselves. A local rank is never
taken for a global one, and a word of a path that contains "rank" is none.
"""

from __future__ import annotations

import re

from everstep.model import Rank, Value


class Heading(Value, frozen=True, kw_only=True):
    """Who a heading, a label or a file's name speaks of, as far as it says so."""

    rank: Rank | None = None
    local_rank: int | None = None
    machine: str | None = None
    pid: int | None = None


_LOCAL = re.compile(r"(?i)\blocal[ _-]?rank[ =:_#-]*(\d+)|^\[default(\d+)\]")
_RANK = re.compile(r"(?i)(?<![a-z0-9])(?:global[ _-]?)?rank[ =:_#-]*(\d+)")
_OTHER_RANK = re.compile(
    r"(?i)\b(?:local|group|node|tp|pp|dp|ep|cp|tensor|pipeline|data)[ _-]?rank[ =:_#-]*\d+"
)
_PID = re.compile(r"(?i)\bpid[ =:]*(\d+)")
_HOST = re.compile(
    r"(?i)(?:\b(?:on|host|hostname|node|machine|pod|worker)[ =:]+)([a-z0-9][\w.-]*[\w])"
)
_HOST_LIKE = re.compile(r"(?i)\b((?:[a-z][a-z0-9]*-)+\d+(?:-\d+)*|(?:\d{1,3}\.){3}\d{1,3})\b")
_NOT_HOSTS = frozenset(
    ["rank", "ranks", "process", "pid", "thread", "local", "global", "stack", "stacks"]
)
_STEM = re.compile(r"^(?:.*/)?([^/]*?)(?:\.(?:txt|log|json|pkl|pickle|out|stacks?|dump|gz))*$")
_NAME_RANK = re.compile(r"(?i)(?:^|[._-])(?:global_?)?rank[._-]?(\d+)(?=$|[._-])")
_NAME_LOCAL = re.compile(r"(?i)(?:^|[._-])local[._-]?rank[._-]?(\d+)")
_NAME_HOST = re.compile(
    r"(?i)(?:^|[._])((?:[a-z0-9]+-)*"
    r"(?:nodes?|host|gpu|worker|machine|server|ip|dgx|hgx|compute|pod|cn|nid|vm|[abh]\d00)"
    r"[a-z]*-?\d+(?:-\d+)*)(?=$|[._])"
)


def heading_of(line: str) -> Heading:
    """What a heading such as "### rank 3 on node-10" or "[rank3]:" says."""
    local = _LOCAL.search(line)
    bare = _OTHER_RANK.sub(" ", line)
    rank = _RANK.search(bare)
    pid = _PID.search(line)
    return Heading(
        rank=Rank(int(rank.group(1))) if rank else None,
        local_rank=int(local.group(1) or local.group(2)) if local else None,
        machine=_machine(line),
        pid=int(pid.group(1)) if pid else None,
    )


def _machine(line: str) -> str | None:
    named = _HOST.search(line)
    if named and named.group(1).lower() not in _NOT_HOSTS:
        return named.group(1)
    like = [m.group(1) for m in _HOST_LIKE.finditer(line)]
    like = [name for name in like if name.split("-")[0].lower() not in _NOT_HOSTS]
    return like[0] if like else None


def heading_of_name(file: str) -> Heading:
    """What a file's own name says ("rank-3.json", "node-61.txt"); its folders say nothing."""
    found = _STEM.match(file)
    stem = found.group(1) if found else file
    local = _NAME_LOCAL.search(stem)
    rank = _NAME_RANK.search(_NAME_LOCAL.sub("", stem))
    host = _NAME_HOST.search(stem)
    return Heading(
        rank=Rank(int(rank.group(1))) if rank else None,
        local_rank=int(local.group(1)) if local else None,
        machine=host.group(1) if host else None,
    )


def number_of_name(file: str) -> int | None:
    """The last number of a file's own name, None if it has none or several."""
    found = _STEM.match(file)
    numbers = re.findall(r"\d+", found.group(1)) if found else []
    return int(numbers[0]) if len(numbers) == 1 else None


def last_number_of_name(file: str) -> Rank | None:
    """The number that a name ends in, which is torch's way to name records: nccl_trace_rank_3."""
    found = _STEM.match(file)
    number = re.search(r"(?:^|[_-])(\d+)$", found.group(1)) if found else None
    return Rank(int(number.group(1))) if number else None
