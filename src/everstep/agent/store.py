"""Lets a rank meet rank 0's store within milliseconds of its start.

torch's rendezvous has rank 0 start the store while the others connect to it. Who comes a moment too
early is refused, and torch then pauses for half a second or more before it tries again: more than
all the rest of a restart. rank_main.py calls `await_store` in every fork; it changes nothing else,
and where torch is not as expected, torch's own pause remains.
"""

from __future__ import annotations

import socket
import sys
import time
from datetime import timedelta
from typing import Any

FIRST_PAUSE_S = 0.002
LONGEST_PAUSE_S = 0.05
"""Pauses double up to here: a store that is late by seconds is not asked a thousand times."""
WITHIN_S = 30.0
"""After this, torch tries by itself, for as long as its own timeout says."""


def await_store() -> None:
    """From here on env:// and tcp:// rendezvous in this process wait for the store's port."""
    rendezvous = sys.modules.get("torch.distributed.rendezvous")
    create = getattr(rendezvous, "TCPStore", None)
    if create is None:
        return

    def when_it_listens(*args: Any, **kwargs: Any) -> Any:
        host, port = kwargs.get("host_name"), kwargs.get("port")
        if kwargs.get("is_master") is False and isinstance(host, str) and isinstance(port, int):
            _wait_listening(host, port, kwargs.get("timeout"))
        return create(*args, **kwargs)

    vars(rendezvous)["TCPStore"] = when_it_listens


def _wait_listening(host: str, port: int, timeout: timedelta | None) -> None:
    within_s = WITHIN_S if timeout is None else min(WITHIN_S, timeout.total_seconds())
    deadline = time.monotonic() + within_s
    pause_s = FIRST_PAUSE_S
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((host, port), left_s).close()
        except ConnectionRefusedError:
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        except OSError:
            return  # nothing that waiting cures: torch says what is wrong
        else:
            return
