"""The port to whoever owns the machines. The controller knows clusters only by this.

A request is built first, can be shown, and is then sent as it was shown: a dry run is the same
request, not sent. Every cluster is a witness: it reports MachineLost as soon as it knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from everstep.events import ControllerEvent
from everstep.model import EverstepError, MachineId


class RequestRefused(EverstepError):
    """The owner of the machines will not give what was asked for; the message is its sentence."""


class Request(Protocol):
    """A request that was built and not yet sent; its text is what `--dry-run` prints."""

    def __str__(self) -> str: ...
    def send(self) -> None:
        """Ask for it now. RequestRefused or OSError if that cannot be done."""


class Journalled(NamedTuple):
    """An event, and what may be done only once it is in the journal."""

    event: ControllerEvent
    then: Callable[[], None] | None = None


Report = Callable[[Journalled], None]
"""Takes one fact for the controller. Called in the controller's event loop."""


class Cluster(Protocol):
    """Who owns the machines of one job. Its methods run in the controller's event loop."""

    def watch(self, report: Report) -> None:
        """Find what an earlier controller asked for; from now on report every loss."""

    def first(self) -> Request:
        """The request for what is missing of the machines that the job begins with."""

    def request(self, count: int, action: str) -> Request:
        """The request for `count` more machines, named by the action that asks for them.

        Sent again under the same name it yields nothing new: a restarted controller repeats it.
        """

    def release(self, machine: MachineId) -> None:
        """The job is done with this machine: take it away. Repeating it is harmless."""

    async def close(self, within_s: float) -> None:
        """The job is over: release what is left, wait for it at most so long."""


class Nothing(NamedTuple):
    """A request for no machine at all."""

    why: str

    def __str__(self) -> str:
        return f"nothing to request: {self.why}"

    def send(self) -> None:
        """There is nothing to send."""


class Refusal(NamedTuple):
    """A request that cannot be made, known before it is sent."""

    why: str

    def __str__(self) -> str:
        return f"no request can be made: {self.why}"

    def send(self) -> None:
        """Always RequestRefused."""
        raise RequestRefused(self.why)


class JoiningHosts:
    """No scheduler: machines come by themselves when somebody runs `everstep run` on them."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint

    def watch(self, report: Report) -> None:
        """Nothing to watch: agents connect, and their silence is all we see."""

    def first(self) -> Request:
        """Nobody to ask."""
        return Nothing("the hosts of this job join by themselves")

    def request(self, count: int, action: str) -> Request:
        """Only a person can bring another host."""
        del action
        noun = "host" if count == 1 else "hosts"
        return Refusal(
            f"this job has no scheduler to ask for {count} more {noun}: start the same"
            f" `everstep run` command there (the controller listens at {self._endpoint})"
        )

    def release(self, machine: MachineId) -> None:
        """The machine's agent hears it from the controller; its host is not ours to take."""

    async def close(self, within_s: float) -> None:
        """Nothing is held."""
