"""What the library tells people and the agent: rare sentences, never a stream.

A notice goes to the agent's datagram socket, non-blocking and dropped when nobody takes it, and
mostly to standard error too. The agent decodes Notice; nothing in training depends on an answer.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from enum import StrEnum
from pathlib import Path

import msgspec

from everstep.model import NO_GENERATION, NO_STEP, Generation, Rank, Step, Value


class NoticeKind(StrEnum):
    """What a notice is about."""

    CHECKPOINT_OFF = "checkpoint-off"
    """No checkpoints in memory from here on."""
    MEMORY = "memory"
    """How much memory the checkpoints take."""
    SAVE_REFUSED = "save-refused"
    """This save found no room; the next may."""
    SAVE_TORN = "save-torn"
    """Something changed the state while it was copied: the copy is void."""
    COPY_BAD = "copy-bad"
    """A stored copy failed its checks when it was to be restored, and was dropped."""
    RESTORED = "restored"
    REPORTS_OFF = "reports-off"
    """No steps and metrics from here on."""
    RECORDS_OFF = "records-off"
    """No flight records of collectives for whoever looks at a hang."""
    ADVICE = "advice"


class Notice(Value, frozen=True, kw_only=True):
    """One datagram: a MessagePack map."""

    kind: NoticeKind
    text: str
    """One sentence for people."""
    step: Step = NO_STEP
    rank: Rank = Rank(-1)
    generation: Generation = NO_GENERATION


class Notices:
    """Sends notices of one rank. Any thread may use it; it neither blocks nor raises."""

    def __init__(self, address: Path | None, rank: Rank, generation: Generation) -> None:
        self._address = None if address is None else str(address)
        self._rank = rank
        self._generation = generation
        self._printed: set[str] = set()

    def tell(self, kind: NoticeKind, text: str, step: Step = NO_STEP) -> None:
        """Print it, once for each kind, and send it every time."""
        if kind not in self._printed:
            self._printed.add(kind)
            with contextlib.suppress(OSError, ValueError):
                print(f"everstep: {text}", file=sys.stderr, flush=True)  # noqa: T201 -- for people
        self.send(kind, text, step)

    def send(self, kind: NoticeKind, text: str, step: Step = NO_STEP) -> None:
        """Only send it: for what is no trouble."""
        if self._address is None:
            return
        notice = Notice(
            kind=kind, text=text, step=step, rank=self._rank, generation=self._generation
        )
        datagram = msgspec.msgpack.encode(notice)
        kind_of_socket = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, kind_of_socket) as once:
            once.sendto(datagram, self._address)
