"""`everstep run` and `everstep attach`: flags to plan to processes to viewer, in that order."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from everstep.commands import flags as run_flags
from everstep.commands import jobs
from everstep.commands.client import Client
from everstep.commands.host import check_runnable, facts_of_this_host
from everstep.commands.plan import Plan, plan
from everstep.commands.presses import Presses
from everstep.commands.run import Started, Waiting, described, start
from everstep.commands.screen import Screen
from everstep.commands.show import print_json
from everstep.commands.view import Seen, Viewer, Watched
from everstep.controller.views import IncidentsView
from everstep.model import JobId, JobSpec, MachineId, UserError, Value
from everstep.paths import JobPaths

TERMINAL_LOST = 129
"""Exit code of a viewer that has nowhere to write to: that of a shell's command ended by SIGHUP."""


class DryRun(Value, frozen=True, kw_only=True):
    """What `run --dry-run --json` prints."""

    spec: JobSpec
    lines: list[str]


class Detached(Value, frozen=True, kw_only=True):
    """What `run --detach --json` prints."""

    job: JobId
    directory: str
    machine: MachineId | None
    """The machine that this host joined as; None for stand-ins."""


class Ended(Value, frozen=True, kw_only=True):
    """What `run --json` and `attach --json` print at the end."""

    job: JobId
    directory: str
    outcome: str
    exit_code: int
    why: str
    incidents: IncidentsView | None


def run(argv: list[str], environ: Mapping[str, str], token: str | None) -> int:
    """The whole of `everstep run`; returns its exit code. `token`: of $EVERSTEP_TOKEN."""
    try:
        flags = run_flags.parse(argv)
    except run_flags.HelpRequested as text:
        sys.stdout.write(str(text))
        return 0
    refusal = run_flags.pet_refusal(list(environ))
    if refusal is not None:
        raise UserError(refusal)
    facts = facts_of_this_host(flags, jobs.state_dir(flags.state_dir, environ), environ)
    made = plan(flags, facts)
    check_runnable(made)
    if flags.dry_run:
        _show_plan(made, json=flags.json)
        return 0
    say_plainly(made.notes)
    with Presses() as presses:
        started = start(made, token, Waiting(lambda line: say_plainly([line]), presses))
        if flags.detach:
            return _detached(started, json=flags.json)
        return _attached(made, started, presses, json=flags.json)


def attach(job: JobPaths, *, json: bool) -> int:
    """Look at a job that runs, or ran; returns its exit code."""
    spec = jobs.spec_of(job)
    with Presses() as presses, Client(job) as client:
        return _view(Watched(job, client, spec.nproc_per_node), presses, json=json)


def say_plainly(lines: list[str] | tuple[str, ...]) -> None:
    """Sentences of everstep's own, without a screen."""
    for line in lines:
        sys.stderr.write(f"everstep: {line}\n")


def _show_plan(made: Plan, *, json: bool) -> None:
    lines = described(made)
    if json:
        print_json(DryRun(spec=made.spec, lines=lines))
    else:
        sys.stdout.write("\n".join(lines) + "\n")


def _detached(started: Started, *, json: bool) -> int:
    if json:
        print_json(Detached(job=started.job, directory=started.directory, machine=started.machine))
    else:
        sys.stdout.write(
            f"job {started.job} runs in {started.directory}\n"
            f"look at it with `everstep attach {started.job}`, end it with "
            f"`everstep stop {started.job}`\n"
        )
    return 0


def _attached(made: Plan, started: Started, presses: Presses, *, json: bool) -> int:
    directory = Path(started.directory)
    paths = JobPaths(directory.parent, started.job)
    say_plainly([f"job {started.job} runs in {directory}"])
    with Client(paths, url=started.url, token=started.token) as client:
        watched = Watched(
            paths,
            client,
            made.spec.nproc_per_node,
            made.shown,
            machine=started.machine,
            reports=started.leads,
        )
        return _view(watched, presses, json=json)


def _view(watched: Watched, presses: Presses, *, json: bool) -> int:
    try:
        with Screen(output=sys.stderr if json else sys.stdout) as screen:
            seen = Viewer(watched, screen, presses).watch()
        if json:
            print_json(_ended(watched.paths, seen))
    except OSError:
        # The terminal or the reader of our output is gone. The job is not ours to end.
        sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 -- for the exit
        return TERMINAL_LOST
    return seen.exit_code


def _ended(paths: JobPaths, seen: Seen) -> Ended:
    result = seen.result
    return Ended(
        job=JobId(paths.root.name),
        directory=str(paths.root),
        outcome=result.outcome if result else "stopped",
        exit_code=seen.exit_code,
        why=result.why if result else "ended by force from the viewer",
        incidents=seen.incidents,
    )
