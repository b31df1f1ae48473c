"""Shows what the checks say to Prometheus, in its text format, on a port of the machine.

Off unless `--metrics-port` names a port. A small server of its own in the agent's loop: GET alone,
few connections at once, and nobody who reads slowly or not at all holds up anything else. The
format: prometheus.io/docs/instrumenting/exposition_formats.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import msgspec

from everstep.agent.checks.judging import SEVERITY
from everstep.agent.checks.monitor import Standing
from everstep.agent.log import say
from everstep.health import Result
from everstep.model import Seconds

CONNECTIONS_MAX = 8
REQUEST_BYTES_MAX = 8192
WITHIN_S: Seconds = 5.0
"""For a whole request and its answer: what scrapes is on the same network."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_Labels = Mapping[str, str]
_COUNTERS = {
    "samples": "samples taken",
    "not_sampled": "samples that could not be taken",
    "unanswered": "times a child did not answer",
    "seconds": "time from asking to results",
    "cpu_seconds": "processor time of the agent and of children",
}
"""Fields of SourceCounts -> what they count."""


class SourceCounts(msgspec.Struct):
    """What one source has done since the agent started."""

    samples: int = 0
    not_sampled: int = 0
    unanswered: int = 0
    seconds: Seconds = 0.0
    """Time from asking to results, all samples together."""
    cpu_seconds: Seconds = 0.0
    """Of the agent for it, and of its children."""
    newest_at: Seconds | None = None
    """Time of the newest sample (CLOCK_BOOTTIME)."""
    absent: str = ""
    """Why there is none on this machine; empty if there is."""


class Seen(NamedTuple):
    """All that is shown."""

    now: Seconds
    results: Iterable[Result]
    alerts: Iterable[Standing]
    could_not_run: Mapping[str, int]
    defects: Mapping[str, int]
    sources: Mapping[str, SourceCounts]


def exposition(seen: Seen) -> str:
    """The text of one answer."""
    lines = [*_of_checks(seen), *_of_sources(seen)]
    return "".join(f"{line}\n" for line in lines)


def _of_checks(seen: Seen) -> Iterable[str]:
    results = list(seen.results)
    yield from _family(
        "everstep_check",
        "verdict: -1 could not run, 0 pass, 1 warn, 2 user, 3 job, 4 suspect, 5 evict",
        ((_of(each), SEVERITY[each.verdict]) for each in results),
    )
    yield from _family(
        "everstep_check_value",
        "a number that the check looked at, with its unit in its name",
        (
            ({**_of(each), "value": name}, value)
            for each in results
            for name, value in each.values.items()
        ),
    )
    yield from _family(
        "everstep_check_alert_age_seconds",
        "since the controller was told that it fails",
        (
            ({"check": each.check, "item": each.item}, seen.now - each.told_at)
            for each in seen.alerts
            if each.told is not None
        ),
    )
    yield from _family(
        "everstep_check_could_not_run_total",
        "results that were neither pass nor fail",
        (({"check": name}, count) for name, count in seen.could_not_run.items()),
    )
    yield from _family(
        "everstep_check_defects_total",
        "times the check itself failed",
        (({"check": name}, count) for name, count in seen.defects.items()),
    )


def _of_sources(seen: Seen) -> Iterable[str]:
    sources = list(seen.sources.items())
    present = [(name, counts) for name, counts in sources if not counts.absent]
    yield from _family(
        "everstep_check_source_absent",
        "1 if this machine does not have what it reads",
        (({"source": name}, int(bool(counts.absent))) for name, counts in sources),
    )
    yield from _family(
        "everstep_check_sample_age_seconds",
        "since the newest sample",
        (
            ({"source": name}, seen.now - counts.newest_at)
            for name, counts in present
            if counts.newest_at is not None
        ),
    )
    for name, about in _COUNTERS.items():
        yield from _family(
            f"everstep_check_{name}_total",
            about,
            (({"source": source}, getattr(counts, name)) for source, counts in present),
        )


def _of(result: Result) -> _Labels:
    return {"check": result.check, "item": result.item}


def _family(name: str, about: str, samples: Iterable[tuple[_Labels, float]]) -> Iterable[str]:
    yield f"# HELP {name} {about}"
    yield f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}"
    for labels, value in samples:
        said = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        yield f"{name}{{{said}}} {_number(value)}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isfinite(value):
        return str(round(value, 6))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


# --- the server ----------------------------------------------------------------------------------


async def serve(address: str, port: int, text: Callable[[], str]) -> asyncio.Server | None:
    """Answer with what `text` gives; None, and a line in the log, if the port cannot be had."""
    open_now: set[object] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ticket = object()
        writer.transport.set_write_buffer_limits(0)  # drained is sent: what is left is cut off
        try:
            if len(open_now) < CONNECTIONS_MAX:
                open_now.add(ticket)
                async with asyncio.timeout(WITHIN_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(_response(head, text))
                    await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # whoever that was, it wanted no answer
        finally:
            open_now.discard(ticket)
            # Not awaited, and not flushed for ever: the rest is the kernel's.
            writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()

    try:
        return await asyncio.start_server(answer, address, port, limit=REQUEST_BYTES_MAX)
    except OSError as error:
        say(f"no metrics at {address} port {port}: {error.strerror or error}")
        return None


def _response(head: bytes, text: Callable[[], str]) -> bytes:
    words = head.split(b"\r\n", 1)[0].split(b" ")
    if len(words) != 3 or words[0] != b"GET":
        return _message("405 Method Not Allowed", "GET alone\n", "Allow: GET\r\n")
    if words[1].partition(b"?")[0] not in (b"/metrics", b"/"):
        return _message("404 Not Found", "see /metrics\n")
    return _message("200 OK", text())


def _message(status: str, body: str, more: str = "") -> bytes:
    content = body.encode()
    return (
        f"HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE}\r\n"
        f"Content-Length: {len(content)}\r\n{more}Connection: close\r\n\r\n"
    ).encode() + content


async def close(server: asyncio.Server | None) -> None:
    """End it; for tests, the agent ends with it."""
    if server is not None:
        server.close()
        with contextlib.suppress(OSError):
            await server.wait_closed()
