"""Carries out the plan of `everstep run`: the job's directory, the keepers of
controller and machine.

Everything that is started is detached: it goes on when this process ends. What the user sees
afterwards is view.py's. Decisions about flags are plan.py's; this file may read the host.
"""

from __future__ import annotations

import secrets
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from everstep.cluster.keepers import (
    SETUP_NAME,
    command,
    controller_keeper,
    start_keeper,
    write_machine,
)
from everstep.code.store import CodeStore
from everstep.commands import jobs, source
from everstep.commands.client import Away, Client, TokenRefused
from everstep.commands.host import address_towards, port_is_free
from everstep.commands.plan import Leads, Plan
from everstep.commands.presses import Interrupted, Presses
from everstep.core.standby import standbys_at_first
from everstep.files import write_atomically
from everstep.model import EverstepError, JobId, MachineId, UserError, Value
from everstep.paths import JobPaths, MachineSetup

JOIN_POLL_S = 0.5
SAY_S = 15.0
"""Seconds between two lines of a machine that waits for its controller."""


class StateUnwritable(UserError):
    """The state directory does not take the job's files."""


class PortTaken(UserError):
    """Something else listens where the controller should."""


class Waiting(NamedTuple):
    """How a call that has to wait talks to its user."""

    say: Callable[[str], None]
    presses: Presses


class Started(Value, frozen=True, kw_only=True):
    """What runs now, and how a viewer reaches it."""

    job: JobId
    directory: str
    leads: bool
    url: str | None = None
    """None: endpoint.json in the directory says it."""
    token: str | None = None
    machine: MachineId | None = None


def described(plan: Plan) -> list[str]:
    """The lines of --dry-run: what would be written and started, in order."""
    paths = _paths(plan)
    lines = [f"job {plan.spec.job}: {_sizes(plan)}, directory {paths.root}"]
    lines += [f"note: {note}" for note in plan.notes]
    if plan.leads is not Leads.NO:
        lines += source.described(plan.spec, _apart(plan))
        condition = "" if plan.leads is Leads.MUST else " (if no other call here is faster)"
        keeper = " ".join(command(paths.root / SETUP_NAME))
        port = f"port {plan.address.port}" if plan.address.port else "any free port"
        lines.append(f"controller on {plan.address.bind}, {port}{condition}:")
        lines.append(f"  {keeper}")
        (service,) = controller_keeper(paths, controller_flags(plan)).services.values()
        lines.append(f"    which runs: {' '.join(service.argv)}")
    if plan.joins:
        machine = free_machine_name(paths, plan.node_rank)
        setup = paths.machine(machine).root / SETUP_NAME
        lines.append(f"machine {machine}: {' '.join(command(setup))}")
    else:
        count = plan.spec.nnodes + standbys_at_first(plan.spec)
        lines.append(f"{count} stand-in machines, m0 to m{count - 1}, started by the controller")
    lines.append(f"ranks: {_rank_command(plan)}")
    return lines


def start(plan: Plan, token: str | None, waiting: Waiting) -> Started:
    """Start what the plan says; returns when it is under way, not when ranks run.

    `token`: of $EVERSTEP_TOKEN. UserError for what the user can mend, OSError never.
    """
    try:
        leads = plan.leads is not Leads.NO and _lead(plan, token, waiting)
        started = Started(job=plan.spec.job, directory=str(_paths(plan).root), leads=leads)
        if plan.joins:
            started = _join(plan, token, started, waiting)
        _link_logs(plan)
    except OSError as error:
        raise StateUnwritable(
            f"{error.filename or plan.state_dir} cannot be written: {error.strerror}; give a "
            "directory of your own with --state-dir or $EVERSTEP_HOME."
        ) from error
    return started


def start_controller(paths: JobPaths) -> None:
    """Start the detached keeper of a controller whose job directory is complete."""
    keeper = start_keeper(paths.root / SETUP_NAME, paths.keeper_log)
    if keeper is None:
        raise EverstepError(f"The keeper of the controller ended at once: see {paths.keeper_log}.")


def controller_flags(plan: Plan) -> list[str]:
    """What the controller is told besides its job: where to listen."""
    return ["--host", plan.address.bind, "--port", str(plan.address.port)]


# --- the host of the controller ------------------------------------------------------------------


def _lead(plan: Plan, token: str | None, waiting: Waiting) -> bool:
    """Make the job's directory and start its controller; False if another call did so already."""
    paths = _paths(plan)
    if jobs.runs_here(paths):
        if plan.joins and plan.leads is Leads.MAY:
            return False
        raise UserError(
            f"Job {plan.spec.job} runs already: look at it with `everstep attach "
            f"{plan.spec.job}`, or give this one another name with --job."
        )
    if not port_is_free(plan.address):
        if plan.leads is Leads.MAY:
            return False
        raise PortTaken(
            f"Port {plan.address.port} of {plan.address.bind} is in use: give the endpoint another "
            "port, on all machines, or end what listens there."
        )
    made = _made_directory(plan, paths, token or secrets.token_urlsafe(24), waiting.say)
    if not made and plan.leads is Leads.MUST:
        raise UserError(f"Job {plan.spec.job} was started by another call at this moment.")
    if made:
        start_controller(paths)
    return made


def _made_directory(
    plan: Plan, paths: JobPaths, token: str, say: Callable[[str], None] | None = None
) -> bool:
    """Put the complete directory in place at once; False if there is one from this moment.

    With `say` it is the controller's, and gets the first code version.
    """
    paths.root.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _make_room(plan, paths)
    beside = paths.root.with_name(f".{paths.root.name}.{plan.spec.uid}")
    beside.mkdir(mode=0o700)
    try:
        spec = plan.spec
        if say is not None:
            spec = source.versioned(spec, CodeStore(beside / paths.code.name), _apart(plan), say)
        write_atomically(beside / paths.spec.name, spec)
        write_atomically(beside / paths.token.name, token.encode())
        write_atomically(beside / SETUP_NAME, controller_keeper(paths, controller_flags(plan)))
        # A directory is renamed onto another only if that is empty: one of two calls wins.
        beside.rename(paths.root)
    except OSError:
        shutil.rmtree(beside)
        if paths.spec.exists():
            return False
        raise
    return True


def _make_room(plan: Plan, paths: JobPaths) -> None:
    """Move a former job of this name aside, if the name is ours and not the user's choice."""
    if not paths.root.exists():
        return
    if plan.chosen and not _ended(paths):
        raise UserError(
            f"A job {plan.spec.job} is in {plan.state_dir} and has not ended: bring it back with "
            f"`everstep controller {plan.spec.job} --resume`, or end it with `everstep clean "
            f"{plan.spec.job}`."
        )
    number = 1
    while (aside := paths.root.with_name(f"{paths.root.name}.{number}")).exists():
        number += 1
    paths.root.rename(aside)


def _ended(paths: JobPaths) -> bool:
    return jobs.result_of(paths) is not None


# --- a machine that joins ------------------------------------------------------------------------


def _join(plan: Plan, token: str | None, started: Started, waiting: Waiting) -> Started:
    """Start this host's machine. Other hosts wait until the controller answers."""
    paths = _paths(plan)
    if not started.leads:
        token = _wait_controller(plan, token, waiting)
        _adopt_directory(plan, paths, token)
    machine = machine_directory(paths, plan.node_rank)
    setup = MachineSetup(
        job=plan.spec.job,
        uid=jobs.spec_of(paths).uid,
        machine=machine,
        address=plan.local_addr or address_towards(plan.address.host),
        host=socket.gethostname(),
        job_dir=str(paths.root),
        nproc_per_node=plan.spec.nproc_per_node,
        endpoint_url=plan.address.url,
        node_rank=plan.node_rank,
        units=plan.units,
    )
    keeper = write_machine(paths.machine(machine), setup)
    if start_keeper(keeper, paths.machine(machine).log("keeper")) is None:
        raise EverstepError(
            f"The keeper of machine {machine} ended at once: see "
            f"{paths.machine(machine).log('keeper')}."
        )
    return Started(
        job=started.job,
        directory=started.directory,
        leads=started.leads,
        url=plan.address.url,
        token=None if started.leads else token,
        machine=machine,
    )


def _wait_controller(plan: Plan, token: str | None, waiting: Waiting) -> str:
    """Wait until the controller answers with our token, and return the token.

    The token is read again each time: the directory may hold that of a former job of this name
    until the controller's host has put the new one there.
    """
    paths = _paths(plan)
    deadline = time.monotonic() + plan.join_timeout_s
    say_at = time.monotonic() + JOIN_POLL_S
    while True:
        found = token or _token_in(paths)
        problem = _no_token(paths) if found is None else _refusal(paths, plan, found)
        if problem is None and found is not None:
            return found
        if time.monotonic() > deadline:
            raise UserError(
                f"Job {plan.spec.job} was not joined within {plan.join_timeout_s:.0f} s. {problem}"
            )
        if waiting.presses.count:
            raise Interrupted(f"Ctrl-C while waiting for {plan.address.url}: nothing was started.")
        if time.monotonic() > say_at:
            say_at += SAY_S
            waiting.say(f"waiting for the controller at {plan.address.url}")
        time.sleep(JOIN_POLL_S)


def _refusal(paths: JobPaths, plan: Plan, token: str) -> str | None:
    """Why the controller cannot be joined yet; None if it can. UserError if it never can."""
    with Client(paths, url=plan.address.url, token=token) as client:
        try:
            client.status()
        except Away:
            return (
                f"No controller answers at {plan.address.url}: is `everstep run` running on "
                f"{plan.address.host}, and is that host its own endpoint?"
            )
        except TokenRefused:
            return (
                f"The controller at {plan.address.url} refuses our token: set "
                f"{jobs.TOKEN_VARIABLE} to the same value on all machines, or share the state "
                "directory."
            )
    return None


def _no_token(paths: JobPaths) -> str:
    return (
        f"There is no token: set {jobs.TOKEN_VARIABLE} to one secret on all machines, or put "
        f"the state directory on a file system that they share ({paths.token} never appeared)."
    )


def _token_in(paths: JobPaths) -> str | None:
    try:
        return paths.token.read_text().strip()
    except OSError:
        return None


def _adopt_directory(plan: Plan, paths: JobPaths, token: str) -> None:
    """Use the job's directory if it is shared with the controller's host, else make our own."""
    if _token_in(paths) == token and paths.spec.exists():
        return
    if not jobs.runs_here(paths):
        _made_directory(plan, paths, token)


def machine_directory(paths: JobPaths, node_rank: int | None) -> MachineId:
    """Take the first free name for this machine: a name is never used twice in a job."""
    while True:
        machine = free_machine_name(paths, node_rank)
        try:
            paths.machine(machine).root.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            continue
        return machine


def free_machine_name(paths: JobPaths, node_rank: int | None) -> MachineId:
    """The host's name, its position if it asked for one, and a number if that is not enough."""
    host = socket.gethostname().partition(".")[0] or "machine"
    name = host if node_rank is None else f"{host}-{node_rank}"
    number = 1
    while paths.machine(MachineId(name if number == 1 else f"{name}.{number}")).root.exists():
        number += 1
    return MachineId(name if number == 1 else f"{name}.{number}")


# --- small ---------------------------------------------------------------------------------------


def _apart(plan: Plan) -> source.Apart:
    return source.apart(plan.spec, Path(plan.state_dir), plan.log_dir)


def _paths(plan: Plan) -> JobPaths:
    return JobPaths(Path(plan.state_dir), plan.spec.job)


def _link_logs(plan: Plan) -> None:
    """Make LOG_DIR/JOB lead to the ranks' output, replacing a link of a former job only."""
    if plan.log_dir is None:
        return
    directory = Path(plan.spec.working_dir) / plan.log_dir
    directory.mkdir(parents=True, exist_ok=True)
    link = directory / plan.spec.job
    if link.is_symlink():
        link.unlink()
    link.symlink_to(_paths(plan).machines)


def _sizes(plan: Plan) -> str:
    spec = plan.spec
    kind = "stand-in machines" if spec.local else "machines"
    standbys = standbys_at_first(spec)
    spare = f" and {standbys} spare" if standbys else ""
    return f"{spec.nnodes}{spare} {kind} x {spec.nproc_per_node} ranks = {spec.world_size} ranks"


def _rank_command(plan: Plan) -> str:
    spec = plan.spec
    if spec.no_python:
        return " ".join(spec.command)
    return " ".join(("python", *(("-m",) if spec.module else ()), *spec.command))
