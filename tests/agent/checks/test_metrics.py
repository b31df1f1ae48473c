"""What Prometheus sees, and that nobody who asks badly holds up the agent."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable

import pytest

from everstep.agent.checks import metrics
from everstep.agent.checks.metrics import Seen, SourceCounts, exposition, serve
from everstep.agent.checks.monitor import Standing
from everstep.diagnosis.words import Verdict
from everstep.health import Result

LINE = re.compile(r'[a-z_]+(\{([a-z]+="([^"\\\n]|\\.)*",?)*\})? (NaN|[+-]Inf|-?[0-9.e+-]+)')


def seen(*results: Result) -> Seen:
    bad = Result(check="net.link", item="eth0", verdict=Verdict.EVICT, why="down")
    standing = Standing(source="net", check="net.link", item="eth0", told=bad, told_at=90.0)
    return Seen(
        now=100.0,
        results=results,
        alerts=[standing, Standing(source="net", check="net.link", item="quiet")],
        could_not_run={"gpu.lost": 3},
        defects={"gpu.lost": 1},
        sources={
            "net": SourceCounts(samples=5, cpu_seconds=0.25, newest_at=98.5),
            "nvml": SourceCounts(absent="there is no driver"),
        },
    )


def test_every_result_is_a_number_of_its_check_and_item() -> None:
    text = exposition(
        seen(
            Result(check="net.link", item="eth0", verdict=Verdict.EVICT, why="down"),
            Result(check="host.load", verdict=Verdict.INFO, why="fine", values={"load": 0.5}),
            Result(check="gpu.lost", verdict=Verdict.ERROR, why="no rights"),
        )
    )
    lines = text.splitlines()
    assert 'everstep_check{check="net.link",item="eth0"} 5' in lines
    assert 'everstep_check{check="host.load",item=""} 0' in lines
    assert 'everstep_check{check="gpu.lost",item=""} -1' in lines
    assert 'everstep_check_value{check="host.load",item="",value="load"} 0.5' in lines
    assert 'everstep_check_alert_age_seconds{check="net.link",item="eth0"} 10.0' in lines
    assert 'everstep_check_could_not_run_total{check="gpu.lost"} 3' in lines
    assert 'everstep_check_defects_total{check="gpu.lost"} 1' in lines
    assert 'everstep_check_source_absent{source="nvml"} 1' in lines
    assert 'everstep_check_sample_age_seconds{source="net"} 1.5' in lines
    assert 'everstep_check_cpu_seconds_total{source="net"} 0.25' in lines
    assert 'everstep_check_unanswered_total{source="net"} 0' in lines
    assert "# TYPE everstep_check_samples_total counter" in lines
    assert "# TYPE everstep_check gauge" in lines
    assert "quiet" not in text
    assert not [line for line in lines if not line.startswith("#") and not LINE.fullmatch(line)]


@pytest.mark.parametrize("item", ['a"b', "a\\b", "a\nb", "\\n", "ü"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e300, -7.0])
def test_no_text_and_no_number_breaks_the_format(item: str, value: float) -> None:
    result = Result(check="c", item=item, verdict=Verdict.WARN, why="", values={"v": value})
    lines = exposition(seen(result)).splitlines()
    assert not [line for line in lines if not line.startswith("#") and not LINE.fullmatch(line)]


# --- the server ----------------------------------------------------------------------------------

Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


def with_server(
    work: Callable[[Connect], Awaitable[None]], text: Callable[[], str] = lambda: "some 1\n"
) -> None:
    async def run() -> None:
        server = await serve("127.0.0.1", 0, text)
        assert server is not None
        port = server.sockets[0].getsockname()[1]
        opened: list[asyncio.StreamWriter] = []

        async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            opened.append(writer)
            return reader, writer

        try:
            await work(connect)
        finally:
            for writer in opened:
                writer.transport.abort()
            await metrics.close(server)

    asyncio.run(run())


async def ask(connect: Connect, request: bytes) -> bytes:
    reader, writer = await connect()
    writer.write(request)
    try:
        return await reader.read()
    except ConnectionError:
        return b""


@pytest.mark.parametrize(
    ("request_line", "answer"),
    [
        (b"GET /metrics HTTP/1.1", b"HTTP/1.1 200 OK"),
        (b"GET /metrics?x=1 HTTP/1.0", b"HTTP/1.1 200 OK"),
        (b"GET / HTTP/1.1", b"HTTP/1.1 200 OK"),
        (b"GET /etc/passwd HTTP/1.1", b"HTTP/1.1 404 Not Found"),
        (b"POST /metrics HTTP/1.1", b"HTTP/1.1 405 Method Not Allowed"),
        (b"nonsense", b"HTTP/1.1 405 Method Not Allowed"),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * metrics.REQUEST_BYTES_MAX * 2, b""),
    ],
)
def test_it_answers_get_alone(request_line: bytes, answer: bytes) -> None:
    async def work(connect: Connect) -> None:
        got = await ask(connect, request_line + b"\r\nHost: x\r\n\r\n")
        assert got.startswith(answer)
        assert (b"\r\n\r\nsome 1\n" in got) == (b"200" in answer)
        assert bool(got) == bool(answer)

    with_server(work)


def test_who_says_nothing_is_sent_away_and_others_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics, "WITHIN_S", 0.3)

    async def work(connect: Connect) -> None:
        silent = [await connect() for _ in range(metrics.CONNECTIONS_MAX - 1)]
        good = await ask(connect, b"GET / HTTP/1.1\r\n\r\n")
        assert b"200 OK" in good
        assert [await reader.read() for reader, _ in silent] == [b""] * len(silent)

    with_server(work)


def test_there_are_no_more_connections_than_a_few() -> None:
    async def work(connect: Connect) -> None:
        for _ in range(metrics.CONNECTIONS_MAX):
            await connect()
        assert await ask(connect, b"GET / HTTP/1.1\r\n\r\n") == b""

    with_server(work)


def test_who_does_not_read_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "WITHIN_S", 0.2)
    much = "x" * (32 << 20)

    async def work(connect: Connect) -> None:
        reader, writer = await connect()
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        got = await reader.read(1)
        # What it does wrong: reads nothing for longer than it is given.
        await asyncio.sleep(0.5)
        got += await reader.read()
        assert len(got) < len(much)

    with_server(work, lambda: much)


def test_what_the_kernel_does_not_take_at_once_is_not_cut_off() -> None:
    much = "x" * 60_000

    async def run() -> bytes:
        server = await serve("127.0.0.1", 0, lambda: much)
        assert server is not None
        listening = server.sockets[0]
        listening.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDBUF, 4096
        )  # what it accepts has it, too
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        got = await reader.read()
        writer.close()
        await metrics.close(server)
        return got

    assert asyncio.run(run()).endswith(much.encode())


def test_a_port_that_is_taken_is_a_line_in_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    async def run() -> None:
        first = await serve("127.0.0.1", 0, str)
        assert first is not None
        port = first.sockets[0].getsockname()[1]
        assert await serve("127.0.0.1", port, str) is None
        await metrics.close(first)
        assert await serve("no-such-host.invalid", 0, str) is None

    asyncio.run(run())
    assert capsys.readouterr().out.count("no metrics at") == 2
