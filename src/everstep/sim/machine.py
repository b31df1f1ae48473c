"""One simulated machine: its keeper, launcher, processes and shared memory.

What outlives what is as on a real one: the agent may die alone, and so may the launcher, and their
keeper brings them back; ranks and shared memory outlive both; nothing outlives the machine.
"""

from __future__ import annotations

from functools import partial

import msgspec

from everstep.actions import BackUpStep, PersistStep, StartRanks
from everstep.model import (
    NO_GENERATION,
    NO_STEP,
    NO_VERSION,
    Copy,
    ExitStatus,
    Generation,
    MachineId,
    NodeRank,
    Rank,
    Seconds,
    Term,
    VersionId,
)
from everstep.sim.agent import Agent
from everstep.sim.checks import Monitor
from everstep.sim.disk import LocalDisk
from everstep.sim.ground import Ground
from everstep.sim.hanging import Held, Hold
from everstep.sim.memory import KeptMemory, RankMemory
from everstep.sim.options import SLOWNESS
from everstep.sim.training import Process

KILLED = ExitStatus(signal=9)
FREED_WITHIN_S: Seconds = 60.0
"""No process is stuck in the kernel for longer, once it was killed."""
ILL_WITHIN_S: Seconds = 20.0
IN_PLACE = 0.7
"""Share of machines where the code that the job was submitted with lies as it was."""


class Memory(msgspec.Struct, kw_only=True):
    """What an agent leaves to its successor in shared memory (agent/memory.py)."""

    term: Term = Term(0)
    generation: Generation = NO_GENERATION
    node_rank: NodeRank | None = None
    told: list[Rank] = []


class Machine:
    """One machine. Its agent works through it."""

    def __init__(self, name: MachineId, ground: Ground, host: str) -> None:
        self.name = name
        self.host = host
        self.ground = ground
        self.alive = True
        self.reachable = True
        """False while it is cut off from the controller."""
        self.isolated = False
        """Cut off from all others: its ranks hold them up, and none of them can reach it."""
        self.mute = False
        """Its agent does everything but show stacks."""
        self.sick: Hold | None = None
        """What will hold up every rank that is started here, soon after."""
        self.ailed_at: Seconds = 0.0
        """When it was last cut off, isolated, mute, without an agent or slower than usual."""
        self.cut_at: Seconds = 0.0
        """When it was last isolated."""
        number = int(name.removeprefix("m"))
        self.boot_id = f"kernel-{number // ground.options.kernel_of}"
        self.units = (f"switch:leaf{number // 2}",)
        self.monitor = Monitor(name)
        slow = ground.rng.random() < ground.options.slow
        self.slowness = self._usual = SLOWNESS if slow else 1.0
        self.boots = 0
        self.launcher_up = False
        self.launchers = 0
        """So many were warm, one after the other."""
        self.breaks_forks = 0
        """So many of the next forks fail."""
        self.sticks = False
        """The next process to be killed will not die for a while."""
        self.job = ground.options.spec
        """As it was when ranks were started here last."""
        self.memory = Memory()
        self.kept = KeptMemory()
        self.local_disk = LocalDisk()
        first = ground.options.spec.code.version
        in_place = first != NO_VERSION and ground.rng.random() < IN_PLACE
        self.code: dict[VersionId, None] = {first: None} if in_place else {}
        """Versions that ranks could run here. They lie on its disk."""
        self.fenced = NO_GENERATION
        """Backups that older generations ordered are refused."""
        ground.machines[name] = self
        self.processes: dict[int, Process] = {}
        """Newest process of each local rank: the heartbeat slots."""
        self.agent: Agent | None = None
        self._slots: dict[Rank, RankMemory] = {}
        self._agents = 0
        self._start_agent()
        self._start_launcher()

    # --- the keeper ---

    def _start_agent(self) -> None:
        if self.alive and self.agent is None:
            self._agents += 1
            self.ailed_at = self.ground.schedule.now
            self.agent = Agent(self, f"{self.name}-{self._agents}")
            self.agent.start()

    def kill_agent(self) -> None:
        """It is gone at once; the keeper brings a new one."""
        if self.agent is not None:
            self.agent.die()
            self.agent = None
            self.ground.schedule.after(self.ground.rng.uniform(0.3, 2.0), self._start_agent)

    def _start_launcher(self) -> None:
        imports_s = self.ground.rng.uniform(1.0, 3.0) * self.slowness
        self.ground.schedule.after(imports_s, self._launcher_ready)

    def _launcher_ready(self) -> None:
        self.launcher_up = True
        self.launchers += 1
        if self.launchers == 1 and self.agent is not None:
            self.agent.ready()

    def kill_launcher(self) -> None:
        """The keeper starts it again, and it imports torch again."""
        if self.launcher_up:
            self.launcher_up = False
            self._start_launcher()

    def lose(self) -> None:
        """Power off: nothing is left and nobody says good-bye."""
        self._end(silently=True)

    def leave(self) -> None:
        """The keeper ends everything in an orderly way."""
        self._end(silently=False)

    def _end(self, *, silently: bool) -> None:
        if not self.alive:
            return
        self.alive = False
        if self.agent is not None:
            connection = self.agent.connection
            if silently and connection is not None:
                connection.cut()
            self.agent.die(silently=silently)
            self.agent = None
        for process in self.processes.values():
            process.stuck = False
            self.kill(process)
        self._forget()
        self.code = {}
        self.local_disk = LocalDisk()

    def reboot(self) -> None:
        """Processes and memory are gone, the disk is not. Its agent is back before it is missed."""
        if not self.alive:
            return
        self.boots += 1
        if self.agent is not None:
            self.agent.die()
            self.agent = None
        for process in self.processes.values():
            process.stuck = False
            self.kill(process)
        self.processes.clear()
        self._forget()
        self.kill_launcher()
        self.ground.schedule.after(self.ground.rng.uniform(0.3, 10.0), self._start_agent)

    def _forget(self) -> None:
        self._slots.clear()
        self.kept = KeptMemory()
        self.memory = Memory()

    # --- the network ---

    def cut_off(self, for_s: float) -> None:
        """No frame in or out for a while."""
        self.reachable = False
        if self.agent is not None and self.agent.connection is not None:
            self.agent.connection.cut()
        self.ground.schedule.after(for_s, self.reconnect)

    def reconnect(self) -> None:
        now = self.ground.schedule.now
        self.cut_at = now if self.isolated else self.cut_at
        if self.isolated or not self.reachable:
            self.ailed_at = now
        self.reachable = True
        self.isolated = False

    def isolate(self, for_s: float) -> None:
        """Its link is down: no frame in or out, of whatever it runs."""
        self.cut_off(for_s)
        self.isolated = True

    def sever(self, for_s: float) -> None:
        """Its ranks and those of others reach each other no more, without an error; the controller
        reaches it all the same.
        """
        self.isolated = True
        self.ground.schedule.after(for_s, self.reconnect)

    def answers(self) -> bool:
        """Whether others reach it: what runs there does not matter, its kernel answers."""
        return self.alive and not self.isolated

    # --- what holds ranks up ---

    def fall_mute(self, for_s: float) -> None:
        """Its agent shows no stacks for a while."""
        self.mute = True
        self.ground.schedule.after(for_s, self.speak)

    def speak(self) -> None:
        self.ailed_at = self.ground.schedule.now if self.mute else self.ailed_at
        self.mute = False

    def slow_down(self, factor: float) -> None:
        """From now on all takes longer here, and every step of the job with it."""
        self.slowness = self._usual * factor
        for process in self.running():
            process.slowness = self.slowness

    def speed_up(self) -> None:
        if self.slow:
            self.ailed_at = self.ground.schedule.now
        self.slow_down(1.0)

    @property
    def slow(self) -> bool:
        """Whether it is slower than it was at first."""
        return self.slowness > self._usual

    def ails(self, since: Seconds) -> bool:
        """Whether at some time since then it was nobody's fault to blame this machine."""
        ill = self.isolated or self.mute or self.slow or not self.reachable
        return ill or not self.alive or self.agent is None or self.ailed_at >= since

    def cut(self, since: Seconds) -> bool:
        """Whether others could not reach it at some time since then."""
        return self.isolated or not self.alive or self.cut_at >= since

    def hold_up(self, process: Process, hold: Hold, for_s: Seconds = float("inf")) -> None:
        """The process does nothing any more."""
        now = self.ground.schedule.now
        process.hold(Held(hold=hold, since=now, until=now + for_s))
        if process.stuck:
            frees = partial(setattr, process, "stuck", False)
            self.ground.schedule.after(min(for_s, FREED_WITHIN_S), frees)

    # --- processes and shared memory ---

    def heal(self) -> None:
        """From now on it does what machines do; who is held up stays so."""
        self.reconnect()
        self.speak()
        self.speed_up()
        self.sick = None
        self.unstick()
        self.breaks_forks = 0

    def unstick(self) -> None:
        """A driver that hung answers again: who was killed meanwhile dies now."""
        self.sticks = False
        for process in self.processes.values():
            process.stuck = False

    def serves(self, generation: Generation) -> bool:
        """Whether its agent takes and gives shards for this generation."""
        up = self.alive and self.reachable and self.agent is not None
        return up and generation >= self.fenced

    def slots(self, rank: Rank) -> RankMemory:
        """The rank's checkpoint slots here."""
        return self._slots.setdefault(rank, RankMemory(rank))

    def all_slots(self) -> list[RankMemory]:
        """Of every rank that ever ran here, settled to now."""
        found = [self._slots[rank] for rank in sorted(self._slots)]
        for slots in found:
            slots.settle(self.ground.schedule.now)
        return found

    def own_slots(self) -> list[RankMemory]:
        """Of the ranks that this machine's position has."""
        node_rank = self.memory.node_rank
        ranks = [] if node_rank is None else self.ground.options.spec.ranks_of(node_rank)
        return [slots for slots in self.all_slots() if slots.rank in ranks]

    def saved(self, slots: list[RankMemory], order: PersistStep | BackUpStep) -> tuple[str, bool]:
        """Why the step will never be saved here, if so; else whether it still has to be."""
        problem = "no rank was ever started on this machine" if not slots else ""
        waiting = False
        for memory in slots:
            held = [c.step for c in memory.copies() if c.generation == order.generation]
            if order.step in held:
                continue
            if max(held, default=NO_STEP) > order.step:
                problem = f"rank {memory.rank} has overwritten its copy of step {order.step}"
            elif not self.running():
                problem = f"rank {memory.rank} ended before it saved step {order.step}"
            waiting = True
        return problem, waiting

    def holds(self, wanted: Copy) -> bool:
        """Whether slices of this copy are to be had here, of a backup or of a rank's own slot."""
        return self.ran(wanted) or self.kept.find(wanted) is not None

    def ran(self, wanted: Copy) -> bool:
        """Whether a rank that runs or ran here has saved this copy, or was given it."""
        return any(wanted in slots.copies() for slots in self.all_slots())

    def fork(self, order: StartRanks, count: int) -> list[Process]:
        """The launcher forks the first `count` of this machine's ranks."""
        ground = self.ground
        ranks = [Rank(rank) for rank in ground.options.spec.ranks_of(order.node_rank)]
        for slots in self.all_slots():
            slots.drop_newer(order.restore)
            if slots.rank not in ranks:
                slots.keep_only(order.restore)
        self.local_disk.drop_newer(order.restore)
        self.job = ground.job_of(order)
        others = dict(order.restores)
        gang = ground.gang(order)
        forked = []
        for index, rank in enumerate(ranks[:count]):
            self.slots(rank).keep_restored(order.restore)
            process = Process(order, rank, self.slots(rank), self.local_disk)
            process.restores = others.get(rank, rank)
            process.source = self.slots(process.restores)
            process.beside = self._slots
            process.pid, process.slowness = ground.next_pid(), self.slowness
            process.on_end = self._ended
            process.linked = self.answers
            ground.truth.forked(process, order, self.code)
            self.processes[index] = process
            forked.append(process)
            if self.sick is not None:
                falls_ill = partial(self.hold_up, process, self.sick)
                ground.schedule.after(ground.rng.uniform(1.0, ILL_WITHIN_S), falls_ill)
        for process in forked:
            gang.add(process)
        return forked

    def kill(self, process: Process, status: ExitStatus = KILLED) -> None:
        """SIGKILL, or its equal."""
        if not process.stuck and process.alive:
            self.ground.gangs[process.generation].end(process, status)

    def running(self) -> list[Process]:
        """Processes that have not ended, in order of local rank."""
        return [self.processes[n] for n in sorted(self.processes) if self.processes[n].alive]

    def _ended(self, process: Process) -> None:
        self.ground.truth.ended(process)
        noticed_s = self.ground.rng.uniform(0.001, 0.05)
        self.ground.schedule.after(noticed_s, partial(self._tell_agent, process))

    def _tell_agent(self, process: Process) -> None:
        if self.agent is not None:
            self.agent.rank_ended(process)
