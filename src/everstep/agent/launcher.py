"""The warm launcher: has imported torch and forks ranks in milliseconds when the agent asks.

Run as `python -P -m everstep.agent.launcher MACHINE_JSON` by the keeper. It serves one request at
a time on a Unix socket, knows nothing of controllers or of what it forked before, and keeps no
state: it may be killed at any moment, and ranks that run are not its children but the keeper's.
It forks the trials of code versions too (trial.py), which answer for themselves.

A request ends in one of two ways: in the launcher with the reply, and in each new rank with the
return of `serve` and then of `main`, so that nothing but this module's last line is below the
user's program on the stack.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, NoReturn

from everstep.agent import fork, placing, rank_main, trial, warm
from everstep.agent.fork import (
    Forked,
    ForkReply,
    ForkRequest,
    NothingCame,
    RankPlan,
    TryReply,
    TryRequest,
)
from everstep.agent.parking import Parking, Woken
from everstep.agent.rank_main import Program
from everstep.agent.this_machine import ThisMachine
from everstep.model import EverstepError, UserError

BACKLOG = 8
"""Waiting connections: one agent, and what is left of killed ones."""

ASKED_WITHIN_S = 10.0
"""Patience with an agent that connected and then stands still."""
PARK_AFTER_S = 1.0
"""Quiet time before ranks are forked ahead: the first second after a start belongs to its ranks."""
STARTED_AGAIN = "started-again"
"""Second argument of a launcher that has replaced itself, so that it does so only once."""


class NewRank(NamedTuple):
    """We are in the process of this rank: where to say that it is ready."""

    plan: RankPlan
    report: int
    """File descriptor of the pipe to the launcher."""


def serve(path: Path, env: dict[str, str], ahead: int) -> Program:
    """Answer requests on this socket for ever. Returns only in a rank, with what it has to run.

    `ahead`: ranks to fork while nothing is asked of us; 0 for none.
    """
    listener = _listen(path)
    parking = Parking()
    while True:
        _reap()
        woken = _park_when_idle(listener, parking, ahead)
        if woken is not None:
            rank = NewRank(woken.request.ranks[woken.number], woken.report)
            return _become(rank, woken.request, env)
        connection, _ = listener.accept()
        connection.settimeout(ASKED_WITHIN_S)
        with connection, connection.makefile("rb") as stream:
            answer = _answer(connection, stream, env, parking)
            if not isinstance(answer, _RankOf):
                _reply(connection, answer)
                continue
        # A rank from here on. Python's objects go first: later they would close what is not theirs.
        listener.close()
        return _become(answer.rank, answer.request, env)


def _listen(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    listener.bind(str(path))
    os.umask(before)
    listener.listen(BACKLOG)
    return listener


def _park_when_idle(listener: socket.socket, parking: Parking, ahead: int) -> Woken | None:
    """See that so many are parked, unless somebody connects first. In a parked rank: its work."""
    if not ahead or parking.ready(ahead):
        return None
    idle = select.poll()
    idle.register(listener, select.POLLIN)
    if idle.poll(PARK_AFTER_S * 1000) or warm.why_not_to_fork():
        return None

    def clear(keep: tuple[int, ...]) -> None:
        listener.close()
        _close_inherited(*keep)

    parking.clear()
    try:
        return parking.fill(ahead, clear)
    except OSError as error:
        say(f"no rank could be forked ahead of time: {error}")
        return None


class _RankOf(NamedTuple):
    rank: NewRank
    request: ForkRequest


def _answer(
    connection: socket.socket, stream: BinaryIO, env: dict[str, str], parking: Parking
) -> ForkReply | TryReply | _RankOf | None:
    """What to reply, if anything; or, in the process of a new rank, which one it is."""
    try:
        connection.sendall(fork.GREETING)
        request = fork.read_request(stream)
        if isinstance(request, TryRequest):
            return _start_trial(connection, request, env)
        check(request, env)
        if parking.ready(len(request.ranks)) and not request.no_fork and not request.no_python:
            return parking.wake(request)
        forked = fork_ranks(request.ranks)
    except NothingCame:
        return None  # an agent wanted to know whether we are idle
    except EverstepError as error:
        return ForkReply(problem=str(error))
    except OSError as error:
        return ForkReply(problem=f"The launcher failed: {error}.")
    return forked if isinstance(forked, ForkReply) else _RankOf(forked, request)


def _start_trial(
    connection: socket.socket, request: TryRequest, env: dict[str, str]
) -> TryReply | None:
    """Fork it and let it answer, so that we are free at once. A reply if it cannot be.

    A process in between makes it the keeper's, which is what ends what an agent no longer knows.
    """
    if (reason := warm.why_not_to_fork()) is not None:
        return TryReply(untold=reason)
    if os.fork() == 0:
        try:
            if os.fork() == 0:
                trial.supervise(connection.fileno(), request, env, _close_inherited)
        finally:
            os._exit(0)  # whatever happened: never back into the launcher's loop
    return None


def _reap() -> None:
    """Those in between, which nobody waits for."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def check(request: ForkRequest, env: dict[str, str]) -> None:
    """Raises UserError with one sentence if the ranks could not even begin."""
    there = Path(request.working_dir)
    where = f"on {socket.gethostname()}"
    if not there.is_dir():
        raise UserError(f"The working directory {there} does not exist {where}.")
    target = request.command[0]
    if request.no_python:
        program = str(there / target) if "/" in target else target
        if shutil.which(program, path=env.get("PATH")) is None:
            raise UserError(f"The program {target} was not found {where} or is not executable.")
    elif not request.module:
        script = Path(placing.moved(str(there / target), request.places))
        if not script.exists():
            raise UserError(f"The script {script} does not exist {where}.")
        if not os.access(script, os.R_OK):
            raise UserError(f"The script {script} is not readable {where}: check its permissions.")
    if not request.no_fork and not request.no_python and (reason := warm.why_not_to_fork()):
        raise UserError(f"No rank was started: {reason}.")


def fork_ranks(plans: tuple[RankPlan, ...]) -> ForkReply | NewRank:
    """Fork them all. The reply in the launcher once all are ready; in each rank which one it is.

    A process in between forks them and ends, so that the keeper inherits and reaps them.
    """
    receiving, sending = os.pipe()
    middle = os.fork()
    if middle == 0:
        return _fork_in_the_middle(plans, sending)
    os.close(sending)
    with open(receiving, "rb") as reports:  # noqa: PTH123 -- a descriptor, no path
        forked = tuple(_all(reports))
    os.waitpid(middle, 0)
    problems = [each.problem for each in forked if each.problem]
    if problems:
        return ForkReply(ranks=forked, problem=problems[0])
    if len(forked) < len(plans):
        return ForkReply(
            ranks=forked,
            problem=f"Only {len(forked)} of {len(plans)} ranks came up: the others died at once"
            " (the kernel's log tells if memory ran out).",
        )
    return ForkReply(ranks=forked)


def _fork_in_the_middle(plans: tuple[RankPlan, ...], sending: int) -> NewRank:
    for plan in plans:
        try:
            if os.fork() == 0:
                return NewRank(plan, sending)
        except OSError as error:
            _give_up(sending, plan, f"Rank {plan.rank} could not be forked: {error.strerror}.")
    os._exit(0)


def _all(reports: BinaryIO) -> Iterator[Forked]:
    """What the ranks say until the last of them has spoken or died."""
    while header := reports.read(fork.LENGTH.size):
        yield fork.parse(reports.read(fork.length_of(header)), Forked)


def _become(rank: NewRank, request: ForkRequest, env: dict[str, str]) -> Program:
    """Make this fork the rank and tell the launcher so."""
    _close_inherited(rank.report)
    try:
        forked = rank_main.become_rank(request, rank.plan, {**env, **rank.plan.env})
    except OSError as error:
        _give_up(rank.report, rank.plan, f"Rank {rank.plan.rank} could not be set up: {error}.")
    os.write(rank.report, fork.frame(forked))
    os.close(rank.report)
    return rank_main.start_program(request)


def _give_up(report: int, plan: RankPlan, problem: str) -> NoReturn:
    forked = Forked(rank=plan.rank, pid=os.getpid(), start_ticks=0, problem=problem)
    os.write(report, fork.frame(forked))
    os._exit(1)


def _close_inherited(*keep: int) -> None:
    """All but standard input, output, error: an inherited socket would outlive the launcher."""
    for fd in [int(entry.name) for entry in os.scandir("/proc/self/fd")]:
        if fd > 2 and fd not in keep:
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                os.close(fd)


def _reply(connection: socket.socket, reply: ForkReply | TryReply | None) -> None:
    if reply is None:
        return
    try:
        connection.sendall(fork.frame(reply))
    except OSError as error:
        say(f"the agent did not wait for the answer: {error}")


def say(text: str) -> None:
    """A line in launcher.log."""
    print(f"{time.strftime('%F %T')} launcher {os.getpid()}: {text}", flush=True)  # noqa: T201


def main(machine_json: Path) -> Program:
    """Warm up and serve. Returns only in a rank, with what it has to run."""
    here = ThisMachine.read(machine_json)
    spec = here.spec
    env = {**os.environ, **here.setup.env, **spec.env}
    if STARTED_AGAIN not in sys.argv:
        _start_again(machine_json, Path(spec.working_dir), env)
    ahead = 0
    if not (spec.no_fork or spec.no_python):
        ahead = spec.nproc_per_node
        started = time.monotonic()
        skipped = warm.warm_up(spec.preload)
        say(f"warm after {time.monotonic() - started:.2f} s")
        for clause in skipped:
            say(f"not preloaded: {clause}")
        if (reason := warm.why_not_to_fork()) is not None:
            say(f"every start will be refused: {reason}")
    return serve(here.paths.launcher_socket, env, ahead)


def _start_again(machine_json: Path, working_dir: Path, env: dict[str, str]) -> None:
    """With the job's environment, in its directory: what libraries and Python read at their start.

    PYTHONHASHSEED, LD_PRELOAD or a relative PYTHONPATH would have no effect later.
    """
    if working_dir.is_dir():
        os.chdir(working_dir)
    argv = [sys.executable, "-P", "-m", "everstep.agent.launcher", str(machine_json)]
    os.execve(sys.executable, [*argv, STARTED_AGAIN], env)


if __name__ == "__main__":
    try:
        _program = main(Path(sys.argv[1]).absolute())
    except (EverstepError, OSError) as _error:
        sys.exit(f"everstep launcher: {_error}")
    rank_main.run_program(_program)
