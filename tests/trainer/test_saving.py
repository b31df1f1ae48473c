"""Saving never raises into training, never waits without need, and never keeps a torn copy."""

from __future__ import annotations

import os
import resource
import threading
import time
from typing import Any

import pytest
import torch

from everstep.checkpoint.pins import pin_for_disk
from everstep.model import Rank, Step
from everstep.trainer.notices import NoticeKind
from tests.checkpoint.lockstep import fork
from tests.checkpoint.objects import Box
from tests.trainer.surroundings import Surroundings
from tests.trainer.training import Training, train

FLUSH_S = 60.0


def sgd() -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    return model, optimizer


def test_every_save_is_kept_and_seen_in_the_heartbeat(here: Surroundings) -> None:
    train(here.run(), 6)
    assert here.steps_in_memory() == [2, 3, 4, 5]
    assert here.kinds() == []


def test_the_optimizer_waits_until_the_copy_is_committed(here: Surroundings) -> None:
    model, optimizer = sgd()
    run = here.run()
    checkpoint = run.checkpoint({"model": model, "optimizer": optimizer})
    for step in range(50):
        checkpoint.save(step)
        optimizer.step()
        assert checkpoint.saved_step == step
    assert here.kinds() == []


def test_changing_a_parameter_behind_the_optimizer_voids_the_copy_and_says_so(
    here: Surroundings, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = sgd()
    run = here.run()
    checkpoint = run.checkpoint({"model": model, "optimizer": optimizer})
    checkpoint.save(0)
    optimizer.step()
    for step in (1, 2):
        checkpoint.save(step)
        with torch.no_grad():
            model.weight.clamp_(-1, 1)
        optimizer.step()
    assert here.steps_in_memory() == [0]
    assert checkpoint.saved_step == 0
    notices = here.notices()
    assert [(n.kind, n.step) for n in notices] == [
        (NoticeKind.SAVE_TORN, 1),
        (NoticeKind.SAVE_TORN, 2),
    ]
    assert "'model' was changed" in notices[0].text
    assert capsys.readouterr().err.count("Call ckpt.wait()") == 1


def test_waiting_before_the_change_keeps_the_copy(here: Surroundings) -> None:
    model, optimizer = sgd()
    run = here.run()
    checkpoint = run.checkpoint({"model": model, "optimizer": optimizer})
    checkpoint.save(0)
    checkpoint.wait()
    with torch.no_grad():
        model.weight.clamp_(-1, 1)
    optimizer.step()
    assert here.steps_in_memory() == [0]


class Plain:
    """An optimizer of another make."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.sub_(0.1)

    def zero_grad(self) -> None: ...
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None: ...


def test_an_optimizer_without_hooks_turns_checkpoints_off_until_the_script_promises_to_wait(
    here: Surroundings, capsys: pytest.CaptureFixture[str]
) -> None:
    model, _ = sgd()
    run = here.run()
    run.checkpoint({"model": model, "optimizer": Plain(model)}).save(0)
    assert here.kinds() == [NoticeKind.CHECKPOINT_OFF]
    assert "training goes on: 'optimizer' is a Plain" in capsys.readouterr().err
    assert here.steps_in_memory() == []


@pytest.mark.parametrize("waits", [True, False])
def test_with_explicit_wait_only_copies_that_were_waited_for_are_kept(
    here: Surroundings, *, waits: bool
) -> None:
    model, _ = sgd()
    optimizer = Plain(model)
    run = here.run()
    checkpoint = run.checkpoint({"model": model, "optimizer": optimizer}, explicit_wait=True)
    for step in range(3):
        checkpoint.save(step)
        if waits:
            checkpoint.wait()
        optimizer.step()
    run.flush(FLUSH_S)
    assert here.steps_in_memory() == ([0, 1, 2] if waits else [])
    assert here.kinds() == [] if waits else [NoticeKind.SAVE_TORN] * 3


def test_a_model_without_its_optimizer_is_copied_at_once_and_advised(here: Surroundings) -> None:
    model, _ = sgd()
    run = here.run()
    checkpoint = run.checkpoint({"model": model})
    checkpoint.save(0)
    with torch.no_grad():
        model.weight.zero_()
    run.flush(FLUSH_S)
    assert here.steps_in_memory() == [0]
    assert here.kinds() == [NoticeKind.ADVICE]


@pytest.mark.parametrize("bad", [7, object(), Box])
def test_an_entry_without_state_dict_turns_checkpoints_off_and_is_named(
    here: Surroundings, bad: Any
) -> None:
    run = here.run()
    run.checkpoint({"thing": bad}).save(0)
    (notice,) = here.notices()
    assert notice.kind == NoticeKind.CHECKPOINT_OFF
    assert "'thing'" in notice.text


def test_a_copy_thread_that_dies_keeps_nobody_waiting(here: Surroundings) -> None:
    (here.shm / "rank-0").touch()  # where its slots should be
    model, optimizer = sgd()
    run = here.run()
    checkpoint = run.checkpoint({"model": model, "optimizer": optimizer})
    for step in range(20):
        checkpoint.save(step)
        optimizer.step()
    run.flush(FLUSH_S)
    deadline = time.monotonic() + FLUSH_S
    told: list[NoticeKind] = []  # by the dying thread, which holds nobody up for it
    while not told and time.monotonic() < deadline:
        told = here.kinds()
        time.sleep(0.001)
    assert told == [NoticeKind.CHECKPOINT_OFF]


def test_optimizers_that_step_inside_backward_wait_too(here: Surroundings) -> None:
    model = torch.nn.Linear(40, 40)
    optimizers = {
        name: torch.optim.SGD([parameter], lr=0.1) for name, parameter in model.named_parameters()
    }
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: optimizers[name].step())
    run = here.run()
    checkpoint = run.checkpoint({"model": model, **optimizers})
    for step in range(10):
        model(torch.ones(2, 40)).sum().backward()
        checkpoint.save(step)
    run.flush(FLUSH_S)
    assert here.steps_in_memory() == [6, 7, 8, 9]
    assert here.kinds() == []


class Exploding(Box):
    def state_dict(self) -> Any:
        if self.value == "armed":
            raise RuntimeError("boom")
        return self.value


def test_a_state_that_raises_costs_the_checkpoints_and_not_the_training(
    here: Surroundings, capsys: pytest.CaptureFixture[str]
) -> None:
    box = Exploding("fine")
    run = here.run()
    checkpoint = run.checkpoint({"box": box})
    for step in run.steps(stop=6):
        box.value = "armed" if step > 2 else "fine"
        checkpoint.save(step)
    assert here.steps_in_memory() == [0, 1, 2]
    assert here.beat().step == 5
    assert here.kinds() == [NoticeKind.CHECKPOINT_OFF]
    error = capsys.readouterr().err
    assert error.count("RuntimeError: boom (at ") == 1
    assert f"{__file__}:" in error


def test_too_little_shared_memory_turns_checkpoints_off_with_the_figure_needed(
    here: Surroundings, capsys: pytest.CaptureFixture[str]
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    run = here.run()
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        losses = train(run, 4, big := Training())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(losses) == 4
    assert big.schedule.last_epoch == 4
    (notice,) = here.notices()
    assert notice.kind == NoticeKind.CHECKPOINT_OFF
    assert "need 352 KiB" in notice.text
    assert "enlarge it" in capsys.readouterr().err
    assert list(here.shm.glob("rank-0/slot-*")) == []


def test_state_that_grows_too_much_costs_that_save_only(here: Surroundings) -> None:
    box = Box(torch.zeros(10))
    run = here.run()
    checkpoint = run.checkpoint({"box": box})
    checkpoint.save(0)
    run.flush(FLUSH_S)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    try:
        for step, size in enumerate((10, 1_000_000, 10), start=1):
            box.value = torch.zeros(size)
            checkpoint.save(step)
        run.flush(FLUSH_S)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert here.steps_in_memory() == [0, 1, 3]
    (notice,) = here.notices()
    assert (notice.kind, notice.step) == (NoticeKind.SAVE_REFUSED, 2)


@pytest.mark.parametrize("step", [3, 4])
def test_steps_that_do_not_grow_turn_checkpoints_off(here: Surroundings, step: int) -> None:
    run = here.run()
    checkpoint = run.checkpoint({"box": Box(1)})
    checkpoint.save(4)
    checkpoint.save(step)
    (notice,) = here.notices()
    assert f"save({step}) came after save(4)" in notice.text


def test_a_pinned_step_is_kept_while_training_goes_on(here: Surroundings) -> None:
    pin_for_disk(here.shm, Rank(0), Step(3))
    train(here.run(), 12)
    assert here.steps_in_memory() == [3, 9, 10, 11]


def test_a_forked_child_neither_saves_nor_beats_nor_waits(here: Surroundings) -> None:
    model, optimizer = sgd()
    run = here.run()
    checkpoint = run.checkpoint({"model": model, "optimizer": optimizer})
    checkpoint.save(0)

    def child() -> None:
        run.forget()  # attach() has registered this for every fork
        optimizer.step()
        checkpoint.save(1)
        for _ in run.steps(stop=3):
            pass

    _, status = os.waitpid(fork(child), 0)
    assert status == 0
    run.flush(FLUSH_S)
    assert here.steps_in_memory() == [0]
    assert here.beat().step == 0


def test_one_copy_thread_serves_a_run_and_it_ends(here: Surroundings) -> None:
    run = here.run()
    before = threading.active_count()
    checkpoint = run.checkpoint({"box": Box(1)})
    checkpoint.save(0)
    assert threading.active_count() == before + 1
    run.stop()
    assert threading.active_count() == before
