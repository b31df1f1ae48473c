"""What stories of updates and rollbacks do not tell (tests/transcripts): tables and odd facts."""

from __future__ import annotations

import pytest

from everstep.actions import (
    BeginGeneration,
    ControllerAction,
    EvictMachine,
    HoldVersion,
    PageHuman,
    RefuseUpdate,
    Rung,
    StartRanks,
    SwitchCode,
    TryVersion,
)
from everstep.core.controller import ControllerCore
from everstep.core.history import Condition
from everstep.core.state import State
from everstep.core.updates import rollback_target
from everstep.core.versions import last_good, span
from everstep.events import StopRequested, TimerFired, VersionHeld, VersionTried
from everstep.model import MachineId, VersionId
from tests.transcripts.transcript import Transcript

V1, V2, V3 = VersionId("aaaaaaaa"), VersionId("bbbbbbbb"), VersionId("cccccccc")
RUNNING = """
> 0 job nnodes=2 nproc=1 standbys=1 disk_every=0 code=aaaaaaaa
> 1 join m0 m1 m2 shard_port=7000 ready=yes
> 1.1 held m0 m1 m2
> 2 stopped m0 m1
> 3 started m0 m1
"""


class Story:
    """A transcript that is told piece by piece; keeps all decisions."""

    def __init__(self, text: str = RUNNING) -> None:
        self.transcript = Transcript()
        self.decided: list[ControllerAction] = []
        self.tell(text)

    @property
    def core(self) -> ControllerCore:
        return self.transcript.core

    @property
    def state(self) -> State:
        return self.transcript.core.state

    def tell(self, text: str) -> list[ControllerAction]:
        """What is decided at these facts."""
        new: list[ControllerAction] = []
        for line in text.splitlines():
            if line.startswith(">"):
                new += self.transcript.told(line[1:].split())
        self.decided += new
        return new

    def put_in_place(self, at: float, version: VersionId, step: int) -> None:
        """An urgent update, with everybody's help."""
        self.tell(f"> {at} update {version} untried=yes")
        names = sorted({o.machine for o in self.orders(HoldVersion) if o.version == version})
        if names:
            self.tell(f"> {at + 0.1} held {' '.join(names)} version={version}")
        self.restart(at + 0.2, step)
        assert self.state.version == version

    def restart(self, at: float, step: int) -> None:
        self.tell(f"> {at} stopped m0 m1 copies={step} finished={step}\n> {at + 0.1} started m0 m1")

    def orders(self, kind: type[HoldVersion]) -> list[HoldVersion]:
        return [order for order in self.state.outstanding.values() if isinstance(order, kind)]


def kinds(decided: list[ControllerAction]) -> list[str]:
    return [type(action).__name__ for action in decided]


# --- what is rolled back to ----------------------------------------------------------------------


def test_without_an_update_there_is_nothing_to_roll_back_to() -> None:
    target = rollback_target(Story().state, 5.0, "signal 11")
    assert (target.version, target.why) == (None, "there is no earlier version of the code")


def test_a_version_that_did_few_steps_is_passed_over() -> None:
    story = Story()
    story.tell("> 4 progress 150")
    story.put_in_place(10, V2, 150)
    story.tell("> 20 progress 200")
    story.put_in_place(30, V3, 200)
    target = rollback_target(story.state, 40.0, "signal 11")
    assert target.version == V1
    assert "back to v1 (aaaaaaaa), which did 151 steps until 30 s ago" in target.why


@pytest.mark.parametrize(("step", "target"), [(150, V1), (20, V1), (None, None)])
def test_the_first_version_may_have_done_few_steps_but_not_none(
    step: int | None, target: VersionId | None
) -> None:
    story = Story()
    if step is not None:
        story.tell(f"> 4 progress {step}")
    story.put_in_place(10, V2, -1 if step is None else step)
    assert rollback_target(story.state, 20.0, "signal 11").version == target


def test_what_ran_for_half_an_hour_ran_well_however_slow_its_steps_are() -> None:
    story = Story()
    story.tell("> 4 progress 150")
    story.put_in_place(10, V2, 150)
    story.tell("> 1000 progress 155")
    assert not story.state.versions[V2].runs[-1].well
    story.tell("> 1811 progress 159")
    assert story.state.versions[V2].runs[-1].well
    story.put_in_place(1900, V3, 160)
    assert rollback_target(story.state, 1950.0, "signal 11").version == V2


def test_a_script_that_reports_no_steps_runs_well_by_time_alone() -> None:
    story = Story()
    story.tell("> 1810 RankExited m1 rank=1 signal=9")
    assert story.state.versions[V1].runs[-1].well
    short = Story()
    short.tell("> 1000 RankExited m1 rank=1 signal=9")
    assert not short.state.versions[V1].runs[-1].well


def test_steps_between_failures_count_and_not_in_all() -> None:
    story = Story()
    for number in range(4):
        at = 10 + 10 * number
        story.tell(f"> {at} progress {60 * (number + 1)}")
        story.tell(f"> {at + 1} RankExited m1 rank=1 signal=9")
        story.restart(at + 2, 60 * (number + 1))
    run = story.state.versions[V1].runs[-1]
    assert (run.steps, run.well) == (241, False)


def test_steps_of_before_the_job_are_not_the_code_s() -> None:
    story = Story()
    story.tell("> 4 progress 150\n> 5 RankExited m1 rank=1 signal=9")
    story.tell("> 6 stopped m0 m1 copies=140 finished=150\n> 7 started m0 m1")
    story.tell("> 8 progress 145")
    assert story.state.versions[V1].runs[-1].steps == 151
    story.tell("> 9 progress 152")
    assert story.state.versions[V1].runs[-1].steps == 153


def test_code_that_ran_for_a_day_is_not_what_broke() -> None:
    story = Story()
    story.tell("> 4 progress 150")
    story.put_in_place(10, V2, 150)
    day = story.state.job.policy.recent_code_s
    assert rollback_target(story.state, 10.0 + day, "signal 11").version == V1
    target = rollback_target(story.state, 11.0 + day, "signal 11")
    assert (target.version, target.why) == (
        None,
        "v2 (bbbbbbbb) has run for 24 h, so it is not what broke",
    )


def test_a_failure_that_came_before_is_not_the_new_code_s() -> None:
    story = Story()
    story.tell("> 4 progress 150\n> 5 RankExited m1 rank=1 signal=11")
    story.restart(6, 150)
    story.tell("> 8 progress 170")
    story.put_in_place(10, V2, 170)
    assert rollback_target(story.state, 20.0, "signal 9").version == V1
    target = rollback_target(story.state, 20.0, "signal 11")
    assert target.version is None
    assert target.why.startswith("signal 11 came under v1 (aaaaaaaa) as well, 14 s ago")


def test_what_is_rolled_back_is_never_a_target() -> None:
    story = Story()
    story.tell("> 4 progress 150")
    story.put_in_place(10, V2, 150)
    story.tell("> 20 progress 300")
    story.put_in_place(30, V3, 300)
    story.tell("> 40 progress 450\n> 41 rollback aaaaaaaa")
    story.restart(42, 450)
    assert [b.condition for b in story.state.versions.values()] == [
        Condition.RUNNING,
        Condition.ROLLED_BACK,
        Condition.ROLLED_BACK,
    ]
    assert last_good(story.state) is None


# --- what is asked for ---------------------------------------------------------------------------


def test_an_update_to_what_runs_changes_nothing() -> None:
    story = Story()
    assert story.tell("> 4 update aaaaaaaa") == []
    assert list(story.state.versions) == [V1]


def test_code_that_is_not_versioned_is_not_updated() -> None:
    story = Story(
        "> 0 job nnodes=1 nproc=1 disk_every=0\n> 1 join m0\n> 2 stopped m0\n> 3 started m0"
    )
    (refused,) = story.tell("> 4 update bbbbbbbb base=")
    assert isinstance(refused, RefuseUpdate)
    assert "the job's code is not versioned" in refused.why
    assert story.tell("> 5 join m0 generation=1") == []


def test_a_version_that_all_machines_hold_is_tried_and_put_in_place_at_once() -> None:
    held = "ready=yes versions=aaaaaaaa,bbbbbbbb"
    story = Story(RUNNING.replace("ready=yes", held).replace("> 1.1 held m0 m1 m2\n", ""))
    (trial,) = story.tell("> 4 update bbbbbbbb")
    assert isinstance(trial, TryVersion)
    assert "BeginGeneration" in kinds(story.tell("> 5 tried m2"))


def test_a_version_keeps_its_name_when_it_is_sent_again() -> None:
    story = Story()
    story.tell("> 4 progress 150")
    story.tell("> 5 update bbbbbbbb\n> 6 held m0 m1 m2\n> 7 tried m2 problem=SyntaxError")
    assert story.state.versions[V2].condition is Condition.REFUSED
    story.tell("> 8 update cccccccc lazy=600 base=aaaaaaaa\n> 9 update bbbbbbbb by=boris")
    book = story.state.versions[V2]
    assert (book.number, book.by, book.problem) == (2, "boris", "")
    assert list(story.state.versions) == [V1, V3, V2]


def test_nothing_is_decided_about_code_once_the_job_ends() -> None:
    story = Story()
    story.tell("> 4 progress 150\n> 5 update bbbbbbbb")
    story.core.handle(StopRequested(by="anna"), 6.0)
    decided = story.tell("> 7 held m0 m1 m2\n> 8 update cccccccc\n> 9 rollback")
    assert not {"TryVersion", "HoldVersion", "SwitchCode", "PageHuman"} & {*kinds(decided)}


def test_a_lazy_update_is_forced_only_when_a_recovery_is_proven() -> None:
    story = Story()
    story.tell("> 4 progress 150\n> 5 update bbbbbbbb lazy=30\n> 6 held m0 m1 m2")
    story.tell("> 10 RankExited m1 rank=1 signal=9")
    story.restart(11, 150)
    assert "BeginGeneration" not in kinds(story.tell("> 20 tried m2\n> 40 progress 155"))
    decided = story.tell("> 45 progress 160")
    assert "CloseIncident" in kinds(decided)
    (begun,) = [action for action in decided if isinstance(action, BeginGeneration)]
    assert begun.planned == "hot update"


# --- who has it ----------------------------------------------------------------------------------


def test_an_answer_that_nobody_asked_for_changes_nothing() -> None:
    story = Story()
    story.tell("> 4 update bbbbbbbb")
    held = VersionHeld(machine=MachineId("m0"), action="1.0", version=V2)
    tried = VersionTried(machine=MachineId("m0"), action="1.0", version=V2)
    for event in (held, tried):
        assert story.core.handle(event, 5.0) == []
    assert V2 not in (story.state.machines[MachineId("m0")].versions or {})
    assert not story.state.versions[V2].tried


def test_what_a_machine_need_not_keep_it_does_not_have() -> None:
    story = Story()
    story.tell("> 4 update bbbbbbbb\n> 5 held m0 m1 m2\n> 6 tried m2 problem=SyntaxError")
    assert V2 in (story.state.machines[MachineId("m0")].versions or {})
    story.tell("> 7 update cccccccc base=aaaaaaaa")
    assert story.state.machines[MachineId("m0")].versions == {V1: None}


def test_a_trial_goes_to_another_machine_when_its_own_is_gone() -> None:
    story = Story()
    story.tell("> 4 progress 150\n> 5 update bbbbbbbb\n> 6 held m0 m1 m2")
    decided = story.tell("> 7 MachineLost m2 witness=gone")
    (trial,) = [action for action in decided if isinstance(action, TryVersion)]
    assert (trial.machine, trial.beside_ranks) == ("m1", True)


def test_orders_about_code_outlive_a_restart() -> None:
    story = Story()
    story.tell("> 4 progress 150\n> 5 update bbbbbbbb lazy=600\n> 6 held m0 m2")
    before = {key for key, o in story.state.outstanding.items() if isinstance(o, HoldVersion)}
    story.tell("> 7 RankExited m1 rank=1 signal=9")
    assert before
    assert before <= story.state.outstanding.keys()
    assert any(isinstance(order, TryVersion) for order in story.state.outstanding.values())


def test_a_standby_that_gets_the_code_late_is_waited_for_when_it_is_woken() -> None:
    story = Story(RUNNING.replace("held m0 m1 m2", "held m0 m1"))
    story.tell("> 4 progress 150\n> 5 MachineLost m1 witness=gone")
    decided = story.tell("> 6 stopped m0 m2 copies=150 finished=150")
    assert not any(isinstance(action, StartRanks) for action in decided)
    decided = story.tell("> 7 held m2")
    assert [a.version for a in decided if isinstance(a, StartRanks)] == [V1, V1]


def test_every_patience_has_its_moment() -> None:
    story = Story()
    story.tell("> 4 progress 150\n> 5 update bbbbbbbb lazy=1000")
    policy = story.state.job.policy
    assert story.core.next_deadline() == 5 + policy.hold_within_s + policy.agent_return_s
    story.tell("> 6 not_held m0")
    assert story.core.next_deadline() == 16
    assert kinds(story.core.handle(TimerFired(), 16.0)) == ["HoldVersion"]
    story.tell("> 17 held m0 m1 m2")
    assert story.core.next_deadline() == 17 + policy.try_within_s + policy.agent_return_s
    story.tell("> 18 tried m2")
    assert story.core.next_deadline() == 1005
    assert "BeginGeneration" in kinds(story.core.handle(TimerFired(), 1005.0))


def test_a_trial_that_is_never_answered_is_made_elsewhere_and_then_given_up() -> None:
    story = Story()
    story.tell("> 4 progress 150\n> 5 update bbbbbbbb\n> 6 held m0 m1 m2")
    tries = [a.machine for a in story.decided if isinstance(a, TryVersion)]
    decided: list[ControllerAction] = []
    while "BeginGeneration" not in kinds(decided):
        at = story.core.next_deadline()
        assert at is not None
        decided = story.core.handle(TimerFired(), at)
        tries += [a.machine for a in decided if isinstance(a, TryVersion)]
    assert tries == ["m2", "m1", "m0"]


# --- steps that are done again -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answers", "sentence"),
    [
        (
            ["m0 first=141 last=150 compared=10", "m1 first=141 last=150 compared=10"],
            "losses of steps 141 to 150 came out bit for bit as before on 2 ranks",
        ),
        (
            ["m0 first=141 last=150 compared=0", "m1 first=141 last=150 compared=0"],
            "no loss of steps 141 to 150 could be compared: unknown from before, or not told now",
        ),
        (
            [
                "m0 first=141 last=150 differs=0:145 before=2 after=3",
                "m1 first=141 last=150 differs=1:144 before=2.5 after=2.75",
            ],
            (
                "rank 1's loss of step 144 was 2.5, now it is 2.75: the first of steps 141 to 150"
                " that has other bits"
            ),
        ),
    ],
)
def test_what_came_of_steps_that_were_done_again(answers: list[str], sentence: str) -> None:
    story = Story(RUNNING)
    story.tell("> 4 progress 150\n> 5 update bbbbbbbb overlap=10 untried=yes\n> 6 held m0 m1 m2")
    decided = story.tell("> 7 stopped m0 m1 copies=140,149,150 finished=150")
    assert [a.restore for a in decided if isinstance(a, StartRanks)] == [140, 140]
    assert [a.compare_through for a in decided if isinstance(a, StartRanks)] == [150, 150]
    story.tell("> 8 started m0 m1\n> 9 progress 151")
    told = [story.tell(f"> {10 + n} compared {answer}") for n, answer in enumerate(answers)]
    assert story.state.versions[V2].repeats == sentence
    assert kinds(told[1]) == (["PageHuman"] if "other bits" in sentence else [])


def test_losses_are_compared_on_when_a_machine_goes_before_they_got_that_far() -> None:
    story = Story()
    story.tell("> 4 progress 150\n> 5 update bbbbbbbb overlap=10 untried=yes\n> 6 held m0 m1 m2")
    story.tell("> 7 stopped m0 m1 copies=140,150 finished=150\n> 8 started m0 m1")
    story.tell("> 9 progress 145\n> 9.5 MachineLost m1 witness=gone")
    decided = story.tell("> 10 stopped m0 m2 copies=144,145 finished=145")
    starts = [action for action in decided if isinstance(action, StartRanks)]
    assert [(s.restore, s.compare_through) for s in starts] == [(145, 150), (145, 150)]


def test_losses_are_not_compared_under_the_code_that_is_rolled_back_to() -> None:
    story = Story()
    story.tell("> 4 progress 150\n> 5 update bbbbbbbb overlap=10 untried=yes\n> 6 held m0 m1 m2")
    story.tell("> 7 stopped m0 m1 copies=140,150 finished=150\n> 8 started m0 m1")
    story.tell("> 9 RankExited m1 rank=1 signal=9")
    decided = story.tell("> 10 stopped m0 m1 copies=144,145 finished=145")
    assert "SwitchCode" in kinds(decided)
    starts = [action for action in decided if isinstance(action, StartRanks)]
    assert [(s.version, s.compare_through) for s in starts] == [(V1, -1), (V1, -1)]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (86400, "24 h"), (3e5, "3 days")],
)
def test_times_are_said_as_people_say_them(seconds: float, words: str) -> None:
    assert span(seconds) == words


# --- what is not to blame ------------------------------------------------------------------------


def test_an_update_that_was_made_without_what_was_just_put_in_place_is_refused() -> None:
    story = Story()
    story.tell("> 4 progress 150")
    story.put_in_place(10, V2, 150)
    decided = story.tell(f"> 11 update {V3} base={V1}")
    refused = next(action for action in decided if isinstance(action, RefuseUpdate))
    assert "made without v2 (bbbbbbbb), which was put in place a moment before" in refused.why


def test_one_that_waits_keeps_its_place_when_it_is_sent_again() -> None:
    story = Story()
    story.tell(f"> 4 progress 150\n> 5 update {V2} lazy=86400\n> 6 update {V3} lazy=86400")
    assert not [a for a in story.tell(f"> 7 update {V2}") if isinstance(a, RefuseUpdate)]
    assert [book.code.version for book in story.state.versions.values()] == [V1, V2, V3]
    assert story.state.versions[V2].urgent


def test_one_that_comes_back_later_is_not_what_waiting_ones_were_made_without() -> None:
    story = Story()
    story.tell("> 4 progress 150")
    story.put_in_place(10, V2, 150)
    story.tell("> 11 rollback")
    story.restart(12, 151)
    story.tell(f"> 20 update {V3} base={V1} lazy=86400")
    decided = story.tell(f"> 21 update {V2} base={V1} lazy=86400")
    assert [a.version for a in decided if isinstance(a, RefuseUpdate)] == [V2]


def test_a_class_of_failure_that_came_before_in_the_same_recovery_is_not_the_new_code() -> None:
    story = Story()
    story.tell("> 4 progress 150")
    story.put_in_place(10, V2, 150)
    story.tell("> 20 progress 300")
    story.tell(f"> 25 update {V3} untried=yes lazy=86400\n> 25.1 held m0 m1 m2 version={V3}")
    story.tell("> 30 RankExited m1 rank=1 signal=11")
    story.restart(30.2, 300)
    assert story.state.version == V3, "it rode on that restart"
    story.tell("> 32 RankExited m1 rank=1 signal=11")
    story.restart(32.2, 300)
    assert story.state.version == V3
    assert "signal 11 came under v2 (bbbbbbbb) as well" in story.state.incidents[-1].rungs[-1].why


def test_the_job_goes_back_to_what_all_have_if_most_cannot_get_the_update() -> None:
    story = Story()
    story.tell("> 4 progress 150\n> 5 RankExited m1 rank=1 signal=9")
    story.tell(f"> 5.1 update {V2} untried=yes")
    story.tell("> 5.2 stopped m0 m1 copies=150 finished=150")
    assert story.state.version == V2, "its time has come, and nobody has failed to get it yet"
    decided: list[ControllerAction] = []
    for at in (6.0, 17.0, 28.0):
        decided += story.tell(f"> {at} not_held m0 m1 m2 version={V2}\n> {at + 10.5} TimerFired")
    back = next(action for action in decided if isinstance(action, SwitchCode))
    assert (back.version, back.rolled_back) == (V1, True)
    assert "2 of 2 machines could not get the code" in back.why
    starts = [action for action in decided if isinstance(action, StartRanks)]
    assert {start.version for start in starts} == {V1}


def test_a_rollback_that_machines_cannot_get_is_given_up_and_said() -> None:
    story = Story()
    story.tell("> 4 progress 150")
    story.put_in_place(10, V2, 150)
    story.tell("> 20 join m0 shard_port=7000 generation=2 versions=bbbbbbbb")
    story.tell("> 20.1 join m1 shard_port=7000 generation=2 versions=bbbbbbbb")
    story.tell("> 20.2 join m2 shard_port=7000 versions=bbbbbbbb")
    decided = story.tell("> 21 rollback")
    for at in (22.0, 33.0, 44.0):
        decided += story.tell(f"> {at} not_held m0 m1 m2 version={V1}\n> {at + 10.5} TimerFired")
    told = [action.why for action in decided if isinstance(action, PageHuman)]
    assert len(told) == 1
    assert "there is no rollback, since m0: it could not get v1 (aaaaaaaa) in 3 attempts" in told[0]
    assert story.state.rollback is None


def test_a_machine_that_has_the_code_and_is_silent_for_a_moment_shows_that_it_can_be_had() -> None:
    """Of two machines one cannot get it: the job waits for another one in its place."""
    story = Story(
        """
> 0 job nnodes=2 nproc=1 standbys=0 disk_every=0 code=aaaaaaaa
> 1 join m0 m1 shard_port=7000
> 1.1 held m0
> 2 stopped m0 m1
"""
    )
    story.tell("> 3 not_held m1\n> 14 TimerFired\n> 15 not_held m1\n> 26 TimerFired")
    decided = story.tell("> 26.5 MachineSilent m0\n> 27 not_held m1")
    assert "FinishJob" not in kinds(decided)
    assert [a.machine for a in decided if isinstance(a, EvictMachine)] == ["m1"]


def test_silent_machines_keep_nobody_from_getting_the_update() -> None:
    names = " ".join(f"m{n}" for n in range(8))
    story = Story(
        f"""
> 0 job nnodes=8 nproc=1 standbys=0 disk_every=0 code=aaaaaaaa
> 1 join {names}
> 1.1 held m0 m1 m2 m3
> 1.2 held m4 m5 m6 m7
> 2 stopped {names}
> 3 started {names}
> 4 progress 10
"""
    )
    story.tell(f"> 5 update {V2}")
    asked = [order.machine for order in story.orders(HoldVersion)]
    assert asked == ["m0", "m1", "m2", "m3"], "the controller serves so many at once"
    decided = story.tell(f"> 6 MachineSilent {' '.join(asked)}")
    more = [order.machine for order in decided if isinstance(order, HoldVersion)]
    assert more == ["m4", "m5", "m6", "m7"]


def test_a_trial_is_waited_for_anew_by_a_new_controller() -> None:
    story = Story()
    story.tell(f"> 4 progress 10\n> 5 update {V2}\n> 5.1 held m0 m1 m2 version={V2}")
    story.tell('> 600 ControllerStarted term=2 version="0"')
    decided = story.tell("> 601 join m2 shard_port=7000 ready=yes versions=aaaaaaaa,bbbbbbbb")
    assert not [action for action in decided if isinstance(action, TryVersion)]
    story.tell("> 602 tried m2")
    assert story.state.versions[V2].tried


def test_a_machine_that_saves_its_step_before_a_planned_stop_gets_the_time_for_it() -> None:
    story = Story()
    story.tell(f"> 4 progress 10\n> 5 update {V2} untried=yes\n> 5.1 held m0 m1 m2 version={V2}")
    assert "EvictMachine" not in kinds(story.tell("> 5.5 stopped m0\n> 21 TimerFired"))
    assert "EvictMachine" in kinds(story.tell("> 30.2 TimerFired"))


def test_a_restart_in_which_the_update_was_not_put_in_place_is_not_its_failure() -> None:
    story = Story()
    story.tell(f"> 4 progress 150\n> 5 update {V2} untried=yes\n> 5.1 not_held m2 version={V2}")
    story.tell(f"> 5.2 held m0 m1 version={V2}\n> 5.3 MachineLost m1 witness=gone")
    story.tell("> 5.4 stopped m0 m2 copies=150 finished=150\n> 6 started m0 m2")
    (first,) = story.state.incidents[-1].rungs
    assert (first.rung, story.state.version) == (Rung.HOT_UPDATE, V1)
    story.tell("> 7 RankExited m2 rank=1 signal=11\n> 7.1 stopped m0 m2 copies=150 finished=150")
    assert "nothing points at a machine or at code" in story.state.incidents[-1].rungs[-1].why
