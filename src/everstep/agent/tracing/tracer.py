"""Looks at all ranks of this machine at once: every process, every flight record, the neighbours.

effects.py calls `take` for CollectStacks and `give` for SendStacks. All of it runs in parallel, and
each part has a time limit of its own, so that nothing that hangs holds up the rest. The texts of
stacks stay here until they are asked for.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from everstep.actions import CollectStacks, SendStacks
from everstep.agent.probing import reach
from everstep.agent.this_machine import ThisMachine
from everstep.agent.tracing import families, kernel, recorder, signalled
from everstep.agent.tracing.bounds import bounded, within_one_frame
from everstep.agent.tracing.spy import Answer, Spy, WhyNot
from everstep.agent.watch import Watched
from everstep.diagnosis.activity import HIDES, WHOLE, Doing, doing
from everstep.diagnosis.fingerprints import fingerprint_of
from everstep.diagnosis.frames import Dump
from everstep.looks import Child, Fingerprint, Posture, RankLook, Role, Shown, Stack
from everstep.model import MachineId, Rank, Seconds
from everstep.processes import Entry, Process, command_line
from everstep.sightings import MachineStacks, StacksSent
from everstep.trainer import dumping

LOOKS_KEPT = 4
"""Looks whose texts are kept: whoever asks for one asks at once."""
SPY_WITHIN_S: Seconds = 5.0
"""For py-spy to answer; it takes some hundredths of a second, and more on a busy machine."""
NATIVE_WITHIN_S: Seconds = 5.0
"""The same with frames below Python: it reads the symbols of large libraries."""
DUMP_WITHIN_S: Seconds = 2.0
"""For a process to write its stacks itself."""
RECORD_WITHIN_S: Seconds = 5.0
NEIGHBOUR_WITHIN_S: Seconds = 3.0
AT_ONCE = min(64, max(8, 2 * (os.cpu_count() or 1)))
"""Programs that look at the same time: each needs a processor for a moment, and descriptors."""
NATIVE_AT_ONCE = 4
"""Of those that read symbols: each takes some hundreds of megabytes, which ranks may need."""
SHARE = 0.9
"""Of the time of the order that may be used: the answer has a way to go."""


class _Seen(NamedTuple):
    """One process."""

    entry: Entry
    shown: Shown
    dump: Dump | None = None
    native: bool = False
    why: WhyNot | None = None


class _Look:
    """What is under way: the order, its end, and what is noticed."""

    def __init__(self, order: CollectStacks, deadline: Seconds) -> None:
        self.order = order
        self.deadline = deadline
        self.remarks: dict[str, None] = {}
        self.stacks: dict[Fingerprint, Stack] = {}
        self.gate = asyncio.Semaphore(AT_ONCE)
        self.native_gate = asyncio.Semaphore(NATIVE_AT_ONCE)
        self.standing: list[Process] = []
        """Ranks that the kernel held when the look began."""

    def left_s(self, most: Seconds) -> Seconds:
        """Time for something that takes at most so long; 0 if it need not begin."""
        return max(0.0, min(most, self.deadline - asyncio.get_running_loop().time()))

    @property
    def knows_why(self) -> bool:
        """A rank here is held by the kernel, and still is: that is what the others wait for."""
        found = (kernel.entry(each.pid) for each in self.standing)
        return any(now is not None and now.state in kernel.STANDING for now in found)


class Tracer:
    """Of one machine."""

    def __init__(
        self, here: ThisMachine, running: Callable[[], list[Watched]], spy: Spy | None = None
    ) -> None:
        """`running`: the ranks that run now."""
        self._here = here
        self._running = running
        self._spy = spy or Spy()
        self._kept: OrderedDict[int, dict[Fingerprint, Stack]] = OrderedDict()

    async def take(self, order: CollectStacks) -> MachineStacks:
        """Look once. The answer comes in time, with whatever could be seen until then."""
        clock = asyncio.get_running_loop().time
        began = clock()
        look = _Look(order, began + SHARE * order.within_s)
        ranks = {w.rank: w for w in self._running() if w.generation == order.generation}
        table = await asyncio.to_thread(kernel.entries)
        look.standing = [
            each.process for each in ranks.values() if _state(each, table) in kernel.STANDING
        ]
        seen, stands, unreached = await asyncio.gather(
            asyncio.gather(*(self._rank(look, watched, table) for watched in ranks.values())),
            asyncio.gather(*(self._stands(look, each, table) for each in ranks.values())),
            _unreached(look),
        )
        self._keep(look)
        found = [each for each in stands if each is not None]
        return MachineStacks(
            machine=self._here.setup.machine,
            action=order.id,
            generation=order.generation,
            look=order.look,
            ranks=tuple(seen),
            stood=recorder.summarised(found),
            peers=tuple(peer for each in found for peer in each.peers),
            unreached=unreached,
            remark="; ".join(look.remarks),
            took_s=clock() - began,
        )

    def give(self, order: SendStacks) -> StacksSent:
        """The texts, as far as they are still here."""
        kept = self._kept.get(order.look, {})
        stacks = [kept[name] for name in order.stacks if name in kept]
        return StacksSent(
            machine=self._here.setup.machine,
            action=order.id,
            look=order.look,
            stacks=within_one_frame(stacks),
        )

    def _keep(self, look: _Look) -> None:
        self._kept[look.order.look] = look.stacks
        self._kept.move_to_end(look.order.look)
        while len(self._kept) > LOOKS_KEPT:
            self._kept.popitem(last=False)

    # --- one rank ---

    async def _rank(self, look: _Look, watched: Watched, table: Mapping[int, Entry]) -> RankLook:
        pid = watched.process.pid
        below = families.family(pid, table)
        file = dumping.file_of(self._here.shm, self._local(watched.rank))
        writes = asyncio.Lock()

        async def see(entry: Entry) -> _Seen:
            return await self._process(look, entry, _Writing(file, writes))

        itself = table.get(pid)
        if itself is None or itself.process != watched.process:
            gone = Shown(why_none=str(WhyNot.GONE))
            return RankLook(rank=watched.rank, posture=Posture(rank=gone), pid=pid)
        first = await see(itself)  # so all ranks come before any child
        if first.why is WhyNot.NO_PYTHON:
            first, others = _behind_wrapper(first, list(await asyncio.gather(*map(see, below))))
            shown = await self._trainer(look, first)
        else:
            shown, others = await asyncio.gather(
                self._trainer(look, first), asyncio.gather(*map(see, below))
            )
        children = Counter(self._child(look, seen) for seen in others)
        alike = [replace(child, count=count) for child, count in children.items()]
        alike.sort(key=lambda c: (c.role, c.shown.stack, c.shown.state, c.shown.wchan))
        return RankLook(
            rank=watched.rank, posture=Posture(rank=shown, children=tuple(alike)), pid=pid
        )

    def _local(self, rank: Rank) -> int:
        return rank % self._here.setup.nproc_per_node

    async def _trainer(self, look: _Look, seen: _Seen) -> Shown:
        """The rank itself: where Python shows no wait, what lies below it may.

        To see that takes by far the longest of all and pauses the rank, so it is not done where it
        would change nothing.
        """
        if (
            look.order.native
            and seen.dump is not None
            and seen.entry.state not in kernel.HELD
            and _hides(doing(seen.dump))
            and not look.knows_why
            and not kernel.traced(seen.entry.process.pid)
        ):
            async with look.native_gate:
                answer = await self._spy.dump(
                    seen.entry.process, look.left_s(NATIVE_WITHIN_S), native=True
                )
            if answer.dump is not None:
                seen = seen._replace(dump=answer.dump, native=True)
        return _named(look, seen, "")

    def _child(self, look: _Look, seen: _Seen) -> Child:
        threads = () if seen.dump is None else seen.dump.threads
        # To read its command may block for ever where py-spy could not read its memory, too.
        readable = seen.why in {None, WhyNot.NO_PYTHON} and seen.entry.state not in kernel.HELD
        command = command_line(seen.entry.process.pid) if readable else []
        role = families.role_of(seen.entry, command, threads)
        return Child(role=role, shown=_named(look, seen, role))

    # --- one process ---

    async def _process(self, look: _Look, entry: Entry, writing: _Writing) -> _Seen:
        async with look.gate:
            now = kernel.entry(entry.process.pid)
            if now is None or now.process != entry.process or now.dead:
                why = "it has ended and nobody has noticed" if now is not None else "it has ended"
                state = now.state if now is not None else ""
                return _Seen(now or entry, Shown(state=state, why_none=why), why=WhyNot.GONE)
            answer = await self._spy.dump(now.process, look.left_s(SPY_WITHIN_S))
        if answer.dump is None and answer.why is not WhyNot.NO_PYTHON:
            answer = await _written(look, now, answer, writing)
        # Both at the same moment: where it waited before it was stopped is no longer true.
        after = kernel.entry(entry.process.pid) or now
        shown = Shown(state=after.state, wchan=kernel.waits_in(entry.process.pid))
        if answer.dump is None:
            detail = f": {answer.detail}" if answer.why is WhyNot.FAILED and answer.detail else ""
            shown = replace(shown, why_none=f"{answer.why}{detail}")
        return _Seen(after, shown, answer.dump, why=None if answer.dump else answer.why)

    # --- the rest ---

    async def _stands(
        self, look: _Look, watched: Watched, table: Mapping[int, Entry]
    ) -> recorder.Stands | None:
        shm, generation, rank = self._here.shm, look.order.generation, watched.rank
        if _state(watched, table) in kernel.STOPPED:
            return None  # nobody is there to answer: the look shall not wait for that
        try:
            async with asyncio.timeout(look.left_s(RECORD_WITHIN_S)):
                return await recorder.ask(shm, self._local(rank), rank, generation)
        except TimeoutError:
            look.remarks["a rank did not give its flight record in time"] = None
        except recorder.NoRecord as problem:
            look.remarks[str(problem)] = None
        return None


def _state(rank: Watched, table: Mapping[int, Entry]) -> str:
    """Its letter, empty if it is gone."""
    found = table.get(rank.process.pid)
    return found.state if found is not None and found.process == rank.process else ""


def _hides(found: Doing) -> bool:
    """Whether frames below Python may tell more: of what it waits for, or of which part of a save.

    A lock of Python's has no frame of its own there.
    """
    return found.activity in HIDES or (found.activity in WHOLE and found.part is None)


class _Writing(NamedTuple):
    """Where processes of one rank write their stacks, one at a time."""

    file: Path
    one_at_a_time: asyncio.Lock


async def _written(look: _Look, entry: Entry, answer: Answer, writing: _Writing) -> Answer:
    """Its stacks by its own hand, if it runs at all; else py-spy's answer."""
    if answer.why in {WhyNot.MISSING, WhyNot.DENIED}:
        look.remarks[str(answer.why)] = None
    if entry.state in kernel.HELD:
        return answer
    async with writing.one_at_a_time:
        dump = await signalled.ask(entry, writing.file, look.left_s(DUMP_WITHIN_S))
    return answer if dump is None else Answer(dump=dump)


def _behind_wrapper(first: _Seen, others: list[_Seen]) -> tuple[_Seen, list[_Seen]]:
    """A shell that started the script is not what trains: the nearest child with Python is."""
    inner = next((seen for seen in others if seen.dump is not None), None)
    if inner is None:
        return first, others
    return inner, [first, *(seen for seen in others if seen is not inner)]


def _named(look: _Look, seen: _Seen, role: Role | str) -> Shown:
    """With the fingerprint of its stack, whose text is kept."""
    if seen.dump is None:
        return seen.shown
    name = Fingerprint(fingerprint_of(seen.dump.threads, str(role)))
    if name not in look.stacks:
        threads = bounded(seen.dump.threads)
        look.stacks[name] = Stack(fingerprint=name, threads=threads, native=seen.native)
    return replace(seen.shown, stack=name)


async def _unreached(look: _Look) -> tuple[MachineId, ...]:
    limit_s = look.left_s(NEIGHBOUR_WITHIN_S)
    tried: Iterable[tuple[MachineId, bool | None]] = [
        (at.machine, found.reachable)
        for at, found in zip(
            look.order.neighbours,
            await asyncio.gather(
                *(reach(at.address, at.port, limit_s) for at in look.order.neighbours)
            ),
            strict=True,
        )
    ]
    return tuple(machine for machine, reachable in tried if reachable is False)
