"""Runs a transcript: facts in, decisions out, as text that an operator can read.

A line `> TIME FACT [MACHINE...] [key=value...]` tells the core one fact per named machine; the
lines below it are what the core decided, in order. Facts are event names, or one of these short
forms, which answer the newest outstanding order of that kind:

    stopped M.. [finished=S] [copies=S,S..] [backups=R:S,R:S..] [parts=R:S,R:S..] [disk=S,S..]
        RanksStopped; copies of every rank of its position in memory and on its own disk, backups of
        rank R's step S, whole or as parts
    started M.. | persisted M.. | released M.. | published
    requested [reason=TEXT]                    MachinesRequested; refused if there is a reason
    refused M.. [reason=TEXT]                  StartFailed
    backed_up M.. [replicas=alike|differ]      StepBackedUp, of slices of what all ranks share
    progress S [fastest=S] [step_s=T] [phase=P phase_s=T] [attached=yes]
        StepProgress of the current generation
    looked M.. [PLACE[/STATE][+CHILD[/STATE]]=RANKS..] [unreached=M:M,..]   StacksTaken: the ranks
        (as in 0-2,5) that show this place of tests/core/shown.py, maybe with a worker of a loader
    texts M.. [lost=yes]                       StacksSent, of all that M was asked for
    quiet S [no_traffic=S]                     ActivitySeen
    straggler RANK M [costs=X] [why=TEXT]      StragglerSeen; over if the rank is "none"
    groups [mesh=NAME:STRIDE:SIZE,..] [process=NAME:STRIDE:SIZE,..]   GroupsSeen of it
    prints M rank=R line=TEXT                  EvidenceFound: what a rank's agent finds in this line
    alert M.. check=C verdict=V [item=I] [counts=twice] [cause=TEXT] [category=C] [source=S] [age=S]
        [why=TEXT]                             AlertRaised
    cleared M.. check=C [item=I] [source=S]    AlertCleared
    probed M.. reachable=yes|no|unknown        MachineProbed, of everybody whom M was asked to reach
    update V [by=NAME] [lazy=SECONDS] [base=V] [includes=V,V] [overlap=N] [untried=yes] [note=TEXT]
        UpdateRequested, urgent unless lazy, of what is built on the version before it
    rollback [V] [by=NAME] [note=TEXT]         RollbackRequested
    held M.. [version=V]                       VersionHeld, of all that M was told to get
    not_held M.. [version=V] [reason=TEXT]     VersionNotHeld
    tried M.. [problem=TEXT] [untold=TEXT]     VersionTried
    compared M.. first=S last=S [compared=N] [differs=RANK:S before=X after=X]   LossesCompared
    ready M..                                  MachineReady

    tested M.. passed=yes|no|unknown [why=TEXT]    MachineTested

A job with code=V has code versions; machines that join it have those of versions=V,V (none: their
agents know of none). They have no ready launcher, unless ready=yes.

A job that says "stalls" has the patience of every job; others have it for a day.

Blanks are written as underscores in lines, causes and reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from everstep.actions import (
    BackUpStep,
    ControllerAction,
    PersistStep,
    ProbeMachine,
    PublishStep,
    ReleaseMachine,
    RequestMachines,
    StartRanks,
    StopRanks,
    TestMachine,
)
from everstep.agent.log_findings import LogFindings
from everstep.commands.plan import read_layout
from everstep.core.controller import ControllerCore
from everstep.core.invariants import Watch
from everstep.core.state_check import check_state
from everstep.diagnosis.words import Category, Verdict
from everstep.events import (
    AlertCleared,
    AlertRaised,
    ControllerEvent,
    ControllerStarted,
    EvidenceFound,
    GroupsSeen,
    JobSubmitted,
    MachineJoined,
    MachineProbed,
    MachineReleased,
    MachinesRequested,
    MachineTested,
    OutputLines,
    RanksStarted,
    RanksStopped,
    StartFailed,
    StepBackedUp,
    StepPersisted,
    StepProgress,
    StepPublished,
)
from everstep.health import Alert, Counts, Result
from everstep.model import (
    NO_STEP,
    CheckpointSpec,
    CodeSpec,
    Copy,
    ElasticSpec,
    Every,
    Generation,
    GroupShape,
    JobId,
    JobSpec,
    MachineId,
    PolicySpec,
    Rank,
    RankPhase,
    RankStatus,
    Replicated,
    SeenGroups,
    Span,
    Step,
    Term,
    VersionId,
    spans_of,
)
from tests.transcripts.code_forms import CODE_FORMS, versions_in
from tests.transcripts.look_forms import LOOK_FORMS

HIDDEN = {"id", "cause", "why", "grace_s", "within_s", "sources", "keep", "native"}
HIDDEN_IF_EMPTY = {
    "slices",
    "whole",
    "unit",
    "planned",
    "saved_within_s",
    "version",
    "compare_through",
    "nnodes",
    "dp",
    "restore_nnodes",
    "restores",
    "machines",
    "ranks",
    "group",
    "neighbours",
}
EMPTY = (None, "", 0, (), NO_STEP)
PATIENT = PolicySpec(stall_min_s=86400.0, stall_max_s=86400.0, quiet_s=86400.0)
"""Of stories that are not about what stands still, and leave out most of the progress."""
LONG = 30
"""Longer values are not shown: they are in `why`, or are tracebacks."""


class Transcript:
    """One core and the short forms to talk to it."""

    def __init__(self, watch: Watch | None = None) -> None:
        """`watch` judges all that is told by run()."""
        self.core = ControllerCore()
        self.watch = watch
        self.readers: dict[MachineId, LogFindings] = {}

    def run(self, text: str) -> str:
        """The transcript with the core's real decisions below each fact."""
        out: list[str] = []
        for line in text.splitlines():
            if line.startswith(">"):
                out.append(line)
                out.extend(self._tell(line[1:].split()))
            elif not line.startswith("  "):
                out.append(line)
        return "\n".join(out) + "\n"

    def _tell(self, words: list[str]) -> Iterator[str]:
        return map(show, self.told(words))

    def told(self, words: list[str]) -> Iterator[ControllerAction]:
        """What is decided at the facts of one line."""
        now, fact = float(words[0]), words[1]
        names = [word for word in words[2:] if "=" not in word]
        fields = dict(word.split("=", 1) for word in words[2:] if "=" in word)
        for event in self._events(fact, names, fields):
            actions = self.core.handle(event, now)
            if self.watch is not None:
                self.watch.see(event, actions, now)
                check_state(self.core.state, now)
            yield from actions

    def _events(
        self, fact: str, names: list[str], fields: dict[str, str]
    ) -> Iterator[ControllerEvent]:
        short = _SHORT.get(fact)
        if short is not None:
            yield from short(self, names, fields)
            return
        for name in names or [""]:
            plain: dict[str, Any] = {key: _value(text) for key, text in fields.items()}
            if name:
                plain["machine"] = name
            if fact in {"RankExited", "StepProgress", "MetricAbnormal"}:
                plain.setdefault("generation", self.core.state.generation)
            if fact == "MachineSilent":
                plain.setdefault("agent", f"agent-{name}")
            for key in ("code", "signal"):
                if key in plain:
                    plain["exit"] = {key: plain.pop(key)}
            if "error" in plain:
                kind, _, message = str(plain["error"]).partition(":")
                plain["error"] = {
                    "kind": kind,
                    "message": message.replace("_", " "),
                    "traceback": f"Traceback of {kind}",
                }
            yield msgspec.convert({"type": fact, **plain}, ControllerEvent)

    def order(self, kind: type[ControllerAction], name: MachineId | None) -> Any:
        """The newest outstanding action of this kind."""
        found = [a for a in self.core.outstanding(name) if isinstance(a, kind)]
        assert found, f"no {kind.__name__} is outstanding for {name}"
        return found[-1]


def show(action: ControllerAction) -> str:
    """One decision as one line."""
    shown = [
        f"{name}={value}"
        for name in action.__struct_fields__
        if name not in HIDDEN and len(str(value := getattr(action, name))) < LONG
        if value is not False and (value not in EMPTY or name not in HIDDEN_IF_EMPTY)
    ]
    return f"  {type(action).__name__} {' '.join(shown)}".rstrip() + f" -- {action.why}"


def _value(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _every(text: str) -> Every:
    """Steps, or seconds with an s."""
    return Every(seconds=float(text[:-1])) if text.endswith("s") else Every(steps=int(text))


def _job(run: Transcript, names: list[str], fields: dict[str, str]) -> Iterator[ControllerEvent]:
    nnodes, nproc = int(fields.get("nnodes", "2")), int(fields.get("nproc", "2"))
    spec = JobSpec(
        job=JobId("job"),
        uid="00000000",
        command=("train.py",),
        working_dir="/",
        nnodes=nnodes,
        nproc_per_node=nproc,
        standbys=int(fields.get("standbys", "0")),
        local="local" in fields,
        policy=PolicySpec() if "stalls" in names else PATIENT,
        checkpoint=CheckpointSpec(
            directory="/checkpoints",
            disk_every=_every(fields.get("disk_every", "0")),
            local_directory="/local" if "local_disk_every" in fields else "",
            local_disk_every=_every(fields.get("local_disk_every", "0")),
        ),
        code=CodeSpec(version=VersionId(fields.get("code", "")), roots=("/gpt",)),
        layout=read_layout(fields["layout"], nnodes, nproc) if "layout" in fields else None,
        elastic=ElasticSpec(dp_min=int(fields["elastic"]), sharded="sharded" in names)
        if "elastic" in fields
        else None,
    )
    yield JobSubmitted(spec=spec)
    yield ControllerStarted(term=Term(1), version="0")


def _join(run: Transcript, names: list[str], fields: dict[str, str]) -> Iterator[ControllerEvent]:
    """A machine that says generation=G still runs its ranks of that generation.

    With `agent` another agent process than before, with `old` one that knows of no code versions.
    """
    generation = Generation(int(fields.get("generation", "0")))
    for name in names:
        known = run.core.state.machines.get(MachineId(name))
        position = known.node_rank if known is not None and generation else None
        ranks = run.core.state.job.ranks_of(position) if position is not None else range(0)
        yield MachineJoined(
            machine=MachineId(name),
            agent=fields.get("agent", f"agent-{name}"),
            address=f"addr-{name}",
            shard_port=int(fields.get("shard_port", "0")),
            host=fields.get("host", f"host-{name}"),
            version="0",
            boot_id=fields.get("boot_id", ""),
            units=tuple(unit for unit in fields.get("units", "").split(",") if unit),
            versions=None if "old" in fields else versions_in(fields.get("versions", "")),
            ready="ready" in fields,
            generation=generation,
            ranks=tuple(
                RankStatus(rank=Rank(rank), generation=generation, pid=100 + rank) for rank in ranks
            ),
        )


def _stopped(
    run: Transcript, names: list[str], fields: dict[str, str]
) -> Iterator[ControllerEvent]:
    steps, on_disk = (
        [int(text) for text in fields.get(name, "").split(",") if text]
        for name in ("copies", "disk")
    )
    state = run.core.state
    computed = Generation(int(fields.get("computed", state.generation - 1)))
    for name in names:
        order = run.order(StopRanks, MachineId(name))
        position = state.machines[MachineId(name)].node_rank
        ranks = state.job.ranks_of(position) if position is not None else range(0)
        yield RanksStopped(
            machine=MachineId(name),
            action=order.id,
            generation=order.generation,
            store_port=29500,
            copies=tuple(
                Copy(rank=Rank(rank), step=Step(step), generation=computed)
                for rank in ranks
                for step in steps
            ),
            local_disk=tuple(
                Copy(rank=Rank(rank), step=Step(step), generation=computed)
                for rank in ranks
                for step in on_disk
            ),
            backups=tuple(
                Copy(
                    rank=Rank(int(rank)),
                    step=Step(int(step)),
                    generation=computed,
                    replicas=replicas,
                )
                for backups, replicas in (("backups", ()), ("parts", _everybody(run)))
                for rank, step in _pairs(fields.get(backups, ""))
            ),
            finished=Step(int(fields.get("finished", "-1"))),
        )


def _started(
    run: Transcript, names: list[str], fields: dict[str, str]
) -> Iterator[ControllerEvent]:
    for name in names:
        order = run.order(StartRanks, MachineId(name))
        yield RanksStarted(machine=MachineId(name), action=order.id, generation=order.generation)


def _refused(
    run: Transcript, names: list[str], fields: dict[str, str]
) -> Iterator[ControllerEvent]:
    for name in names:
        order = run.order(StartRanks, MachineId(name))
        yield StartFailed(
            machine=MachineId(name),
            action=order.id,
            generation=order.generation,
            reason=fields.get("reason", "").replace("_", " "),
        )


def _persisted(
    run: Transcript, names: list[str], fields: dict[str, str]
) -> Iterator[ControllerEvent]:
    for name in names:
        for order in run.core.outstanding(MachineId(name)):
            if isinstance(order, PersistStep):
                yield StepPersisted(machine=MachineId(name), action=order.id, step=order.step)


def _backed_up(
    run: Transcript, names: list[str], fields: dict[str, str]
) -> Iterator[ControllerEvent]:
    for name in names:
        order = run.order(BackUpStep, MachineId(name))
        yield StepBackedUp(
            machine=MachineId(name),
            action=order.id,
            step=order.step,
            replicated=tuple(_replicated(run, order, fields.get("replicas", ""))),
        )


def _replicated(run: Transcript, order: BackUpStep, which: str) -> Iterator[Replicated]:
    """All ranks say that they hold the same; if they "differ", they do not."""
    for peer in order.peers if which else ():
        digest = f"{peer.rank}" if which == "differ" else "alike"
        yield Replicated(rank=peer.rank, replicas=_everybody(run), digest=digest)


def _everybody(run: Transcript) -> tuple[Span, ...]:
    return spans_of(map(Rank, range(run.core.state.job.world_size)))


def _pairs(text: str) -> list[list[str]]:
    return [word.split(":") for word in text.split(",") if word]


def _released(
    run: Transcript, names: list[str], fields: dict[str, str]
) -> Iterator[ControllerEvent]:
    for name in names:
        order = run.order(ReleaseMachine, MachineId(name))
        yield MachineReleased(machine=MachineId(name), action=order.id)


def _published(
    run: Transcript, names: list[str], fields: dict[str, str]
) -> Iterator[ControllerEvent]:
    order = run.order(PublishStep, None)
    yield StepPublished(action=order.id, step=order.step, generation=order.generation)


def _requested(
    run: Transcript, names: list[str], fields: dict[str, str]
) -> Iterator[ControllerEvent]:
    reason = fields.get("reason", "").replace("_", " ")
    yield MachinesRequested(action=run.order(RequestMachines, None).id, reason=reason)


def _progress(
    run: Transcript, names: list[str], fields: dict[str, str]
) -> Iterator[ControllerEvent]:
    step = int(names[0])
    yield StepProgress(
        generation=run.core.state.generation,
        finished_by_all=Step(step),
        finished_by_one=Step(int(fields.get("fastest", step))),
        step_s=float(fields.get("step_s", "0.5")),
        phase=RankPhase(fields.get("phase", "training")),
        phase_s=float(fields.get("phase_s", "0")),
        attached="attached" in fields,
    )


def _groups(run: Transcript, names: list[str], fields: dict[str, str]) -> Iterator[ControllerEvent]:
    del names
    found = {source: _shapes(fields.get(source, "")) for source in ("mesh", "process")}
    seen = SeenGroups(mesh=found["mesh"], groups=found["process"])
    yield GroupsSeen(generation=run.core.state.generation, seen=seen)


def _shapes(text: str) -> tuple[GroupShape, ...]:
    words = [word.split(":") for word in text.split(",") if word]
    return tuple(
        GroupShape(name=name, factors=((int(stride), int(size)),)) for name, stride, size in words
    )


def _prints(run: Transcript, names: list[str], fields: dict[str, str]) -> Iterator[ControllerEvent]:
    name, generation = MachineId(names[0]), run.core.state.generation
    reader = run.readers.setdefault(name, LogFindings(name, run.core.state.job.world_size))
    lines = OutputLines(
        machine=name,
        rank=Rank(int(fields["rank"])),
        generation=generation,
        text=fields["line"].replace("_", " ") + "\n",
    )
    found = reader.read(lines)
    assert found is not None, f"no rule speaks about {lines.text!r}"
    yield EvidenceFound(machine=name, generation=generation, findings=found.findings)


def _alert(run: Transcript, names: list[str], fields: dict[str, str]) -> Iterator[ControllerEvent]:
    del run
    result = Result(
        check=fields["check"],
        item=fields.get("item", ""),
        verdict=Verdict(fields["verdict"]),
        why=fields.get("why", "it is broken").replace("_", " "),
        category=Category(fields.get("category", "none")),
        counts=Counts(fields.get("counts", "never")),
        cause=fields.get("cause", "").replace("_", " "),
    )
    source, age_s = fields.get("source", "agent"), float(fields.get("age", "0"))
    for name in names:
        alert = Alert(result=result, source=source, age_s=age_s)
        yield AlertRaised(machine=MachineId(name), alert=alert)


def _cleared(
    run: Transcript, names: list[str], fields: dict[str, str]
) -> Iterator[ControllerEvent]:
    del run
    for name in names:
        yield AlertCleared(
            machine=MachineId(name),
            check=fields["check"],
            item=fields.get("item", ""),
            source=fields.get("source", "agent"),
        )


def _probed(run: Transcript, names: list[str], fields: dict[str, str]) -> Iterator[ControllerEvent]:
    said = {"yes": True, "no": False, "unknown": None}[fields["reachable"]]
    for name in names:
        for order in run.core.outstanding(MachineId(name)):
            if isinstance(order, ProbeMachine):
                yield MachineProbed(
                    machine=order.machine, action=order.id, target=order.target, reachable=said
                )


def _tested(run: Transcript, names: list[str], fields: dict[str, str]) -> Iterator[ControllerEvent]:
    passed = {"yes": True, "no": False, "unknown": None}[fields["passed"]]
    for name in names:
        order = run.order(TestMachine, MachineId(name))
        yield MachineTested(
            machine=MachineId(name),
            action=order.id,
            passed=passed,
            why=fields.get("why", "48 checks found nothing").replace("_", " "),
        )


Short = Callable[[Transcript, list[str], dict[str, str]], Iterator[ControllerEvent]]

_SHORT: dict[str, Short] = {
    "job": _job,
    "join": _join,
    "stopped": _stopped,
    "started": _started,
    "refused": _refused,
    "persisted": _persisted,
    "backed_up": _backed_up,
    "released": _released,
    "published": _published,
    "requested": _requested,
    "progress": _progress,
    "groups": _groups,
    "prints": _prints,
    "alert": _alert,
    "cleared": _cleared,
    "probed": _probed,
    **CODE_FORMS,
    **LOOK_FORMS,
    "tested": _tested,
}
