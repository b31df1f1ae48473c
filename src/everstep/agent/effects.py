"""Carries out what the agent's core asks for, and posts what came of it as the next fact.

Used by shell.py alone. What takes time runs in a task of its own: forking, killing, copying to
disk. A kill ends whatever else is under way, since it makes it pointless.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from everstep.agent import faults
from everstep.agent.code import Code, NotHeld
from everstep.agent.comparing import Comparing
from everstep.agent.ending import Deadlines, Ending
from everstep.agent.fetching import NotFetched
from everstep.agent.gpus import Gpus, Held, by_pid
from everstep.agent.launching import Launching, NotForked
from everstep.agent.link import ControllerLink
from everstep.agent.log import say
from everstep.agent.memory import Memory
from everstep.agent.output import Output
from everstep.agent.own_disk import OwnDisk
from everstep.agent.persist import Persisting
from everstep.agent.port import PortTaken, StorePort
from everstep.agent.probing import reach
from everstep.agent.progress import Progress
from everstep.agent.rank_env import fork_request
from everstep.agent.saved import Saves
from everstep.agent.shards import Shards
from everstep.agent.testing import Testing
from everstep.agent.this_machine import ThisMachine
from everstep.agent.tracing.tracer import Tracer
from everstep.agent.trying import try_version
from everstep.agent.watch import RankWatch, Spawn, Watched
from everstep.checkpoint import slots
from everstep.core.agent_io import (
    AgentAction,
    AgentEvent,
    BackUpShards,
    DoFault,
    DoProbe,
    DoTest,
    FetchVersion,
    ForkFailed,
    ForkRanks,
    GiveStacks,
    KillRanks,
    LeaveMachine,
    PersistShards,
    RanksForked,
    RanksGone,
    RanksRemain,
    SendReport,
    TakeStacks,
    TryImports,
)
from everstep.events import (
    FaultInjected,
    MachineProbed,
    MachineReleased,
    MachineTested,
    RankExited,
)
from everstep.keeper import EXIT_RELEASE
from everstep.model import Copy, Generation, PolicySpec, Rank, Seconds
from everstep.paths import SHM_ROOT
from everstep.processes import Process, read_pid_file, send_signal

LAST_WORD_WITHIN_S: Seconds = 5.0
"""Wait for the controller to journal that this machine is released."""
FAULT_TOLD_WITHIN_S: Seconds = 2.0
"""Wait for the controller to journal that a fault is about to happen."""
FORK_KNOWN_WITHIN_S: Seconds = 0.5
"""Wait for the launcher's answer to be read once the launcher is known to be idle."""
ALL = Generation(1 << 62)
"""Newer than any: everything is older."""


class Hands(NamedTuple):
    """The parts of the agent that touch the machine."""

    here: ThisMachine
    memory: Memory
    ranks: RankWatch
    saves: Saves
    launching: Launching
    ending: Ending
    progress: Progress
    comparing: Comparing
    gpus: Gpus
    output: Output
    port: StorePort
    persisting: Persisting
    own_disk: OwnDisk
    shards: Shards
    code: Code
    tracer: Tracer
    link: ControllerLink


class Effects:
    """From actions to what they do."""

    def __init__(
        self, hands: Hands, policy: PolicySpec, events: asyncio.Queue[AgentEvent], spawn: Spawn
    ) -> None:
        """`events` takes facts for the core, `spawn` starts a task."""
        self.policy = policy
        self.telling: set[Rank] = set()
        """Ranks whose end was said to the controller and is not known to have arrived."""
        self.leaving = False
        """Whether all that is on this machine is being ended: no news, nothing to remember."""
        self.started_at = time.monotonic()
        """When the newest ranks were forked."""
        self.testing = Testing(())
        """What this machine is tested with when it was evicted."""
        self._hands = hands
        self._here = hands.here
        self._events = events
        self._post = events.put_nowait
        self._spawn = spawn
        self._work: dict[type[AgentAction], set[asyncio.Task[None]]] = {}
        self._by_themselves: dict[type[AgentAction], Callable[[Any], Coroutine[Any, Any, None]]] = {
            DoProbe: self._probe,
            FetchVersion: self._fetch_version,
            TryImports: self._try_imports,
            DoTest: self._test,
            GiveStacks: self._give_stacks,
            DoFault: self._do_fault,
        }
        """What nothing else ends and nothing else waits for."""

    def act(self, action: AgentAction) -> None:
        """Begin it, or do it if it takes no time."""
        if isinstance(action, SendReport):
            if isinstance(action.report, RankExited):
                self.telling.add(action.report.rank)
            self._hands.link.send(action.report)
        elif isinstance(action, ForkRanks):
            self._begin(ForkRanks, self._fork(action))
        elif isinstance(action, KillRanks):
            self._cancel(KillRanks, PersistShards, BackUpShards, TakeStacks)
            self._hands.shards.fence(action.generation)
            self._begin(KillRanks, self._kill(action))
        elif isinstance(action, PersistShards):
            self._begin(PersistShards, self._persist(action))
        elif isinstance(action, BackUpShards):
            self._cancel(BackUpShards)
            self._begin(BackUpShards, self._back_up(action))
        elif isinstance(action, TakeStacks):
            self._cancel(TakeStacks)
            self._begin(TakeStacks, self._take_stacks(action))
        elif isinstance(action, LeaveMachine):
            self._cancel(KillRanks, PersistShards, BackUpShards, TakeStacks)
            self._spawn(self._leave(action))
        else:
            self._spawn(self._by_themselves[type(action)](action))

    def watch(self, watched: Watched) -> None:
        """From now on this process is one of our ranks."""
        self._hands.ending.remember(watched.process)
        self._hands.ranks.add(watched)

    def copies(self) -> tuple[Copy, ...]:
        """Complete checkpoints in this machine's memory, whatever its position is now."""
        return tuple(slots.inventory(self._here.shm, slots.ranks_in(self._here.shm)))

    def _begin(self, kind: type[AgentAction], work: Coroutine[Any, Any, None]) -> None:
        task = self._spawn(work)
        running = self._work.setdefault(kind, set())
        running.add(task)
        task.add_done_callback(running.discard)

    def _cancel(self, *kinds: type[AgentAction]) -> None:
        for kind in kinds:
            for task in self._work.get(kind, ()):
                task.cancel()

    # --- start ---

    async def _fork(self, action: ForkRanks) -> None:
        order = action.order
        try:
            forked = await self._fork_ranks(action)
        except (NotForked, NotFetched, NotHeld, PortTaken) as error:
            reason = str(error)
        except OSError as error:
            reason = (
                f"no room or no access for what ranks need (in {SHM_ROOT} or the logs): {error}"
            )
        else:
            reason = ""
        if reason:
            self._post(ForkFailed(action=action.id, generation=order.generation, reason=reason))
            return
        statuses = tuple(watched.status() for watched in forked)
        self._post(RanksForked(action=action.id, generation=order.generation, ranks=statuses))
        self.started_at = time.monotonic()
        for watched in forked:
            self.watch(watched)

    async def _fork_ranks(self, action: ForkRanks) -> list[Watched]:
        """Says in NotForked, NotFetched, NotHeld, PortTaken or OSError why it cannot be done."""
        order, hands, paths = action.order, self._hands, self._here.paths
        ranks = self._here.ranks_of(order.node_rank)
        places = await hands.code.places(order.version)
        hands.memory.node_rank, hands.memory.version = order.node_rank, order.version
        world_size = hands.memory.world_size = self._here.job_of(order).world_size
        if order.node_rank == 0:
            hands.port.hold(order.master_port)
        hands.progress.reserve()
        slots.make_way(self._here.shm, ranks, order.restore)
        for rank in ranks:
            paths.error_file(order.generation, rank).unlink(missing_ok=True)
        await hands.own_disk.drop_newer(order.restore)
        within_s, own_disk = self.policy.fetch_within_s, hands.own_disk.copies
        await hands.shards.make_ready(order, ranks, within_s, own_disk)
        hands.comparing.begin(order, ranks, world_size)
        paths.rank_log(order.generation, ranks[0]).parent.mkdir(0o700, parents=True, exist_ok=True)
        hands.output.follow(order.generation, ranks, {})
        request = fork_request(self._here, order, hands.memory.term, os.environ, places)
        reply = await hands.launching.fork(request, self.policy.start_within_s)
        return [
            Watched(each.rank, order.generation, Process(each.pid, each.start_ticks))
            for each in reply.ranks
        ]

    # --- end ---

    async def _kill(self, action: KillRanks) -> None:
        hands = self._hands
        await self._wait_for_saves(action)
        await self._end_fork()
        deadline = asyncio.get_running_loop().time() + action.within_s
        deadlines = Deadlines(action.grace_s, action.within_s)
        left = await hands.ending.prove_gone(action.generation, deadlines)
        await hands.ranks.all_told()
        held = Held(tuple(process.pid for process in left))
        if not left:
            held = await hands.gpus.freed(by_pid(hands.ending.ended), deadline)
        if left or held.why:
            self._post(
                RanksRemain(
                    action=action.id,
                    generation=action.generation,
                    pids=held.pids,
                    reason=held.why,
                )
            )
            return
        hands.ending.ended.clear()
        await hands.shards.idle()
        await hands.own_disk.look()
        finished = hands.progress.finished(action.generation, time.monotonic_ns())
        self._post(
            RanksGone(
                action=action.id,
                generation=action.generation,
                store_port=hands.port.reserve_fresh(),
                copies=self.copies(),
                backups=hands.shards.backups(),
                local_disk=hands.own_disk.copies,
                finished=finished.step,
                finished_age_s=finished.age_s,
            )
        )

    async def _wait_for_saves(self, action: KillRanks) -> None:
        """Nothing is wrong, so let what ranks have finished be saved, if they save at all."""
        if action.saved_within_s > 0:
            hands = self._hands
            older = {w.process.pid for w in hands.ranks.running if w.generation < action.generation}
            beats = [beat for beat in hands.progress.all() if beat.pid in older and beat.attached]
            await hands.saves.caught_up(beats, action.saved_within_s)

    async def _end_fork(self) -> None:
        """A fork under way is awaited, so that its ranks are known; one that hangs is given up."""
        await self._hands.launching.settle()
        if forking := self._work.get(ForkRanks):
            await asyncio.wait(forking, timeout=FORK_KNOWN_WITHIN_S)
            self._cancel(ForkRanks)

    async def _leave(self, action: LeaveMachine) -> None:
        """End everything; the keeper does the rest when it sees our exit code."""
        hands, paths = self._hands, self._here.paths
        self.leaving = True
        await self._end_fork()
        left = await hands.ending.prove_gone(ALL, Deadlines(0.0, self.policy.gone_within_s))
        hands.shards.close()
        await hands.code.remove_all()
        slots.remove_all(self._here.shm)
        await hands.own_disk.remove_all()
        if left:
            say(f"processes that do not end: {left}; the keeper goes on trying")
        else:
            hands.link.send(MachineReleased(machine=self._here.setup.machine, action=action.id))
            await hands.link.wait_acknowledged(LAST_WORD_WITHIN_S)
        if read_pid_file(paths.pid_file("keeper")) is None:
            launcher = read_pid_file(paths.pid_file("launcher"))
            if launcher is not None:
                send_signal(launcher, signal.SIGKILL)
        say(f"left: {action.why}")
        os._exit(EXIT_RELEASE)

    # --- the rest ---

    async def _persist(self, action: PersistShards) -> None:
        node_rank = self._hands.memory.node_rank
        ranks = [] if node_rank is None else self._here.ranks_of(node_rank)
        self._post(await self._hands.persisting.persist(action.order, ranks))

    async def _back_up(self, action: BackUpShards) -> None:
        self._post(await self._hands.shards.back_up(action.order))

    async def _probe(self, action: DoProbe) -> None:
        order, machine = action.order, self._here.setup.machine
        tried = await reach(order.address, order.port, order.within_s)
        self._post(
            MachineProbed(
                machine=machine,
                action=action.id,
                target=order.target,
                reachable=tried.reachable,
                why=tried.why,
            )
        )

    async def _take_stacks(self, action: TakeStacks) -> None:
        self._post(await self._hands.tracer.take(action.order))

    async def _give_stacks(self, action: GiveStacks) -> None:
        self._post(self._hands.tracer.give(action.order))

    async def _fetch_version(self, action: FetchVersion) -> None:
        self._post(await self._hands.code.hold(action.order, self._hands.memory.version))

    async def _try_imports(self, action: TryImports) -> None:
        hands = self._hands
        self._post(await try_version(self._here, action.order, hands.code, hands.launching))

    async def _test(self, action: DoTest) -> None:
        tested = await self.testing.test(action.order.within_s)
        self._post(
            MachineTested(
                machine=self._here.setup.machine,
                action=action.id,
                passed=tested.passed,
                why=tested.why,
            )
        )

    async def _do_fault(self, action: DoFault) -> None:
        order, machine = action.order, self._here.setup.machine
        self._post(FaultInjected(action=action.id, fault=order.fault, machine=machine))
        await self._events.join()  # then the core has had it said
        await self._hands.link.wait_acknowledged(FAULT_TOLD_WITHIN_S)
        faults.inject(order, self._here, self._hands.ranks.running)
