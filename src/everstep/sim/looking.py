"""What simulated ranks show when their stacks are looked at, by what they really do. For agent.py.

As agent/tracing/ would answer, without a tracer: whoever waits is in a collective, whoever holds
the others up shows what holds him, and ranks that train are somewhere in a step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from hashlib import sha256
from typing import TYPE_CHECKING

from everstep.actions import CollectStacks, SendStacks
from everstep.diagnosis.frames import Frame, Thread, signature
from everstep.diagnosis.standing import Call
from everstep.looks import (
    Child,
    Fingerprint,
    Posture,
    RankLook,
    Role,
    Shown,
    Stack,
    Stood,
    ranges_of,
)
from everstep.model import Rank, RankPhase, Seconds
from everstep.sightings import MachineStacks, StacksSent
from everstep.sim.hanging import Hold
from everstep.sim.training import Gang, Process

if TYPE_CHECKING:
    from everstep.sim.machine import Machine

REACHED_WITHIN_S: Seconds = 3.0
"""As agents wait for a neighbour that does not answer."""
LOOKS_S: Seconds = 1.0
"""A look takes up to this long."""
WORLD = "0"
"""torch's name of the group of all ranks."""

_DIST = "/site-packages/torch/distributed/distributed_c10d.py"
_INNERMOST = {
    "waits": (("all_reduce", _DIST), ("average_gradients", "/code/train.py")),
    "strays": (("broadcast", _DIST), ("share_seed", "/code/train.py")),
    "starts": (("init_process_group", _DIST), ("setup", "/code/train.py")),
    "forward": (("_call_impl", "/site-packages/torch/nn/modules/module.py"),),
    "backward": (("_engine_run_backward", "/site-packages/torch/autograd/graph.py"),),
    "kernel": (("read", "/lib/python3.11/pathlib.py"), ("read_index", "/code/train.py")),
    "loader": (
        ("_try_get_data", "/site-packages/torch/utils/data/dataloader.py"),
        ("__next__", "/site-packages/torch/utils/data/dataloader.py"),
    ),
    "lock": (("acquire", "/lib/python3.11/threading.py"), ("take", "/code/train.py")),
    RankPhase.EVALUATING: (("evaluate", "/code/train.py"),),
    "evaluates on": (("score_batch", "/code/model.py"), ("evaluate", "/code/train.py")),
    RankPhase.SAVING: (("save_checkpoint", "/code/train.py"),),
    "saves on": (
        ("_save", "/site-packages/torch/serialization.py"),
        ("save_checkpoint", "/code/train.py"),
    ),
    RankPhase.COMPILING: (("compile_fx", "/site-packages/torch/_inductor/compile_fx.py"),),
    "compiles on": (
        ("codegen", "/site-packages/torch/_inductor/graph.py"),
        ("compile_fx", "/site-packages/torch/_inductor/compile_fx.py"),
    ),
    "worker": (("_worker_loop", "/site-packages/torch/utils/data/_utils/worker.py"),),
}
_GOES_ON = {
    RankPhase.EVALUATING: "evaluates on",
    RankPhase.SAVING: "saves on",
    RankPhase.COMPILING: "compiles on",
}
_HELD = {Hold.STOPPED: "forward", Hold.KERNEL: "kernel", Hold.LOADER: "loader", Hold.LOCK: "lock"}


class Looking:
    """Of one agent."""

    def __init__(
        self,
        machine: Machine,
        after: Callable[[Seconds, Callable[[], None]], None],
        answer: Callable[[MachineStacks | StacksSent], None],
    ) -> None:
        """`after` plans what only a living agent does."""
        self._machine = machine
        self._ground = machine.ground
        self._after = after
        self._answer = answer
        self._taken: dict[Fingerprint, Stack] = {}

    def take(self, order: CollectStacks) -> None:
        """It takes its time, and longer if neighbours cannot be reached. Who is mute never does."""
        machine = self._machine
        takes_s = self._ground.rng.uniform(0.05, LOOKS_S) * machine.slowness
        self._after(min(takes_s, order.within_s), partial(self._took, order))

    def _took(self, order: CollectStacks) -> None:
        machine, ground = self._machine, self._ground
        if machine.mute:
            return
        gang = ground.gangs.get(order.generation)
        processes = [p for p in machine.running() if p.generation == order.generation]
        looks = [] if gang is None else [self._look(gang, process) for process in processes]
        unreached = tuple(
            neighbour.machine
            for neighbour in order.neighbours
            if not (machine.answers() and ground.machines[neighbour.machine].answers())
        )
        told = MachineStacks(
            machine=machine.name,
            action=order.id,
            generation=order.generation,
            look=order.look,
            ranks=tuple(looks),
            stood=() if gang is None else self._stood(gang, processes),
            unreached=unreached,
        )
        late_s = REACHED_WITHIN_S if unreached else 0.0
        self._after(late_s, partial(self._answer, told))

    def _look(self, gang: Gang, process: Process) -> RankLook:
        now, rng = self._ground.schedule.now, self._ground.rng
        hold = process.held_at(now)
        shown, children = _shows(gang, process, now, rng.choice((0, 1)))
        stack = _stack(shown)
        self._taken[stack.fingerprint] = stack
        letter = {Hold.STOPPED: "T", Hold.KERNEL: "D"}.get(hold, "S") if hold else "S"
        wchan = "nfs_wait_bit_killable" if hold is Hold.KERNEL else ""
        rank = Shown(stack=stack.fingerprint, state=letter, wchan=wchan)
        if children:
            worker = _stack("worker")
            self._taken[worker.fingerprint] = worker
            state = "T" if hold is Hold.LOADER else "S"
            child = Child(role=Role.LOADER, shown=Shown(stack=worker.fingerprint, state=state))
            return RankLook(
                rank=process.rank,
                posture=Posture(rank=rank, children=(child,)),
                pid=process.pid,
            )
        return RankLook(rank=process.rank, posture=Posture(rank=rank), pid=process.pid)

    def _stood(self, gang: Gang, processes: list[Process]) -> tuple[Stood, ...]:
        """Of those that answer, how far they are with the collectives of all ranks."""
        now = self._ground.schedule.now
        if not self._ground.options.recorded or not gang.began:
            return ()
        members = ranges_of(gang.processes)
        done = gang.newest
        called: dict[str, list[Rank]] = {}
        for process in processes:
            if process.held_at(now) not in (Hold.STOPPED, Hold.KERNEL):
                what = _shows(gang, process, now, 0)[0]
                called.setdefault(what, []).append(process.rank)
        ops = {"waits": "all_reduce", "strays": "broadcast"}
        return tuple(
            Stood(
                group=WORLD,
                members=members,
                enqueued=done + 1 if what in ops else done,
                completed=done,
                calls=((done + 1, Call(op=ops[what], numel_in=4096)),) if what in ops else (),
                ranks=ranges_of(ranks),
            )
            for what, ranks in called.items()
        )

    def give(self, order: SendStacks) -> None:
        """Those that this agent still has: a new one has none."""
        stacks = tuple(self._taken[name] for name in order.stacks if name in self._taken)
        sent = StacksSent(
            machine=self._machine.name, action=order.id, look=order.look, stacks=stacks
        )
        if not self._machine.mute:
            self._after(0.01, partial(self._answer, sent))


def _shows(gang: Gang, process: Process, now: Seconds, coin: int) -> tuple[str, bool]:
    """What its main thread does, and whether a worker of its data loader is worth a word."""
    hold = process.held_at(now)
    if hold is not None:
        return _HELD[hold], hold is Hold.LOADER
    return _goes_on(gang, process, now, coin), False


def _goes_on(gang: Gang, process: Process, now: Seconds, coin: int) -> str:
    """What a rank does that nothing holds up but others."""
    pausing = gang.pausing
    if not gang.began:
        return "starts"
    if pausing is not None and pausing.at(now):
        pause = pausing.pause
        if pause.alone and process.rank != 0:
            return "waits"
        return _GOES_ON[pause.phase] if coin else str(pause.phase)
    if process.rank in gang.strayed:
        return "strays"
    if gang.stands(now) or gang.waits_for_slow(process, now):
        return "waits"
    return "forward" if coin else "backward"


@cache
def _stack(what: str) -> Stack:
    inner = tuple(Frame(name=name, file=file, line=7) for name, file in _INNERMOST[what])
    if what == "worker":
        frames = inner
    else:
        frames = (*inner, Frame(name="main", file="/code/train.py", line=90))
    thread = Thread(
        frames=(*frames, Frame(name="<module>", file="/code/train.py", line=99)),
        name="MainThread",
        main=True,
    )
    fingerprint = Fingerprint(sha256(signature((thread,)).encode()).hexdigest()[:16])
    return Stack(fingerprint=fingerprint, threads=(thread,))
