"""The controller process: its start, its end, its death, its rivals. Agents here are sockets."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

from everstep.actions import PersistStep, ReleaseMachine, StopRanks
from everstep.core.state import Phase
from everstep.events import (
    MachineProgress,
    MachinesRequested,
    RankExited,
    RanksSurvived,
    StepPersisted,
)
from everstep.files import read_json
from everstep.journal import newest_term
from everstep.journal.records import Reader
from everstep.keeper import EXIT_RELEASE
from everstep.model import ExitStatus, Generation, Rank, RankStatus, Step
from everstep.paths import JobPaths, JobResult
from tests.controller.support import (
    Controller,
    FakeAgent,
    controller,
    wait_for,
)

CLEAN = ExitStatus(code=0)


def events(paths: JobPaths) -> list[str]:
    return [type(entry.record.event).__name__ for entry in Reader(paths.journal / "records")]


def rank_exited(agent: FakeAgent, generation: int) -> RankExited:
    return RankExited(
        machine=agent.machine, generation=Generation(generation), rank=Rank(0), exit=CLEAN
    )


def test_a_job_runs_from_the_first_machine_to_its_result(
    running: Controller, paths: JobPaths, agent: FakeAgent
) -> None:
    start = agent.start(running.endpoint().url)
    wait_for("running", lambda: running.status().phase is Phase.RUNNING)
    agent.report(rank_exited(agent, start.generation))
    agent.stop_ranks()
    agent.leave()
    assert running.ends_with() == EXIT_RELEASE
    result = read_json(paths.result, JobResult)
    assert (result.outcome, result.exit_code) == ("finished", 0)
    assert result.why == "all 1 ranks ended with exit code 0"


def test_a_killed_controller_comes_back_under_the_next_term_and_no_report_is_lost_or_doubled(
    paths: JobPaths, agent: FakeAgent
) -> None:
    with controller(paths) as first:
        start = agent.start(first.endpoint().url)
        wait_for("running", lambda: first.status().phase is Phase.RUNNING)
        assert agent.acknowledged()
        before = events(paths)
        first.kill()
    agent.disconnect()
    agent.report(rank_exited(agent, start.generation))  # buffered: nobody is there
    with controller(paths, "--resume-if-needed") as second:
        agent.connect(second.endpoint().url)
        assert agent.term == 2
        running = RankStatus(rank=Rank(0), generation=start.generation, pid=1, exit=CLEAN)
        agent.join(generation=start.generation, ranks=(running,))
        agent.stop_ranks()
        agent.leave()
        assert second.ends_with() == EXIT_RELEASE
    after = events(paths)
    assert after[: len(before)] == before
    assert after.count("RankExited") == 1
    assert after.count("RanksStarted") == 1
    assert after.count("ControllerStarted") == 2


def test_a_restarted_controller_listens_where_it_did_and_disturbs_no_running_rank(
    paths: JobPaths, agent: FakeAgent
) -> None:
    with controller(paths) as first:
        url = first.endpoint().url
        start = agent.start(url)
        wait_for("running", lambda: first.status().phase is Phase.RUNNING)
        first.kill()
    agent.disconnect()
    with controller(paths, "--resume-if-needed") as second:
        assert second.endpoint().url == url
        agent.connect(url)
        running = RankStatus(rank=Rank(0), generation=start.generation, pid=1)
        agent.join(generation=start.generation, ranks=(running,))
        assert agent.acknowledged()
        assert agent.orders == [agent.orders[0], start], "one StopRanks, one StartRanks, ever"
        assert second.status().phase is Phase.RUNNING
        assert second.status().generation == start.generation


def test_an_order_without_an_answer_is_given_again_by_the_next_term(
    paths: JobPaths, agent: FakeAgent
) -> None:
    with controller(paths) as first:
        agent.connect(first.endpoint().url)
        agent.join()
        stop = agent.order(StopRanks)
        first.kill()
    agent.disconnect()
    with controller(paths, "--resume-if-needed") as second:
        agent.connect(second.endpoint().url)
        agent.orders.clear()
        agent.join()
        assert agent.order(StopRanks) == stop


def test_a_port_that_somebody_else_took_meanwhile_is_replaced_by_another(
    paths: JobPaths,
) -> None:
    with controller(paths) as first:
        url = first.endpoint().url
        first.kill()
    port = int(url.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)), controller(paths, "--resume") as second:
        assert second.endpoint().url != url
        assert second.status().term == 2


def test_a_port_in_use_that_was_asked_for_is_one_sentence_and_touches_nothing(
    paths: JobPaths,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with controller(paths, "--port", str(port)) as refused:
            assert refused.ends_with() == 2
        assert refused.log.read_text() == (
            f"everstep controller: cannot listen on 127.0.0.1, port {port}: Address already in"
            " use; give another --port, or end what listens there\n"
        )
        assert newest_term(paths.journal) == 0


def test_a_second_controller_names_the_living_one_and_leaves_it_alone(
    running: Controller, paths: JobPaths
) -> None:
    endpoint = running.endpoint()
    log = running.log.read_text()
    with controller(paths) as second:
        assert second.ends_with() == 1
    assert second.log.read_text().removeprefix(log) == (
        f"everstep controller: job {paths.root.name} has a living controller at {endpoint.url}"
        f" (term 1, pid {endpoint.pid}): add --resume to replace it\n"
    )
    assert running.status().term == 1


def test_a_fenced_controller_stops_by_itself_and_touches_nothing_more(
    running: Controller, paths: JobPaths, agent: FakeAgent
) -> None:
    agent.connect(running.endpoint().url)
    agent.join()
    with controller(paths, "--resume") as second:
        url = second.endpoint().url
        assert running.ends_with() == 3
        assert "Term 2 of this job has begun" in running.log.read_text()
        assert second.endpoint().url == url, "the fenced one did not take endpoint.json back"
        assert second.status().term == 2
        assert not paths.result.exists()


def test_what_a_keeper_starts_waits_for_the_end_of_a_living_controller_and_then_takes_over(
    running: Controller, paths: JobPaths
) -> None:
    running.endpoint()
    with controller(paths, "--resume-if-needed") as waiting:
        wait_for("it waits", lambda: "waiting here to take over" in waiting.log.read_text())
        assert newest_term(paths.journal) == 1
        running.kill()
        assert waiting.endpoint().term == 2


def test_a_signal_ends_the_controller_alone(
    running: Controller, paths: JobPaths, agent: FakeAgent
) -> None:
    agent.start(running.endpoint().url)
    assert running.kill(signal.SIGTERM) == 0
    assert not paths.result.exists()
    assert "told to end; training goes on" in running.log.read_text()


def test_a_torn_journal_is_cut_with_a_message_and_the_job_goes_on(paths: JobPaths) -> None:
    with controller(paths) as first:
        first.endpoint()
        first.kill()
    records = paths.journal / "records"
    whole = records.read_bytes()
    records.write_bytes(whole + whole[: len(whole) // 3])
    with controller(paths, "--resume") as second:
        notes = second.status().notes
    assert any("goes on from record 3" in note for note in notes), notes


def test_a_job_that_is_over_is_not_controlled_again(running: Controller, paths: JobPaths) -> None:
    running.endpoint()
    running.kill()
    paths.result.write_text("{}")
    with controller(paths, "--resume") as again:
        assert again.ends_with() == 2
    assert "is over" in again.log.read_text()
    with controller(paths, "--resume-if-needed") as kept:
        assert kept.ends_with() == EXIT_RELEASE


def test_a_state_directory_that_cannot_be_written_is_one_sentence(paths: JobPaths) -> None:
    paths.journal.write_text("in the way of the directory, also for root")
    with controller(paths) as refused:
        assert refused.ends_with() == 1
    said = refused.log.read_text()
    assert said.startswith("everstep controller: The journal cannot be written at ")
    assert said.count("\n") == 1


def test_a_missing_or_broken_job_directory_is_one_sentence(paths: JobPaths) -> None:
    paths.spec.write_text("{")
    with controller(paths) as refused:
        assert refused.ends_with() == 1
    assert "spec.json is not what it should be" in refused.log.read_text()
    paths.spec.unlink()
    with controller(paths) as refused:
        assert refused.ends_with() == 1
    assert refused.log.read_text().splitlines()[-1] == (
        f"everstep controller: cannot read {paths.spec}: No such file or directory"
    )


def test_a_controller_told_to_kill_itself_does_so_once(
    running: Controller, paths: JobPaths, agent: FakeAgent
) -> None:
    agent.start(running.endpoint().url)
    wait_for("running", lambda: running.status().phase is Phase.RUNNING)
    assert running.post("/v1/inject", {"fault": "kill-controller"}).status_code == 200
    assert running.ends_with() == -signal.SIGKILL
    with controller(paths, "--resume-if-needed") as second:
        assert second.status().term == 2
        assert events(paths).count("FaultInjected") == 1


def test_progress_becomes_one_event_a_second_at_most(
    running: Controller, paths: JobPaths, agent: FakeAgent
) -> None:
    start = agent.start(running.endpoint().url)
    wait_for("running", lambda: running.status().phase is Phase.RUNNING)
    for step in range(100):
        agent.mention(
            MachineProgress(
                machine=agent.machine,
                generation=start.generation,
                slowest=Step(step),
                fastest=Step(step),
                step_s=0.1,
            )
        )
    wait_for("the newest step", lambda: running.status().finished_by_all == 99)
    assert events(paths).count("StepProgress") <= 3


def test_the_start_of_a_controller_is_cheap(running: Controller) -> None:
    pid = running.endpoint().pid
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[11:13]
    spent_s = (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    assert spent_s < 0.7, "a killed controller must be back within about a second"


def test_a_machine_that_cannot_be_replaced_by_us_is_asked_for_in_words(
    running: Controller, paths: JobPaths, agent: FakeAgent
) -> None:
    agent.connect(running.endpoint().url)
    agent.join()
    stop = agent.order(StopRanks)
    agent.report(
        RanksSurvived(machine=agent.machine, action=stop.id, generation=stop.generation, pids=(17,))
    )
    agent.order(ReleaseMachine)
    wait_for("the request", lambda: "MachinesRequested" in events(paths))
    records = [entry.record.event for entry in Reader(paths.journal / "records")]
    (requested,) = [event for event in records if isinstance(event, MachinesRequested)]
    assert "no scheduler to ask for 1 more host" in requested.reason
    assert running.endpoint().url in requested.reason
    assert requested.reason in running.status().notes


def test_a_step_that_cannot_be_published_is_told_and_training_goes_on(
    running: Controller, paths: JobPaths, agent: FakeAgent
) -> None:
    start = agent.start(running.endpoint().url)
    wait_for("running", lambda: running.status().phase is Phase.RUNNING)
    agent.mention(
        MachineProgress(
            machine=agent.machine,
            generation=start.generation,
            slowest=Step(60),
            fastest=Step(60),
            step_s=0.1,
        )
    )
    persist = agent.order(PersistStep)
    agent.report(StepPersisted(machine=agent.machine, action=persist.id, step=persist.step))
    wait_for("the answer", lambda: "StepPublished" in events(paths))
    assert f"step {persist.step} was not published: " in running.log.read_text()
    assert running.status().published == ()
    assert running.status().phase is Phase.RUNNING
