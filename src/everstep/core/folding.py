"""Folds what all machines answer to one look into few facts. A part of core/intake.py.

A hundred thousand ranks show few different things: ranks with equal postures become one cluster,
equal standings one. The first fact comes when all machines have answered, or a second after the
first answer; then there is one a second as long as something new comes.
"""

from __future__ import annotations

import msgspec

from everstep.diagnosis.standing import Peer
from everstep.looks import Cluster, Posture, Stood, joined, ranges_of
from everstep.model import NO_GENERATION, Generation, MachineId, Rank, Seconds
from everstep.sightings import MachineStacks, StacksTaken

EVERY_S: Seconds = 1.0
REMARKS_MAX = 8
"""Different ones in one fact: most machines say the same."""


class Folding:
    """The answers to the newest look that anybody answered."""

    def __init__(self, machines: int) -> None:
        """`machines`: how many are expected to answer."""
        self.machines = machines
        self._look: tuple[Generation, int] = (NO_GENERATION, 0)
        self._answered: set[MachineId] = set()
        self._ended: set[str] = set()
        """Orders that are answered."""
        self._since: Seconds = 0.0
        """Of the last fact, or of the first answer before there was one."""
        self._forget()

    def take(self, report: MachineStacks, now: Seconds) -> None:
        """One machine's answer. One to an older look is late for ever; a second one says nothing
        new, but ends its order.
        """
        look = (report.generation, report.look)
        if look < self._look:
            return
        if look > self._look:
            self._look, self._since = look, now
            self._answered.clear()
            self._ended.clear()
            self._forget()
        if report.action in self._ended:
            return
        self._ended.add(report.action)
        self._actions[report.action] = report.machine
        if report.machine not in self._answered:
            self._answered.add(report.machine)
            self._add(report)

    def due(self, now: Seconds) -> StacksTaken | None:
        """What is new, if its time has come."""
        deadline = self.next_deadline()
        if deadline is None or now < deadline:
            return None
        fact = self._fact()
        self._forget()
        self._since = now
        return fact

    def next_deadline(self) -> Seconds | None:
        """When `due` will have something to say; None: when an answer comes."""
        if not self._actions:
            return None
        complete = len(self._answered) >= self.machines
        return float("-inf") if complete else self._since + EVERY_S

    def _forget(self) -> None:
        self._actions: dict[str, MachineId] = {}
        self._ranks: dict[Posture, list[Rank]] = {}
        self._stood: dict[Stood, list[tuple[int, int]]] = {}
        self._peers: list[Peer] = []
        self._unreached: list[tuple[MachineId, MachineId]] = []
        self._remarks: dict[str, None] = {}

    def _add(self, report: MachineStacks) -> None:
        for shown in report.ranks:
            self._ranks.setdefault(shown.posture, []).append(shown.rank)
        for stood in report.stood:
            self._stood.setdefault(_of_nobody(stood), []).extend(stood.ranks)
        self._peers += report.peers
        self._unreached += [(report.machine, other) for other in report.unreached]
        if report.remark and len(self._remarks) < REMARKS_MAX:
            self._remarks[report.remark] = None

    def _fact(self) -> StacksTaken:
        generation, look = self._look
        clusters = [Cluster(posture=p, ranks=ranges_of(r)) for p, r in self._ranks.items()]
        stood = [
            msgspec.structs.replace(each, ranks=joined(pairs))
            for each, pairs in self._stood.items()
        ]
        return StacksTaken(
            generation=generation,
            look=look,
            actions=tuple(self._actions),
            machines=tuple(self._actions.values()),
            clusters=tuple(sorted(clusters, key=lambda cluster: cluster.ranks)),
            stood=tuple(sorted(stood, key=lambda each: (each.group, each.ranks))),
            peers=tuple(self._peers),
            unreached=tuple(self._unreached),
            remarks=tuple(self._remarks),
        )


def _of_nobody(stood: Stood) -> Stood:
    return msgspec.structs.replace(stood, ranks=())
