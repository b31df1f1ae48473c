"""What the checks leave for the next agent of this machine: baselines, alerts, children.

A small file in the machine's shared memory, replaced as a whole, beside that of the agent itself
(agent/memory.py). It is worth nothing after a reboot. Baselines of a source whose samples have
changed their type are lost alone. The runner reads it once and writes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from everstep.agent.checks.check import AnySource, History
from everstep.agent.checks.monitor import Cleared, Remembered, Standing
from everstep.model import Seconds, Value
from everstep.processes import Process

_UNDECODABLE = (msgspec.MsgspecError, ValueError, RecursionError)
_UNENCODABLE = (msgspec.MsgspecError, ValueError, TypeError, OverflowError)
"""A sample may hold a number of more than 64 bits, or bytes that are no text."""


class KeptChild(Value, frozen=True, kw_only=True):
    """A child process that takes samples, or took them and does not die."""

    pid: int
    start_ticks: int
    silent_since: Seconds | None = None
    """Since when it has not answered, if that is so (CLOCK_BOOTTIME)."""
    times: int = 0
    """Requests in a row that were not answered, by it or by those before it."""

    @property
    def process(self) -> Process:
        return Process(self.pid, self.start_ticks)


class Kept(msgspec.Struct, kw_only=True):
    """Content of the file."""

    boot_id: str = ""
    histories: dict[str, msgspec.Raw] = {}
    standings: list[Standing] = []
    cleared: list[Cleared] = []
    children: dict[str, KeptChild] = {}
    """Of every source that has one."""


class ChecksMemory:
    """The file. Reading and writing never fail: without it baselines begin anew."""

    def __init__(self, path: Path, boot_id: str) -> None:
        self._path = path
        self._boot_id = boot_id

    def read(self, sources: Mapping[str, AnySource]) -> tuple[Remembered, dict[str, KeptChild]]:
        """What the agent before this one knew; nothing if there was none since the boot."""
        try:
            kept = msgspec.msgpack.decode(self._path.read_bytes(), type=Kept)
        except (OSError, *_UNDECODABLE):
            return Remembered(), {}
        if kept.boot_id != self._boot_id:
            return Remembered(), {}
        histories = {}
        for name, source in sources.items():
            raw = kept.histories.get(name)
            history = None if raw is None else _decoded(bytes(raw), source)
            if history is not None:
                histories[name] = history
        remembered = Remembered(histories=histories, standings=kept.standings, cleared=kept.cleared)
        return remembered, kept.children

    def write(self, remembered: Remembered, children: dict[str, KeptChild]) -> None:
        """Replace the file. Not its directory: once the machine is left, that is gone for good."""
        encode = msgspec.msgpack.encode
        histories = {}
        for name, history in remembered.histories.items():
            try:
                histories[name] = msgspec.Raw(encode(history))
            except _UNENCODABLE:
                continue  # its baseline begins anew with the next agent
        kept = Kept(
            boot_id=self._boot_id,
            histories=histories,
            standings=remembered.standings,
            cleared=remembered.cleared,
            children=children,
        )
        beside = self._path.with_suffix(".new")
        try:
            beside.write_bytes(encode(kept))
            beside.replace(self._path)
        except OSError:
            return


def _decoded(raw: bytes, source: AnySource) -> History[Value] | None:
    kind = source.kind
    try:
        return msgspec.msgpack.decode(raw, type=History[kind])  # type: ignore[valid-type]
    except _UNDECODABLE:
        return None
