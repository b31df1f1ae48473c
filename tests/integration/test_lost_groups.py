"""A job that loses every machine of a parallel group, with nothing on disk.

Over-eviction takes all machines of one group at once (ByteRobust, 5.1): whatever the group, every
shard must have a copy on a machine outside it. A tensor-parallel group is one machine here, and one
is lost in tests/examples/test_layouts.py.
"""

from __future__ import annotations

import os
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from everstep.checkpoint.kept import Kept
from everstep.cluster.cleanup import job_scope
from everstep.commands import offline
from everstep.commands.jobs import result_of, spec_of
from everstep.core.groups import layout_of
from everstep.core.state import Phase
from everstep.model import NO_STEP, LayoutSpec, MachineId, NodeRank, Rank, Step
from everstep.paths import shm_dir
from everstep.processes import descendants, read_pid_file, send_signal
from tests.checkpoint.lockstep import fork
from tests.integration import parallel
from tests.integration.command import status_of
from tests.integration.support import wait_for
from tests.integration.test_survival import Trained, training
from tests.trainer.test_kills_in_training import warm_up

LAYOUT = layout_of(LayoutSpec(tp=2, dp=2, pp=2), ranks_per_machine=2)
FLAGS = (
    *("--local-machines", str(LAYOUT.machines)),
    *("--nproc-per-node", str(LAYOUT.ranks_per_machine)),
    *("--layout", "tp=2,dp=2,pp=2"),
    *("--disk-every", "0"),
    *("--standbys", "0"),
)
pytestmark = pytest.mark.torch


def members(trained: Trained) -> dict[NodeRank, MachineId]:
    """Who has which position; nobody while an incident is open."""
    status = status_of(trained.paths)
    if status is None or status.phase is not Phase.RUNNING or status.incident is not None:
        return {}
    return {view.node_rank: view.machine for view in status.machines if view.node_rank is not None}


def safe_step(trained: Trained, places: dict[NodeRank, MachineId], before: Step) -> Step | None:
    """A newer step than `before` of which each shard is kept by a machine that is not its own."""
    spec = spec_of(trained.paths)
    kept: dict[Step, set[Rank]] = {}
    for position, machine in places.items():
        for copy in Kept(shm_dir(spec.job, spec.uid, machine)).inventory():
            if LAYOUT.machine(copy.rank) != position:
                kept.setdefault(copy.step, set()).add(copy.rank)
    whole = [step for step, ranks in kept.items() if len(ranks) == LAYOUT.world_size]
    return max((step for step in whole if step > before), default=None)


def lose(trained: Trained, machines: set[MachineId]) -> None:
    """Kill -9 of all their processes at once: keepers first, so that nothing comes back."""
    spec = spec_of(trained.paths)
    files = [trained.paths.machine(machine).pid_file("keeper") for machine in machines]
    keepers = [keeper for file in files if (keeper := read_pid_file(file)) is not None]
    assert len(keepers) == len(machines)
    victims = descendants(keepers)
    assert len(victims) >= 4 * len(machines), "an agent, a launcher and two ranks on each"
    for process in (*keepers, *victims):
        send_signal(process, signal.SIGKILL)
    for machine in machines:
        shutil.rmtree(shm_dir(spec.job, spec.uid, machine), ignore_errors=True)


def lines_of(log: Path, rank: int) -> list[tuple[int, str]]:
    whole = [line.split() for line in parallel.log_of(log, rank).read_text().splitlines()]
    return [(int(step), digest) for step, digest in whole]


class Loss(NamedTuple):
    """What was lost, and what had to be enough."""

    machines: set[MachineId]
    safe: Step


def lose_group(trained: Trained, kind: str, before: Step) -> Loss:
    """Once every shard has a second copy of a newer step than `before`."""
    places = wait_for("recovery", lambda: members(trained))
    safe = wait_for("a backup", lambda: safe_step(trained, places, before))
    trained.wait_steps(2)
    group = next(group for name, group in LAYOUT.groups() if name == kind)
    machines = {places[position] for position in LAYOUT.machines_of(group)}
    lose(trained, machines)
    trained.wait_steps(2)
    return Loss(machines, safe)


def train_undisturbed(log: Path, steps: int) -> None:
    """So many steps on forks of this process."""
    warm_up()
    ranks = range(parallel.RANKS)
    pids = [fork(partial(parallel.undisturbed, log, rank, steps)) for rank in ranks]
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0 for _ in ranks]


def test_the_loss_of_any_parallel_group_costs_only_the_steps_since_the_last_backup(
    tmp_path: Path,
) -> None:
    losses: list[Loss] = []
    with training(tmp_path, "job", *FLAGS, script=Path(parallel.__file__)) as trained:
        for kind in ("pp", "dp"):
            losses.append(lose_group(trained, kind, losses[-1].safe if losses else NO_STEP))
        trained.stop.touch()
        result = wait_for("the end", lambda: result_of(trained.paths))
        assert (result.outcome, result.exit_code) == ("finished", 0), result
        scope = partial(job_scope, trained.paths.root, spec_of(trained.paths))
        wait_for("the end of all", lambda: not scope().shm)

    told = offline.incidents(trained.paths).incidents
    assert [set(incident.evicted) for incident in told] == [loss.machines for loss in losses]
    assert [len(loss.machines) for loss in losses] == [2, 2]
    agents = [trained.paths.machine(MachineId(f"m{n}")).log("agent") for n in range(4 + 4)]
    logs = [path.read_text() for path in agents]
    for incident, loss in zip(told, losses, strict=True):
        assert incident.restored is not None
        assert incident.restored >= loss.safe
        fetched = [log for log in logs if f"fetched 2 shards of step {incident.restored}" in log]
        assert len(fetched) == len(loss.machines)
    steps = trained.furthest() + 1
    train_undisturbed(tmp_path / "undisturbed", steps)
    for rank in range(parallel.RANKS):
        reference = dict(lines_of(tmp_path / "undisturbed", rank))
        done = lines_of(trained.log, rank)
        assert {step for step, _ in done} == set(range(steps)) == set(reference)
        assert [line for line in done if reference[line[0]] != line[1]] == []
