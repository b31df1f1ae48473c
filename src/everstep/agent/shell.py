"""The agent's outermost loop: facts of this machine into the core, its decisions into effects.

One thread, one event at a time; effects.py does what takes time. A defect here ends the agent with
a traceback: the keeper starts the next one, which adopts the ranks, and they notice nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from functools import partial
from typing import NoReturn

from everstep import __version__
from everstep.agent.activity import Activity
from everstep.agent.adoption import adopt
from everstep.agent.checking import Checking, Machine
from everstep.agent.checks.check import Here
from everstep.agent.checks.kernel.kmsg import boot_id
from everstep.agent.checks.monitor import Said
from everstep.agent.code import Code
from everstep.agent.comparing import Comparing
from everstep.agent.effects import Effects, Hands
from everstep.agent.ending import Ending
from everstep.agent.gpus import Gpus
from everstep.agent.groups import read_groups
from everstep.agent.launching import Launching
from everstep.agent.link import ControllerLink
from everstep.agent.log import say
from everstep.agent.log_findings import LogFindings
from everstep.agent.log_numbers import LogNumbers
from everstep.agent.memory import MemoryFile
from everstep.agent.notices import listen
from everstep.agent.output import Output
from everstep.agent.own_disk import OwnDisk
from everstep.agent.persist import Persisting
from everstep.agent.port import PortTaken, StorePort
from everstep.agent.progress import Progress
from everstep.agent.saved import Saves
from everstep.agent.shards import Shards
from everstep.agent.testing import Testing, all_checks
from everstep.agent.this_machine import ThisMachine
from everstep.agent.tracing.tracer import Tracer
from everstep.agent.traffic import counted
from everstep.agent.watch import RankWatch, Watched
from everstep.core.agent import AgentCore
from everstep.core.agent_io import (
    ActivityRead,
    AgentEvent,
    ChecksRead,
    ControllerConnected,
    ControllerDisconnected,
    GroupsRead,
    NumbersRead,
    OrderReceived,
    SlotsRead,
)
from everstep.events import MachineJoined, MachineReady, OutputLines, RankExited, TimerFired
from everstep.model import NO_GENERATION, NO_STEP, Generation, NodeRank, Seconds
from everstep.wire import Welcome

OUTPUT_EVERY_S: Seconds = 0.1
"""Between looks for new output of ranks."""
BOUND_EVERY_S: Seconds = 5.0
"""Between looks at the size of the logs."""


class AgentShell:
    """Everything that one agent process has in its hands."""

    def __init__(self, here: ThisMachine, tasks: asyncio.TaskGroup) -> None:
        self._here = here
        self._tasks = tasks
        self._id = os.urandom(8).hex()
        self._events: asyncio.Queue[AgentEvent] = asyncio.Queue()
        self._look_now = asyncio.Event()
        self._ready = False
        self._log_numbers = LogNumbers()
        one_host = here.spec.local or here.spec.nnodes == 1
        self._activity = Activity(here.paths.rank_log, partial(counted, Here(), loopback=one_host))
        self._log_findings = LogFindings(here.setup.machine, here.spec.world_size)
        self._groups_of = NO_GENERATION
        """Whose parallel groups were looked at."""
        self._core = AgentCore(here.setup.machine, here.spec.policy, here.setup.nproc_per_node)
        self._memory_file = MemoryFile(here.shm)
        self._hands = self._make_hands()
        self._effects = Effects(self._hands, here.spec.policy, self._events, tasks.create_task)
        self._checking = Checking(
            Machine(here=here, environ=os.environ, pids=self._pids, tell=self._checks_say)
        )
        self._effects.testing = Testing([all_checks(self._checking.checked)])
        self._hands.ending.spare(self._checking.runner.left_behind)
        child = self._hands.memory.gpus_child
        self._hands.ending.spare([] if child is None else [child.process])

    def _make_hands(self) -> Hands:
        here, memory = self._here, self._memory_file.read()
        ranks = RankWatch(here, self._rank_exited, self._tasks.create_task)
        progress = Progress(here.heartbeat, here.setup.nproc_per_node)
        saves = Saves(here.shm, lambda: bool(ranks.running))
        own_disk = OwnDisk(here)
        launching = Launching(here.paths.launcher_socket, here.paths.pid_file("launcher"))
        shards = Shards(here, saves, self._step_s, memory.shard_port, progress.communicating)
        return Hands(
            here=here,
            memory=memory,
            ranks=ranks,
            saves=saves,
            launching=launching,
            ending=Ending(here, ranks, launching),
            progress=progress,
            comparing=Comparing(here.shm, here.setup.machine),
            gpus=Gpus(here, memory, lambda: not ranks.running),
            output=Output(here),
            port=StorePort(),
            persisting=Persisting(here, saves, own_disk),
            own_disk=own_disk,
            shards=shards,
            code=Code(here, shards.client, shards.code_store),
            tracer=Tracer(here, lambda: ranks.running),
            link=ControllerLink(here, self._id, memory.term, self),
        )

    async def run(self) -> NoReturn:
        """The loop: take a fact, decide, remember, act. Ends only with the process."""
        # A former agent's fork may be under way: only its ranks' slots tell of it.
        await self._hands.launching.settle()
        await self._hands.own_disk.look()
        await self._hands.code.look(closely=not self._memory_file.there)
        self._adopt()
        self._tasks.create_task(asyncio.to_thread(self._log_findings.prepare))
        await listen(self._here.paths.notice_socket, self._look_now.set)
        for watching in (self._hands.link.run(), self._look_at_slots(), self._follow_output()):
            self._tasks.create_task(watching)
        self._tasks.create_task(self._checking.run())
        self._tasks.create_task(self._activity.run(self._running, self._events.put_nowait))
        self._tasks.create_task(self._get_ready())
        self._tasks.create_task(self._hands.code.look_ahead())
        self._tasks.create_task(self._hands.gpus.get_ready())
        with contextlib.closing(self._hands.shards):
            while True:
                await self._take_one()

    async def _take_one(self) -> None:
        event = await self._next_event()
        actions = self._core.handle(event, time.monotonic())
        self._remember()
        for action in actions:
            self._effects.act(action)
        self._events.task_done()
        if not isinstance(event, SlotsRead | NumbersRead | ActivityRead):
            self._look_now.set()

    async def _next_event(self) -> AgentEvent:
        deadline = self._core.next_deadline()
        wait_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            async with asyncio.timeout(wait_s):
                return await self._events.get()
        except TimeoutError:
            self._events.put_nowait(TimerFired())
            return self._events.get_nowait()

    async def _get_ready(self) -> None:
        """A controller that is there is told; any later one sees it in MachineJoined."""
        await self._hands.launching.wait_warm()
        await self._checking.runner.looked.wait()
        self._ready = True
        if self._hands.link.connected:
            self._hands.link.send(MachineReady(machine=self._here.setup.machine))

    # --- from one agent of this machine to the next ---

    def _adopt(self) -> None:
        """Take over from a former agent, if there was one."""
        hands, memory = self._hands, self._hands.memory
        adoption = adopt(hands.progress.all(), memory, hands.ranks.exit_of)
        say(f"agent {self._id} of machine {self._here.setup.machine} found {adoption.event}")
        self._events.put_nowait(adoption.event)
        for watched in adoption.watch:
            self._effects.watch(watched)
        generation = adoption.event.generation
        hands.shards.open(generation)
        shown = memory.shown if memory.generation == generation else {}
        hands.output.follow(generation, [each.rank for each in adoption.event.ranks], shown)
        if memory.store_port:
            with contextlib.suppress(PortTaken):
                hands.port.hold(memory.store_port)

    def _remember(self) -> None:
        """What the next agent of this machine must know if this one is killed now."""
        if self._effects.leaving:
            return
        hands, memory, core = self._hands, self._hands.memory, self._core
        if memory.generation != core.generation:
            memory.told = []
            self._effects.telling.clear()
        memory.term, memory.generation = core.term, core.generation
        if hands.link.all_acknowledged:
            memory.told = sorted({*memory.told, *self._effects.telling})
        memory.store_port, memory.shard_port = hands.port.number, hands.shards.port
        if hands.link.all_written:
            memory.shown = hands.output.shown
        self._memory_file.write(memory)

    # --- what the link says ---

    def connected(self, event: ControllerConnected, welcome: Welcome) -> None:
        """First of all, say what this machine is and what runs on it."""
        setup = self._here.setup
        self._core.policy = self._effects.policy = welcome.policy
        self._hands.code.submitted(welcome.code)
        self._hands.link.send(
            MachineJoined(
                machine=setup.machine,
                agent=self._id,
                address=setup.address,
                host=setup.host,
                version=__version__,
                generation=self._core.generation,
                ranks=tuple(self._core.ranks.values()),
                copies=self._effects.copies(),
                backups=self._hands.shards.backups(),
                local_disk=self._hands.own_disk.copies,
                shard_port=self._hands.shards.port,
                shard_address=self._hands.shards.address,
                node_rank=None if setup.node_rank is None else NodeRank(setup.node_rank),
                boot_id=boot_id(),
                units=setup.units,
                versions=self._hands.code.versions,
                ready=self._ready,
            )
        )
        self._events.put_nowait(event)

    def disconnected(self, event: ControllerDisconnected) -> None:
        self._events.put_nowait(event)

    def ordered(self, event: OrderReceived) -> None:
        self._events.put_nowait(event)

    def acknowledged(self) -> None:
        self._remember()

    # --- what the checks say ---

    def _pids(self) -> list[int]:
        return [watched.process.pid for watched in self._hands.ranks.running]

    def _running(self) -> list[Watched]:
        """Ranks of the generation that runs, without what is left of an older one."""
        newest = self._core.generation
        return [each for each in self._hands.ranks.running if each.generation == newest]

    def _checks_say(self, said: tuple[Said, ...]) -> None:
        if not self._effects.leaving:
            self._events.put_nowait(ChecksRead(said=said))

    # --- what the ranks show ---

    def _step_s(self) -> Seconds | None:
        seen = self._hands.progress.read(self._core.generation)
        return None if seen is None else seen.step_s

    def _rank_exited(self, event: RankExited) -> None:
        if self._effects.leaving:
            return
        if self._hands.link.connected:
            for lines in self._hands.output.rest_of(event.rank, event.generation):
                self._show(lines)
        self._events.put_nowait(event)

    def _show(self, lines: OutputLines) -> None:
        """To people, and to whoever looks for a cause; before the rank's end is told."""
        self._hands.link.send(lines)
        seen = self._hands.progress.read(lines.generation)
        step = None if seen is None or seen.fastest == NO_STEP else seen.fastest
        self._log_findings.world_size = self._hands.memory.world_size or self._here.spec.world_size
        found = self._log_findings.read(lines, step)
        if found is not None:
            self._events.put_nowait(found)

    async def _look_at_slots(self) -> NoReturn:
        """Often while a first step is awaited, at once after a notice, else five times a second."""
        progress, ranks = self._hands.progress, self._hands.ranks
        while True:
            seen: SlotsRead | None = None
            if ranks.running:
                seen = progress.read(self._core.generation)
                if seen is not None:
                    self._look_at_groups(seen)
                    self._events.put_nowait(seen)
                    self._look_at_numbers(seen.generation)
                    self._look_at_losses(seen.generation)
            pause_s = progress.pause_s(seen, time.monotonic() - self._effects.started_at)
            self._look_now.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s if ranks.running else None):
                    await self._look_now.wait()

    def _look_at_numbers(self, generation: Generation) -> None:
        numbers = self._hands.progress.numbers(generation)
        if numbers is None:
            numbers = self._log_numbers.take(generation)
        if numbers is not None and (numbers.numbers or numbers.bad or numbers.differs):
            self._events.put_nowait(numbers)

    def _look_at_losses(self, generation: Generation) -> None:
        """Of steps that are done again."""
        beats = self._hands.progress.of(generation)
        since_s = time.monotonic() - self._effects.started_at
        compared = self._hands.comparing.look(generation, beats, since_s)
        if compared is not None:
            self._events.put_nowait(compared)

    def _look_at_groups(self, slots: SlotsRead) -> None:
        """Told before the step is: so the layout is known before the first backup is placed."""
        if slots.slowest == NO_STEP or self._groups_of == slots.generation:
            return
        self._groups_of = slots.generation
        seen = read_groups(self._here.shm, self._here.setup.nproc_per_node, slots.generation)
        if seen is not None:
            self._events.put_nowait(GroupsRead(generation=slots.generation, seen=seen))

    async def _follow_output(self) -> NoReturn:
        output, link = self._hands.output, self._hands.link
        next_bound = time.monotonic()
        while True:
            if link.connected:
                for lines in output.read():
                    self._show(lines)
                    self._log_numbers.read(lines)
            if time.monotonic() >= next_bound:
                await asyncio.to_thread(output.bound)
                next_bound = time.monotonic() + BOUND_EVERY_S
            self._remember()
            await asyncio.sleep(OUTPUT_EVERY_S)
