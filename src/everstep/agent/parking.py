"""Ranks forked ahead of time: they wait on a pipe until the launcher has work for them.

A fork of a process that has imported torch takes 10 to 20 ms of a core, and so does the end of the
process in between that hands the rank to the keeper. agent/launcher.py spends that while nothing is
asked of it, so that a restart need not. A parked rank has run nothing since its fork; it ends by
itself when its launcher does. Losing one costs only that time: then ranks are forked when needed.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from typing import NamedTuple

from everstep.agent import fork
from everstep.agent.fork import Forked, ForkReply, ForkRequest, MessageBroken


class Woken(NamedTuple):
    """We are in a parked process, and this is its work."""

    request: ForkRequest
    number: int
    """Which of the request's ranks."""
    report: int
    """File descriptor of the pipe to the launcher."""


class _Parked(NamedTuple):
    orders: int
    """Where the launcher writes the request."""
    reports: int
    """Where it reads what came of it."""


class Parking:
    """The parked ranks of one launcher."""

    def __init__(self) -> None:
        self._parked: list[_Parked] = []

    def fill(self, count: int, clear: Callable[[tuple[int, ...]], None]) -> Woken | None:
        """Park so many. None in the launcher; in a parked process it returns with its work.

        `clear` closes in the new process all file descriptors but these. OSError if it fails.
        """
        assert not self._parked, "filled once until it is used up"
        pipes = [(os.pipe(), os.pipe()) for _ in range(count)]
        middle = os.fork()
        if middle == 0:
            for number, ((orders, _), (_, report)) in enumerate(pipes):
                if os.fork() == 0:
                    clear((orders, report))
                    return _wait(orders, number, report)
            os._exit(0)
        os.waitpid(middle, 0)
        for (orders, orders_in), (reports, reports_in) in pipes:
            os.close(orders)
            os.close(reports_in)
            self._parked.append(_Parked(orders_in, reports))
        return None

    def ready(self, count: int) -> bool:
        """Whether exactly so many are parked, and all alive."""
        look = select.poll()
        for parked in self._parked:
            look.register(parked.reports, 0)  # a hang-up is always told
        return len(self._parked) == count > 0 and not look.poll(0)

    def wake(self, request: ForkRequest) -> ForkReply:
        """Make the parked processes the ranks of this request; none is parked afterwards."""
        woken, self._parked = self._parked, []
        for parked in woken:
            _order(parked, request)
        forked = tuple(each for parked in woken if (each := _report(parked)) is not None)
        problems = [each.problem for each in forked if each.problem]
        if not problems and len(forked) < len(request.ranks):
            problems = [f"Only {len(forked)} of {len(request.ranks)} ranks came up."]
        return ForkReply(ranks=forked, problem=problems[0] if problems else "")

    def clear(self) -> None:
        """Send all away: their pipes end."""
        for parked in self._parked:
            os.close(parked.orders)
            os.close(parked.reports)
        self._parked = []


def _wait(orders: int, number: int, report: int) -> Woken:
    """In a parked process: until there is work, or the launcher is gone."""
    try:
        with open(orders, "rb") as stream:
            request = fork.read(stream, ForkRequest)
    except MessageBroken:
        os._exit(0)
    return Woken(request, number, report)


def _order(parked: _Parked, request: ForkRequest) -> None:
    try:
        with open(parked.orders, "wb") as stream:  # noqa: PTH123 -- a descriptor, no path
            stream.write(fork.frame(request))
    except BrokenPipeError:
        return  # it died: nothing will come from its other pipe


def _report(parked: _Parked) -> Forked | None:
    try:
        with open(parked.reports, "rb") as stream:  # noqa: PTH123 -- a descriptor, no path
            return fork.read(stream, Forked)
    except MessageBroken:
        return None
