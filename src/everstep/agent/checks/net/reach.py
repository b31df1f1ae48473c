"""The source "net.reach": whether gateways and the addresses that the job needs still answer.

Each is asked every 30 s, the interval of ByteRobust's network checks; one that stopped answering is
asked again at every sample, so that "twice in a row" takes seconds and not a minute.
"""

from __future__ import annotations

import socket
import time
from typing import ClassVar

from everstep.agent.checks.check import Here, Source
from everstep.agent.checks.net import sysfs
from everstep.agent.checks.net.asking import Heard, Target, ask
from everstep.agent.checks.net.routes import default_routes
from everstep.model import Seconds, Value

ASK_EVERY_S: Seconds = 30.0
"""An address that answers. Switches limit how many pings they answer, and every machine asks."""
ANSWER_WITHIN_S: Seconds = 1.5
"""Far more than any network inside a cluster takes; a lost packet is forgiven at the next try."""
ASKED_AGAIN = 2
"""Times that a stranger which answered is asked again at once. A gateway that ignores everybody by
intention was seen to answer one machine once within an hour, and that machine was blamed for the
silence after it.
"""


class Answer(Value, frozen=True, kw_only=True):
    """What is known of one address."""

    gateway: bool = False
    """Of a default route; others were named."""
    answered: bool | None
    """At the last try; None: it could not be asked, or not yet."""
    why: str
    misses: int = 0
    """Tries in a row without an answer."""
    ever: bool = False
    """It has answered since this source began, more than once. One that never did may be silent by
    intention."""


class Reach(Value, frozen=True, kw_only=True):
    """A sample."""

    answers: dict[str, Answer]
    down: tuple[str, ...] = ()
    """Interfaces that the job uses and that have no link now."""
    changed_ago_s: Seconds | None = None
    """Since a link of those last came or went; None: not since this source began."""


class ReachSource(Source[Reach]):
    """Asks by sockets."""

    name = "net.reach"
    kind = Reach
    every_s = 5.0
    blocks: ClassVar[bool] = True
    within_s = 30.0
    """Looking a name up may take that long."""

    def __init__(self) -> None:
        self._gateways: dict[str, str] = {}
        self._answers: dict[str, Answer] = {}
        self._asked: dict[str, Seconds] = {}
        self._targets: dict[str, Target] = {}
        self._changes: dict[str, int | None] = {}
        self._changed: Seconds | None = None

    def absent(self, here: Here) -> str:
        if here.addresses or any(route.gateway for route in default_routes(here)):
            return ""
        return "" if self._gateways else "there is no gateway and no address that must answer"

    def sample(self, here: Here) -> Reach:
        for route in default_routes(here):
            if route.gateway:
                self._gateways[route.gateway] = route.interface
        down = self._links(here)
        wanted = [*self._gateways, *(each for each in here.addresses if each not in self._gateways)]
        now = time.monotonic()
        due = {
            name: target for name in wanted if self._due(name, now) and (target := self._at(name))
        }
        heard = ask(due.values(), ANSWER_WITHIN_S)
        strangers = [due[name] for name in due if not self._is_known(name)]
        for _ in range(ASKED_AGAIN):
            strangers = [target for target in strangers if heard[target].answered]
            heard |= ask(strangers, ANSWER_WITHIN_S)
        for name, target in due.items():
            self._asked[name] = now
            self._note(name, heard[target])
        ago = None if self._changed is None else time.monotonic() - self._changed
        answers = {name: self._answers[name] for name in wanted if name in self._answers}
        return Reach(answers=answers, down=down, changed_ago_s=ago)

    def _due(self, name: str, now: Seconds) -> bool:
        last = self._answers.get(name)
        if last is None or now - self._asked[name] >= ASK_EVERY_S:
            return True
        return last.ever and not last.answered

    def _is_known(self, name: str) -> bool:
        return name in self._answers and self._answers[name].ever

    def _note(self, name: str, heard: Heard) -> None:
        last = self._answers.get(name)
        misses = last.misses if last else 0
        self._answers[name] = Answer(
            gateway=name in self._gateways,
            answered=heard.answered,
            why=heard.why,
            misses={True: 0, False: misses + 1, None: misses}[heard.answered],
            ever=bool(heard.answered or (last and last.ever)),
        )

    def _at(self, name: str) -> Target | None:
        """Where to ask. A name is looked up once; one that has no address is noted as not asked."""
        if name not in self._targets:
            try:
                self._targets[name] = _resolve(name)
            except (OSError, ValueError) as error:
                self._asked[name] = time.monotonic()
                self._note(name, Heard(answered=None, why=f"it has no address: {error}"))
        return self._targets.get(name)

    def _links(self, here: Here) -> tuple[str, ...]:
        """Notice changes of links, and say which are down. Gone ones are down."""
        down = []
        directory = sysfs.place(here, "/sys/class/net")
        for name in here.interfaces or sorted(set(self._gateways.values())):
            changes = sysfs.number(f"{directory}/{name}/carrier_changes")
            if sysfs.text(f"{directory}/{name}/carrier") != "1":  # set down: it cannot be read
                down.append(name)
            if name in self._changes and self._changes[name] != changes:
                self._changed = time.monotonic()
            self._changes[name] = changes
        return tuple(down)


def _resolve(name: str) -> Target:
    """OSError: there is no such host. ValueError: this is neither HOST nor HOST:PORT."""
    host, port = name, 0
    if name.startswith("["):
        host, _, rest = name[1:].partition("]")
        port = int(rest.removeprefix(":") or 0)
    elif name.count(":") == 1:
        host, _, given = name.partition(":")
        port = int(given)
    if "%" in host:
        return Target(address=host, port=port)
    found = socket.getaddrinfo(host, port or None, type=socket.SOCK_STREAM)
    return Target(address=str(found[0][4][0]), port=port)
