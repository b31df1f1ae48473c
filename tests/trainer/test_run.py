"""Steps, reports and heartbeats: what the agent sees of a loop, and that a loop sees no trouble."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from everstep import attach
from everstep.model import NO_GENERATION, Rank
from everstep.trainer.context import VARIABLE
from everstep.trainer.heartbeat import Heartbeat, Phase, SlotReader, SlotWriter
from everstep.trainer.metrics import Metrics, Scalar
from everstep.trainer.notices import NoticeKind, Notices
from everstep.trainer.run import Run
from tests.checkpoint.objects import Box
from tests.trainer.surroundings import Surroundings
from tests.trainer.training import train

SECOND_NS = 1_000_000_000


def detached() -> Run:
    return Run(None, Notices(None, Rank(-1), NO_GENERATION), None)


# --- steps and heartbeats ------------------------------------------------------------------------


def test_a_step_is_finished_when_the_loop_asks_for_the_next(here: Surroundings) -> None:
    run = here.run()
    steps = run.steps(start=3, stop=6)
    seen = [(step, here.beat().step, here.beat().phase) for step in steps]
    assert seen == [(3, -1, Phase.TRAINING), (4, 3, Phase.TRAINING), (5, 4, Phase.TRAINING)]
    assert (here.beat().step, here.beat().phase) == (5, Phase.ENDED)


def test_a_loop_that_breaks_off_has_not_finished_its_last_step(here: Surroundings) -> None:
    for step in here.run().steps():
        if step == 2:
            break
    assert (here.beat().step, here.beat().phase) == (1, Phase.TRAINING)


def test_a_loop_of_the_scripts_own_is_seen_by_its_saves(here: Surroundings) -> None:
    checkpoint = here.run().checkpoint({"box": Box(1)})
    checkpoint.save(0)
    checkpoint.save(1)
    assert here.beat().step == 1


def test_numbers_reach_the_heartbeat(here: Surroundings) -> None:
    run = here.run(peak_flops=1e12)
    for _ in run.steps(stop=2):
        run.report(loss=torch.tensor(2.5, requires_grad=True), grad_norm=0.5, tokens=100, flops=1e6)
    beat = here.beat()
    assert (beat.loss, beat.grad_norm) == (2.5, 0.5)
    assert beat.step_s > 0
    assert beat.tokens_per_s == pytest.approx(100 / beat.step_s)
    assert run.tokens_per_s == beat.tokens_per_s
    assert run.mfu == pytest.approx(1e6 / beat.step_s / 1e12)


def test_the_first_step_whose_loss_is_not_finite_stays_in_the_heartbeat(here: Surroundings) -> None:
    run = here.run()
    for step in run.steps(stop=6):
        assert here.beat().bad_step == (2 if step > 2 else -1), "no loss is no bad loss"
        if step:
            run.report(loss=math.inf if step in {2, 4} else 1.0)
    assert (here.beat().loss, here.beat().bad_step) == (1.0, 2)


def test_a_step_done_again_with_other_bits_is_seen_where_bits_can_be_compared(
    here: Surroundings,
) -> None:
    def train(generation: int, losses: dict[int, float]) -> int:
        run = here.run(generation)
        for step in run.steps(start=min(losses), stop=max(losses) + 1):
            run.report(loss=losses[step])
        return here.beat().differs_step

    first = {step: 1 / (step + 3) for step in range(8)}
    assert train(1, first) == -1
    flipped = first | {7: math.nextafter(first[7], 1.0)}
    assert train(2, flipped) == -1, "nobody asked for the same bits"
    torch.use_deterministic_algorithms(mode=True)
    try:
        assert train(3, first) == -1, "nothing was kept before"
        assert train(4, {step: first[step] for step in range(5, 8)}) == -1
        assert train(5, {step: flipped[step] for step in range(5, 8)}) == 7
        assert train(6, dict.fromkeys(range(5, 8), 2.0)) == -1, "other data from the start"
    finally:
        torch.use_deterministic_algorithms(mode=False)


def test_the_identity_in_the_slot_stays_the_one_that_the_agent_watches(here: Surroundings) -> None:
    written = Heartbeat(generation=4, rank=0, pid=77, start_ticks=88)
    SlotWriter(here.shm / "heartbeat", 0).write(written)
    here.run(generation=4)
    assert (here.beat().pid, here.beat().start_ticks, here.beat().attached) == (77, 88, True)
    here.run(generation=5)
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    assert (here.beat().pid, here.beat().start_ticks) == (os.getpid(), int(stat[19]))


@pytest.mark.parametrize("bad", ["a loss", object(), torch.ones(3)])
def test_a_report_that_makes_no_sense_costs_the_reports_and_not_the_training(
    here: Surroundings, bad: Any
) -> None:
    run = here.run()
    steps = []
    for step in run.steps(stop=3):
        run.report(loss=bad)
        steps.append(step)
    assert steps == [0, 1, 2]
    assert here.kinds() == [NoticeKind.REPORTS_OFF]


def test_a_slot_that_cannot_be_written_costs_the_reports_and_not_the_training(
    here: Surroundings,
) -> None:
    (here.shm / "heartbeat").mkdir()
    assert list(here.run().steps(stop=3)) == [0, 1, 2]
    assert here.kinds() == [NoticeKind.REPORTS_OFF]


def test_a_second_checkpoint_is_refused_and_the_first_goes_on(here: Surroundings) -> None:
    run = here.run()
    first = run.checkpoint({"box": Box(1)})
    second = run.checkpoint({"box": Box(2)})
    first.save(0)
    second.save(1)
    run.flush(20)
    assert here.steps_in_memory() == [0]
    assert here.kinds() == [NoticeKind.CHECKPOINT_OFF]


# --- metrics -------------------------------------------------------------------------------------


def test_throughput_is_per_second_of_the_newest_step() -> None:
    metrics = Metrics(peak_flops=100.0)
    metrics.start(SECOND_NS)
    metrics.report(loss=None, grad_norm=None, tokens=50, flops=40)
    metrics.finish_step(3 * SECOND_NS)
    assert (metrics.step_s, metrics.tokens_per_s, metrics.mfu) == (2.0, 25.0, 0.2)
    metrics.finish_step(4 * SECOND_NS)
    assert (metrics.step_s, metrics.tokens_per_s, metrics.mfu) == (1.0, 50.0, 0.4)


def test_what_is_not_known_is_not_a_number() -> None:
    metrics = Metrics(peak_flops=None)
    metrics.finish_step(SECOND_NS)
    assert all(math.isnan(x) for x in (metrics.step_s, metrics.tokens_per_s, metrics.mfu))


class OnDevice:
    """A tensor on a device whose value has not arrived."""

    is_cuda = True


class Event:
    def __init__(self) -> None:
        self.reached = False

    def query(self) -> bool:
        return self.reached


def test_a_number_on_the_device_is_read_when_it_has_arrived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events = [Event(), Event()]
    coming = iter([(events[0], 1.0), (events[1], 2.0)])
    monkeypatch.setattr("everstep.trainer.metrics._fetch", lambda _: next(coming))
    scalar = Scalar()
    scalar.offer(OnDevice())
    assert math.isnan(scalar.poll())
    scalar.offer(OnDevice())
    events[0].reached = True
    assert scalar.poll() == 1.0
    scalar.offer(OnDevice())
    events[1].reached = True
    assert scalar.poll() == 2.0


# --- attach --------------------------------------------------------------------------------------


def test_outside_everstep_a_run_counts_steps_and_keeps_nothing() -> None:
    run = detached()
    assert not run.attached
    checkpoint = run.checkpoint({"anything": object()})  # type: ignore[dict-item]
    assert checkpoint.restore() == 0
    for step in run.steps(start=checkpoint.restore(), stop=3):
        run.report(loss=1.0, tokens=10)
        checkpoint.save(step)
        checkpoint.wait()
    assert run.tokens_per_s > 0
    assert checkpoint.saved_step == -1


def test_the_same_loop_runs_outside_everstep() -> None:
    assert len(train(detached(), 3)) == 3


def test_attaching_again_gives_the_same_run() -> None:
    assert attach() is attach()


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_importing_everstep_does_not_import_torch_or_anything_but_msgspec() -> None:
    code = (
        "import sys, everstep; everstep.attach();"
        "print([m for m in ('torch', 'numpy', 'psutil', 'starlette', 'asyncio', 'websockets')"
        " if m in sys.modules])"
    )
    done = python(code)
    assert (done.stdout, done.stderr) == ("[]\n", "")


CHILDREN = """
import multiprocessing, os, subprocess, sys
import everstep

class Box:
    def state_dict(self):
        return bytes(10_000_000)

    def load_state_dict(self, state):
        pass

def child(queue):
    queue.put(everstep.attach().attached)

if __name__ == "__main__":
    run = everstep.attach()
    assert run.attached and everstep.attach() is run
    assert "EVERSTEP_ATTACH" not in os.environ
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        print(method, queue.get())
        process.join()
    code = "import everstep; print('program', everstep.attach().attached)"
    subprocess.run([sys.executable, "-c", code], check=True)
    for step in run.steps(stop=4):
        pass
    run.checkpoint({"box": Box()}).save(9)
"""


def test_only_the_rank_itself_is_attached_not_its_children(
    here: Surroundings, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(CHILDREN)
    context = msgspec.json.encode(here.context()).decode()
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        env=os.environ | {VARIABLE: context, "LOCAL_WORLD_SIZE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    (said,) = done.stderr.splitlines()
    assert said.startswith("everstep: checkpoints in memory take ")
    assert sorted(done.stdout.split("\n")) == ["", "fork False", "program False", "spawn False"]
    assert here.beat().step == 9
    assert here.steps_in_memory() == [9], "the last save is complete when the process has ended"


@pytest.mark.parametrize("garbage", ["", "{", "[]", '{"rank": 1}'])
def test_a_garbled_environment_is_one_sentence_and_no_run(garbage: str) -> None:
    done = python("import everstep; print(everstep.attach().attached)", **{VARIABLE: garbage})
    assert done.stdout == "False\n"
    assert done.stderr.count("\n") == 1
    assert "attach() is off" in done.stderr


# --- notices -------------------------------------------------------------------------------------


def test_notices_are_dropped_when_nobody_takes_them(here: Surroundings) -> None:
    notices = Notices(here.notice_path, Rank(0), NO_GENERATION)
    for number in range(5000):
        notices.send(NoticeKind.ADVICE, f"number {number}")
    received = here.notices()
    assert 0 < len(received) < 5000
    assert received[0].text == "number 0"


def test_notices_without_an_agent_are_no_trouble(tmp_path: Path) -> None:
    gone = tmp_path / "gone.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as once:
        once.bind(str(gone))
    for path in (gone, tmp_path / "never.sock"):
        Notices(path, Rank(0), NO_GENERATION).send(NoticeKind.ADVICE, "anyone?")


def test_a_rank_says_since_when_it_communicates(here: Surroundings) -> None:
    reader = SlotReader(here.shm / "heartbeat", 1)
    run = here.run()
    steps = run.steps()
    next(steps)
    assert reader.communicating_since() == [0]
    before = time.monotonic_ns()
    with run.communicating():
        (since,) = reader.communicating_since()
        assert before <= since <= time.monotonic_ns()
        with run.communicating():
            next(steps)  # a slot may be written meanwhile
            assert reader.communicating_since() == [since]
        assert reader.communicating_since() == [since]
    assert reader.communicating_since() == [0]

    with pytest.raises(ValueError, match="of the script"), run.communicating():
        raise ValueError("of the script")
    assert reader.communicating_since() == [0]

    run.communicating().__enter__()  # and is killed in the middle
    assert reader.communicating_since() != [0]
    here.run(generation=2)
    assert reader.communicating_since() == [0]


def test_outside_everstep_communicating_is_nothing() -> None:
    with detached().communicating():
        pass
