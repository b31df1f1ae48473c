"""What may be told of hangs, slow ranks and stacks: the part of the state machine that makes it up.

Mixed into CoreUnderFire (test_core_properties.py), which has the job, its core and its journal.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from everstep.actions import CollectStacks, ControllerAction, SendStacks
from everstep.core.state import Phase, State
from everstep.diagnosis.abnormal import Kind
from everstep.diagnosis.frames import Frame, Thread
from everstep.diagnosis.standing import Call, Peer
from everstep.events import ControllerEvent, MetricAbnormal, TimerFired
from everstep.looks import (
    Child,
    Cluster,
    Fingerprint,
    Posture,
    Role,
    Shown,
    Stack,
    Stood,
    ranges_of,
)
from everstep.model import Generation, MachineId, Rank, Seconds, Step
from everstep.sightings import (
    ActivitySeen,
    StacksRequested,
    StacksSent,
    StacksTaken,
    StragglerSeen,
)

machines = st.sampled_from([*(MachineId(f"m{n}") for n in range(5)), MachineId("stranger")])
ranks = st.integers(0, 7).map(Rank)
lags = st.sampled_from([0, 0, 0, 1, -1])
_FUNCTIONS = {
    Fingerprint("w" * 16): ("all_reduce", "/site-packages/torch/distributed/distributed_c10d.py"),
    Fingerprint("k" * 16): ("read", "/lib/python3.11/pathlib.py"),
    Fingerprint("l" * 16): ("acquire", "/lib/python3.11/threading.py"),
    Fingerprint("e" * 16): ("evaluate", "/code/train.py"),
    Fingerprint("c" * 16): ("turn", "/code/train.py"),
}
WAITS = Posture(rank=Shown(stack=Fingerprint("w" * 16), state="S"))
shown = st.builds(
    Shown,
    stack=st.sampled_from([*_FUNCTIONS, Fingerprint("0" * 16), Fingerprint("")]),
    state=st.sampled_from(["", "R", "S", "S", "D", "T"]),
)
postures = st.builds(
    Posture,
    rank=shown,
    children=st.sampled_from(
        [(), (), (Child(role=Role.LOADER, shown=Shown(state="T")),)],
    ),
)
CALL = Call(op="all_reduce", numel_in=4)


class LooksUnderFire(RuleBasedStateMachine):
    """Stalls, looks, and true and false answers to them."""

    now: Seconds

    @property
    def state(self) -> State:
        raise NotImplementedError

    def tell(self, event: ControllerEvent) -> None:
        raise NotImplementedError

    def timer(self) -> None:
        raise NotImplementedError

    def train_on(self, steps_on: int) -> None:
        raise NotImplementedError

    def _collecting(self) -> list[CollectStacks]:
        orders = self.state.outstanding.values()
        return [order for order in orders if isinstance(order, CollectStacks)]

    def _sending(self) -> list[SendStacks]:
        orders = self.state.outstanding.values()
        return [order for order in orders if isinstance(order, SendStacks)]

    @precondition(lambda self: self.state.phase is Phase.RUNNING and self.state.full)
    @rule(
        data=st.data(),
        posture=postures,
        agree=st.sampled_from([True, True, False]),
        goes_on=st.sampled_from([False, False, False, True]),
    )
    def stand_still(
        self, data: st.DataObject, posture: Posture, agree: bool, goes_on: bool
    ) -> None:
        """A job that trained, and one rank that shows something else than the others."""
        self.train_on(steps_on=2)
        rank = data.draw(st.integers(0, self.state.job.world_size - 1).map(Rank))
        for turn in range(8):
            if self.state.phase is not Phase.RUNNING:
                return
            self.timer()
            other = rank if agree or not turn % 2 else Rank(0)
            for order in self._collecting():
                self.tell(_taken(order, self.state, {other: posture}))
            for asked in self._sending():
                self.tell(_sent(asked))
            if goes_on and turn == 2:
                self.train_on(steps_on=1)

    @precondition(lambda self: self._collecting())
    @rule(data=st.data(), posture=postures, rank=ranks, late=st.booleans())
    def show(self, data: st.DataObject, posture: Posture, rank: Rank, late: bool) -> None:
        """Some machines answer, others do so later or never."""
        for order in self._collecting():
            if not late or data.draw(st.booleans()):
                self.tell(_taken(order, self.state, {rank: posture}))
        if late:
            self.now += self.state.job.policy.look_within_s
            self.tell(TimerFired())

    @rule(
        data=st.data(), pair=st.tuples(machines, machines), lag=lags, posture=postures, rank=ranks
    )
    def lie_about_stacks(
        self,
        data: st.DataObject,
        pair: tuple[MachineId, MachineId],
        lag: int,
        posture: Posture,
        rank: Rank,
    ) -> None:
        """Of another look, generation or machine, or of ranks and groups that do not exist."""
        orders = [order.id for order in self._collecting()] or ["9999.0"]
        calls = ((3, CALL),)
        stood = Stood(group="0", enqueued=3, completed=2, calls=calls, ranks=((rank, rank + 1),))
        self.tell(
            StacksTaken(
                generation=Generation(max(0, self.state.generation - lag)),
                look=data.draw(st.sampled_from([0, 3, self.state.looked])),
                actions=(data.draw(st.sampled_from(orders)),),
                machines=pair[:1],
                clusters=(Cluster(posture=posture, ranks=((rank, rank + 2),)),),
                stood=data.draw(st.sampled_from([(), (stood,)])),
                peers=(Peer(rank=rank, peer=Rank(9), sends=True),),
                unreached=(pair,),
            )
        )

    @rule(data=st.data(), machine=machines, look=st.integers(0, 5))
    def send_texts(self, data: st.DataObject, machine: MachineId, look: int) -> None:
        """Those that were asked for, or others."""
        for order in self._sending():
            if data.draw(st.booleans()):
                self.tell(_sent(order))
        stacks = (_text(Fingerprint("w" * 16)),)
        self.tell(StacksSent(machine=machine, action="9999.1", look=look, stacks=stacks))

    @rule(by=st.just("anna"))
    def ask_for_stacks(self, by: str) -> None:
        self.tell(StacksRequested(by=by))

    @rule(lag=lags, quiet_s=st.sampled_from([0.0, 5.0, 70.0, 700.0]), idle=st.booleans())
    def be_quiet(self, lag: int, quiet_s: Seconds, idle: bool) -> None:
        """Sometimes of a job that tells of steps, too."""
        self.now += 1.0
        self.tell(
            ActivitySeen(
                generation=Generation(max(0, self.state.generation - lag)),
                quiet_s=quiet_s,
                no_traffic_s=None if idle else quiet_s,
                idle_s=quiet_s if idle else None,
            )
        )

    @rule(lag=lags, rank=st.none() | ranks, machine=machines, costs=st.sampled_from([0.02, 0.4]))
    def straggle(self, lag: int, rank: Rank | None, machine: MachineId, costs: float) -> None:
        self.tell(
            StragglerSeen(
                generation=Generation(max(0, self.state.generation - lag)),
                rank=rank,
                machine=None if rank is None else machine,
                compute_s=2.0,
                usual_s=1.0,
                costs=costs,
                why="it computes for longer than others",
            )
        )

    @precondition(lambda self: self.state.phase is Phase.RUNNING)
    @rule(data=st.data(), machine=machines, posture=postures, rank=ranks)
    def become_slow(
        self, data: st.DataObject, machine: MachineId, posture: Posture, rank: Rank
    ) -> None:
        """Rounds of looks in which one rank is mostly the outlier, while steps go on."""
        step = Step(max(self.state.finished_by_all, 0))
        self.tell(
            MetricAbnormal(
                generation=self.state.generation,
                machine=machine,
                rank=rank,
                kind=data.draw(st.sampled_from([Kind.SLOW, Kind.RAMP])),
                metric="speed",
                step=step,
                first_bad=step,
                why="it is 70 % of what it was",
            )
        )
        for _ in range(self.state.job.policy.slow_rounds):
            self.timer()
            for order in self._collecting():
                self.tell(_taken(order, self.state, {rank: posture}))
            for asked in self._sending():
                self.tell(_sent(asked))


def answer_about_stacks(order: ControllerAction, reason: str) -> ControllerEvent:
    """A good one without a reason; then all ranks of the machine wait, and show that."""
    if isinstance(order, SendStacks):
        none = StacksSent(machine=order.machine, action=order.id, look=order.look, stacks=())
        return none if reason else _sent(order)
    assert isinstance(order, CollectStacks)
    waits = Cluster(posture=WAITS, ranks=((0, 0),))
    return StacksTaken(
        generation=order.generation,
        look=order.look,
        actions=(order.id,),
        machines=(order.machine,),
        clusters=() if reason else (waits,),
        remarks=(reason,) if reason else (),
    )


def _taken(order: CollectStacks, state: State, others: dict[Rank, Posture]) -> StacksTaken:
    """All ranks of the machine wait but these."""
    machine = state.machines[order.machine]
    here = [] if machine.node_rank is None else state.job.ranks_of(machine.node_rank)
    postures: dict[Posture, list[int]] = {}
    for rank in here:
        postures.setdefault(others.get(Rank(rank), WAITS), []).append(rank)
    return StacksTaken(
        generation=order.generation,
        look=order.look,
        actions=(order.id,),
        machines=(order.machine,),
        clusters=tuple(Cluster(posture=p, ranks=ranges_of(rs)) for p, rs in postures.items()),
    )


def _sent(order: SendStacks) -> StacksSent:
    known = [_text(name) for name in order.stacks if name in _FUNCTIONS]
    return StacksSent(machine=order.machine, action=order.id, look=order.look, stacks=tuple(known))


def _text(fingerprint: Fingerprint) -> Stack:
    name, file = _FUNCTIONS[fingerprint]
    frames = (Frame(name=name, file=file), Frame(name="main", file="/code/train.py"))
    return Stack(fingerprint=fingerprint, threads=(Thread(frames=frames, main=True),))
