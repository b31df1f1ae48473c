"""The first source of a layout counts, the others are compared with it, and what is odd is said."""

from __future__ import annotations

from everstep.actions import ControllerAction, PageHuman
from everstep.core.layouts import GROUPS, MESH, STATED, known_layout
from everstep.core.mechanisms import mechanisms
from everstep.core.state import State
from everstep.events import GroupsSeen
from everstep.model import GroupShape, SeenGroups
from tests.transcripts.transcript import Transcript

JOB = "> 0 job nnodes=4 nproc=1 disk_every=0{flags}\n> 1 join m0 m1 m2 m3 shard_port=7000\n"
STARTED = "> 2 stopped m0 m1 m2 m3\n> 3 started m0 m1 m2 m3\n"
PLAIN = (GroupShape(name="tp", factors=((1, 2),)), GroupShape(name="dp", factors=((2, 2),)))
TURNED = (GroupShape(name="dp", factors=((1, 2),)), GroupShape(name="tp", factors=((2, 2),)))


class Job:
    """Four ranks on four machines."""

    def __init__(self, flags: str = "") -> None:
        self._transcript = Transcript()
        self._transcript.run(JOB.format(flags=flags) + STARTED)
        self._now = 10.0

    @property
    def state(self) -> State:
        return self._transcript.core.state

    def see(self, seen: SeenGroups) -> list[ControllerAction]:
        self._now += 1.0
        fact = GroupsSeen(generation=self.state.generation, seen=seen)
        return self._transcript.core.handle(fact, self._now)

    def restart(self) -> None:
        self._transcript.run(f"> {self._now} RankExited m3 rank=3 signal=9\n")
        for line in STARTED.splitlines():
            self._now += 1.0
            self._transcript.run(f"> {self._now} {' '.join(line.split()[2:])}\n")


def test_what_is_stated_goes_before_the_mesh_and_the_mesh_before_process_groups() -> None:
    both = SeenGroups(mesh=PLAIN, groups=PLAIN)
    for flags, seen, source in (
        (" layout=tp=2,dp=2", both, STATED),
        ("", both, MESH),
        ("", SeenGroups(groups=PLAIN), GROUPS),
    ):
        job = Job(flags)
        assert job.see(seen) == []
        known = known_layout(job.state)
        assert (known.source, known.disagreement) == (source, "")
        assert known.layout is not None
        assert known.layout.in_words() == "tp=2, dp=2"


def test_a_disagreement_is_told_once_however_often_it_is_seen() -> None:
    job = Job(" layout=tp=2,dp=2")
    (page,) = job.see(SeenGroups(mesh=TURNED, groups=TURNED))
    assert isinstance(page, PageHuman)
    assert page.why == (
        "the layout from --layout is tp=2, dp=2 (the fastest dimension first), and that does not"
        " go with the mesh given to attach(), dp=2, tp=2: dp of 2 ranks lies along tp and the"
        " process groups of torch.distributed, dp=2, tp=2: dp of 2 ranks lies along tp; backups"
        " are placed by the former, so check it"
    )
    assert job.see(SeenGroups(mesh=TURNED, groups=TURNED)) == []
    job.restart()
    assert job.see(SeenGroups(mesh=TURNED, groups=TURNED)) == []


def test_what_gives_no_layout_is_remarked() -> None:
    job = Job()
    assert known_layout(job.state).remarks == (
        "no groups were seen yet: ranks tell of them after their first step",
    )
    world = (GroupShape(name="default_pg", factors=((1, 4),)),)
    job.see(SeenGroups(groups=world, mesh_problem="it has 2 of 4 ranks", odd=("ring",)))
    known = known_layout(job.state)
    assert known.layout is None
    assert known.remarks == (
        "the process groups of torch.distributed: the only group is that of all ranks",
        "the mesh given to attach(): it has 2 of 4 ranks",
        "process groups that lie across the grid: ring",
    )


def test_a_name_that_says_nothing_is_said_and_its_dimension_used() -> None:
    job = Job()
    mesh = (GroupShape(name="rows", factors=((1, 2),)), PLAIN[1])
    job.see(SeenGroups(mesh=mesh))
    known = known_layout(job.state)
    assert known.layout is not None
    assert known.layout.in_words() == "rows=2, dp=2"
    assert known.remarks[0].startswith("the mesh given to attach() has rows, which says nothing")


def test_status_says_whether_backup_placement_is_on_and_why() -> None:
    job = Job()
    line, *_ = mechanisms(job.state)
    assert not line.on
    assert line.why == (
        "backups lie on the next machine, no layout is known: losing a whole parallel group (a"
        " pipeline stage, say) may lose both memory copies; give --layout, or attach(mesh=...) in"
        " the script"
    )
    job.see(SeenGroups(groups=PLAIN))
    line, *_ = mechanisms(job.state)
    assert line.on
    assert line.why == (
        "backups move along tp and dp by half their size: no parallel group covers a shard and its"
        " backup"
    )
    line, *_ = mechanisms(Job(" layout=dp=4").state)
    assert not line.on
    assert "losing all machines of one group (dp) loses both memory copies" in line.why
