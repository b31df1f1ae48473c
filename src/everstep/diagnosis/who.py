"""Which rank, process, address and machine belong together, as the texts themselves say.

Filled by logs.py from lines of identity (NCCL's start, torchrun's tables, lists of pods), asked by
judge.py when a finding has only half of it: a pid, a peer's address.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from everstep.diagnosis.findings import Site, Speaker
from everstep.model import Rank

_NCCL_RANK = re.compile(r"\brank (?P<rank>\d+) nranks (?P<size>\d+)")
_ADDRESS = re.compile(r"(?:Using|OOB) [\w.-]+:(?P<address>\d+\.\d+\.\d+\.\d+)<")
_RANK_ON = re.compile(r"\brank[ =]?(?P<rank>\d+)\b.{0,12}? on (?P<machine>[\w.-]*\d[\w.-]*)")
_RANK_PID = re.compile(r"[Rr]ank (?P<rank>\d+) \(PID (?P<pid>\d+)\)")
_OWN_SOCKET = re.compile(
    r"SocketImpl\(fd=\d+, addr=\[(?:::ffff:)?(?P<machine>[\w.-]+)\]:\d+, remote=\["
)
_POD = re.compile(
    r"^(?P<pod>[a-z0-9][\w.-]*) +\d+/\d+ +\w+ .*?"
    r"(?P<address>\d+\.\d+\.\d+\.\d+|<none>) +(?P<node>[\w.-]+)"
)
_OWNER = re.compile(r"^(?:Name|Node|Hostname|hostname):? +(?P<machine>[\w.-]+)")
_HOST_LIST = re.compile(r"(?P<prefix>[A-Za-z][\w.-]*?)\[(?P<numbers>[\d,-]+)\]")
_DEVICE = re.compile(
    r"[Rr]ank (?P<rank>\d+), (?:node|host) (?P<machine>[\w.-]+), device (?P<device>\d+)"
)


class Who:
    """The registry of one job."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._machine_of_rank: dict[Rank, str] = {}
        self._rank_of_pid: dict[tuple[str | None, int], Rank] = {}
        self._machine_of_address: dict[str, str] = {}
        self._node_of_pod: dict[str, str] = {}
        self._nodes_of_attempt: dict[int, set[str]] = {}
        self.world_size = site.size

    def learn(self, line: str, speaker: Speaker) -> None:
        """Take what one line says."""
        if speaker.rank is not None and speaker.machine is not None:
            self._machine_of_rank.setdefault(speaker.rank, speaker.machine)
        if found := _NCCL_RANK.search(line):
            self._learn_nccl(Rank(int(found["rank"])), int(found["size"]), speaker)
        if (found := _ADDRESS.search(line)) and speaker.machine is not None:
            self._machine_of_address[found["address"]] = speaker.machine
        for form in (_RANK_ON, _DEVICE):
            if found := form.search(line):
                self.place(Rank(int(found["rank"])), found["machine"])
        if found := _RANK_PID.search(line):
            self._rank_of_pid[speaker.machine, int(found["pid"])] = Rank(int(found["rank"]))
        if (found := _OWN_SOCKET.search(line)) and speaker.rank is not None:
            self.place(speaker.rank, found["machine"])
        if found := _POD.match(line):
            self._node_of_pod[found["pod"]] = found["node"]
            self._machine_of_address[found["address"]] = found["node"]

    def _learn_nccl(self, rank: Rank, size: int, speaker: Speaker) -> None:
        self.world_size = max(self.world_size, size)
        if size < self.world_size or speaker.machine is None:
            return  # a communicator of a part of the job has ranks of its own
        self.place(rank, speaker.machine)
        if speaker.pid is not None:
            self._rank_of_pid[speaker.machine, speaker.pid] = rank

    def place(self, rank: Rank, machine: str, pid: int | None = None) -> None:
        """A line says that this rank runs there."""
        self._machine_of_rank.setdefault(rank, machine)
        if pid is not None:
            self._rank_of_pid[machine, pid] = rank

    def rank(self, speaker: Speaker) -> Rank | None:
        """The global rank of a speaker, if known."""
        if speaker.rank is not None:
            return speaker.rank
        if speaker.pid is not None:
            found = self._rank_of_pid.get((speaker.machine, speaker.pid))
            if found is not None:
                return found
        return self._rank_by_place(speaker)

    def _rank_by_place(self, speaker: Speaker) -> Rank | None:
        """From the machine's position and the local rank, where the site gives both."""
        site = self._site
        machine = self.node(speaker.machine)
        if speaker.local_rank is None or site.ranks_per_machine is None or machine is None:
            return None
        if machine not in site.hosts or speaker.local_rank >= site.ranks_per_machine:
            return None
        return Rank(site.hosts.index(machine) * site.ranks_per_machine + speaker.local_rank)

    def machine(self, speaker: Speaker) -> str | None:
        """The machine of a speaker, if known."""
        if speaker.machine is not None:
            return self.node(speaker.machine)
        rank = self.rank(speaker)
        return self.machine_of(rank) if rank is not None else None

    def machine_of(self, rank: Rank) -> str | None:
        """The machine of a rank: as the site says, else as the texts do."""
        return self._site.host_of(rank) or self.node(self._machine_of_rank.get(rank))

    def node(self, name: str | None) -> str | None:
        """The machine behind an address or a pod; any other name is one."""
        if name is None:
            return None
        name = self._machine_of_address.get(name, name)
        if name in self._node_of_pod:
            return self._node_of_pod[name]
        nodes = {node for pod, node in self._node_of_pod.items() if pod.endswith(f"-{name}")}
        return nodes.pop() if len(nodes) == 1 else name

    def owner_named_in(self, line: str) -> Speaker | None:
        """Whose text this is, as a heading says."""
        found = _OWNER.match(line.strip())
        if found:
            return Speaker(machine=found["machine"].split("/")[0])
        named = [
            host for host in self._site.hosts if re.search(rf"(?<![\w-]){host}(?![\w-])", line)
        ]
        return Speaker(machine=named[0]) if len(named) == 1 else None

    def learn_nodes(self, line: str, attempt: int) -> None:
        """A scheduler's list of machines: node-[04,07,15-18]."""
        for found in _HOST_LIST.finditer(line):
            names = self._nodes_of_attempt.setdefault(attempt, set())
            names.update(_expanded(found["prefix"], found["numbers"]))

    def only_machine(self, attempts: Iterable[int]) -> str | None:
        """The only machine that all of these attempts ran on."""
        lists = [self._nodes_of_attempt[a] for a in attempts if a in self._nodes_of_attempt]
        if len(lists) < 2:
            return None
        common = set.intersection(*lists)
        return common.pop() if len(common) == 1 else None

    def may_be_machine(self, name: str) -> bool:
        """Whether a name looks like one, where the site does not say which there are."""
        looks = any(char.isdigit() for char in name) and not name.replace(".", "").isdigit()
        return not self._site.hosts and looks

    def is_machine(self, name: str) -> bool:
        """Whether a name is known to be one."""
        known = {*self._site.hosts, *self._machine_of_rank.values()}
        known |= {*self._machine_of_address.values(), *self._node_of_pod.values()}
        return name in known


def _names(text: str, host: str) -> bool:
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(host)}(?![A-Za-z0-9])", text) is not None


def _expanded(prefix: str, numbers: str) -> Iterator[str]:
    for part in numbers.split(","):
        first, _, last = part.partition("-")
        if not first:
            continue
        for number in range(int(first), int(last or first) + 1):
            yield f"{prefix}{number:0{len(first)}d}"
