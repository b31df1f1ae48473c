"""The controller's server against everybody who is not a well-behaved agent. One controller."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from uuid import uuid4

import httpx2
import msgspec
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection

from everstep.controller.output import OutputPage
from everstep.core.state import Phase
from everstep.events import OutputLines, RanksStarted
from everstep.model import Generation, MachineId, Rank, Term
from everstep.wire import (
    FRAME_BYTES_MAX,
    PROTOCOL,
    Bare,
    Data,
    Hello,
    Refused,
    Welcome,
    decode,
    encode,
    encode_report,
)
from tests.controller.support import (
    Controller,
    FakeAgent,
    controller,
    last_words,
    make_job,
    open_socket,
    wait_for,
)

GENERATION = Generation(1)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Controller, FakeAgent]]:
    """A controller and the agent of its running job, which nothing below may disturb."""
    with controller(make_job(tmp_path_factory.mktemp("job"))) as running:
        agent = FakeAgent()
        agent.start(running.endpoint().url)
        wait_for("running", lambda: running.status().phase is Phase.RUNNING)
        assert agent.acknowledged()
        yield running, agent
        assert running.status().phase is Phase.RUNNING
        assert running.status().machines[0].condition == "member"
        agent.disconnect()


@pytest.fixture
def running(served: tuple[Controller, FakeAgent]) -> Controller:
    return served[0]


@pytest.fixture
def agent(served: tuple[Controller, FakeAgent]) -> FakeAgent:
    return served[1]


def error_of(response: httpx2.Response) -> str:
    """The one sentence of an error."""
    sentence = response.json()["error"]
    assert isinstance(sentence, str)
    assert "\n" not in sentence
    return sentence


# --- the token -----------------------------------------------------------------------------------


@pytest.mark.parametrize("token", ["", "wrong", "secret "[:-1] + "s", "Secret"])
@pytest.mark.parametrize("path", ["/v1/status", "/v1/why/1", "/v1/output", "/", "/nothing"])
def test_nothing_is_answered_without_the_token(running: Controller, path: str, token: str) -> None:
    response = running.get(path, token=token)
    assert response.status_code == 401
    assert "token" in error_of(response)


def test_nothing_is_done_without_the_token(running: Controller) -> None:
    assert running.post("/v1/stop", {"by": "a stranger"}, token="wrong").status_code == 401
    assert running.status().outcome is None


def test_an_agent_without_the_token_is_not_even_connected(running: Controller) -> None:
    with (
        pytest.raises(InvalidStatus) as refused,
        open_socket(running.endpoint().url, token="wrong"),
    ):
        pass
    assert refused.value.response.status_code == 401
    assert b"token" in refused.value.response.body


# --- agents that are none ------------------------------------------------------------------------


def hello(*, protocol: int = PROTOCOL, agent: str = "") -> bytes:
    """The first frame of an agent of machine "stranger", a new one if it has no name."""
    return encode(
        Hello(
            protocol=protocol,
            version="9.9",
            machine=MachineId("stranger"),
            agent=agent or uuid4().hex,
            term=Term(0),
            received=0,
        )
    )


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        pytest.param([b"\x00\xff garbage"], "10 bytes", id="bytes"),
        pytest.param([b""], "0 bytes", id="nothing"),
        pytest.param(["text"], "text", id="text"),
        pytest.param([encode(Bare(ack=0))], "not a Hello", id="no hello"),
        pytest.param([hello(), hello()], "middle of a session", id="two hellos"),
        pytest.param([hello(), b"\xc1"], "1 byte", id="garbage in a session"),
        pytest.param([hello(), encode(Bare(ack=7))], "acknowledged message 7", id="wrong ack"),
        pytest.param([hello(), encode(Data(seq=1, ack=0, body=b"?"))], "report", id="no report"),
    ],
)
def test_garbage_closes_its_own_connection_with_one_sentence_and_is_counted(
    running: Controller, frames: list[bytes | str], reason: str
) -> None:
    before = running.status().notes
    with open_socket(running.endpoint().url) as agents_socket:
        for frame in frames:
            agents_socket.send(frame)
        assert reason.split(maxsplit=1)[0] in last_words(agents_socket)
    wait_for("the count", lambda: running.status().notes != before)
    assert any("spoke garbage" in note for note in running.status().notes)


def overrun(agents_socket: ClientConnection) -> None:
    agents_socket.send(b"\x00" * (FRAME_BYTES_MAX + 1))
    agents_socket.recv()


def test_a_frame_beyond_all_measure_closes_the_connection(running: Controller) -> None:
    with open_socket(running.endpoint().url) as agents_socket, pytest.raises(ConnectionClosed):
        overrun(agents_socket)


def test_a_machine_cannot_speak_for_another_one(running: Controller, agent: FakeAgent) -> None:
    report = RanksStarted(machine=agent.machine, action="1.0", generation=GENERATION)
    with open_socket(running.endpoint().url) as agents_socket:
        agents_socket.send(hello())
        agents_socket.send(encode(Data(seq=1, ack=0, body=encode_report(report))))
        assert last_words(agents_socket) == "Machine stranger spoke for machine a."


def test_what_must_arrive_cannot_come_without_a_number(
    running: Controller, agent: FakeAgent
) -> None:
    del agent
    report = RanksStarted(machine=MachineId("stranger"), action="1.0", generation=GENERATION)
    with open_socket(running.endpoint().url) as agents_socket:
        agents_socket.send(hello())
        agents_socket.send(encode(Bare(ack=0, body=encode_report(report))))
        assert last_words(agents_socket) == "A RanksStarted came without a number."


def test_an_agent_of_a_protocol_two_versions_away_is_refused_in_one_sentence(
    running: Controller,
) -> None:
    with open_socket(running.endpoint().url) as agents_socket:
        agents_socket.send(hello(protocol=PROTOCOL + 2))
        data = agents_socket.recv()
        assert isinstance(data, bytes)
        refused = decode(data)
        assert isinstance(refused, Refused)
        assert f"speaks protocol {PROTOCOL + 2} and this controller speaks" in refused.reason
    assert any("another protocol version" in note for note in running.status().notes)


def test_an_agent_of_the_protocol_before_is_taken_in(running: Controller) -> None:
    with open_socket(running.endpoint().url) as agents_socket:
        agents_socket.send(hello(protocol=PROTOCOL - 1))
        data = agents_socket.recv()
        assert isinstance(data, bytes)
        welcome = decode(data)
        assert isinstance(welcome, Welcome)
        assert welcome.protocol == PROTOCOL, "by which it knows what it may say"


@pytest.mark.parametrize("agents", [("one", "one"), ("one", "two")], ids=["same", "restarted"])
def test_a_newer_connection_of_a_machine_takes_the_place_of_the_older_one(
    running: Controller, agents: tuple[str, str]
) -> None:
    url = running.endpoint().url
    with open_socket(url) as older, open_socket(url) as newer:
        older.send(hello(agent=agents[0]))
        older.recv()
        newer.send(hello(agent=agents[1]))
        newer.recv()
        assert last_words(older) == "The agent has a newer connection."
        newer.send(encode(Bare(ack=0)))
        assert newer.ping().wait(10.0)


# --- people --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "code", "says"),
    [
        ("/v1/stop", b"{", 400, "body"),
        ("/v1/stop", b'{"by": ""}', 400, "by"),
        ("/v1/stop", b"\xff", 400, "body"),
        ("/v1/inject", b'{"fault": "burn"}', 400, "burn"),
        ("/v1/inject", b'{"fault": "kill-rank", "rank": 7}', 409, "ranks go from 0 to 0"),
        ("/v1/inject", b'{"fault": "lose-machine", "machine": "z"}', 409, "machine z is not in"),
        ("/v1/status", b"", 405, "Method Not Allowed"),
        ("/v1/nothing", b"", 404, "Not Found"),
    ],
)
def test_a_request_that_cannot_be_done_is_refused_in_one_sentence(
    running: Controller, path: str, body: bytes, code: int, says: str
) -> None:
    response = running.post(path, body)
    assert response.status_code == code
    assert says in error_of(response)


def test_the_story_of_a_decision_is_told(running: Controller, agent: FakeAgent) -> None:
    story = running.get(f"/v1/why/{agent.orders[0].id}").json()
    assert story["id"] == agent.orders[0].id
    assert [line["name"] for line in story["story"]][-1] == "RanksStopped"
    unknown = running.get("/v1/why/999.9")
    assert unknown.status_code == 404
    assert "999.9" in error_of(unknown)


def test_incidents_and_the_time_account_are_told(running: Controller) -> None:
    view = running.incidents()
    assert view.incidents == ()
    assert sum(view.seconds.values()) > 0


# --- output --------------------------------------------------------------------------------------


def output(running: Controller, after: int, wait_s: float = 0.0) -> OutputPage:
    content = running.get(f"/v1/output?after={after}&wait_s={wait_s}").content
    return msgspec.json.decode(content, type=OutputPage)


def test_viewers_get_every_line_once_and_wait_for_the_next(
    running: Controller, agent: FakeAgent
) -> None:
    first = output(running, 0)

    def say(text: str, dropped: int = 0) -> None:
        agent.mention(
            OutputLines(
                machine=agent.machine,
                rank=Rank(0),
                generation=GENERATION,
                text=text,
                dropped_bytes=dropped,
            )
        )

    say("one\ntwo\n")
    page = output(running, first.next, wait_s=10.0)
    assert [line.text for line in page.lines] == ["one", "two"]
    assert output(running, page.next) == OutputPage(next=page.next, lines=[])
    say("three\n", dropped=17)
    rest = output(running, page.next, wait_s=10.0)
    assert [line.text for line in rest.lines] == [
        "[17 bytes of output left out here]",
        "three",
    ]
    assert [line.text for line in output(running, 0).lines][-2:] == [
        "[17 bytes of output left out here]",
        "three",
    ]


@pytest.mark.parametrize("query", ["after=x", "after=-1", "wait_s=nan", "wait_s=inf"])
def test_a_number_that_is_none_is_refused(running: Controller, query: str) -> None:
    response = running.get(f"/v1/output?{query}")
    assert response.status_code == 400
    assert "is not a number from 0 on" in error_of(response)


def test_http_that_is_none_disturbs_nobody(running: Controller) -> None:
    host, port = running.endpoint().url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(b"\x16\x03\x01 hello?\r\n\r\n")
        assert b"400" in raw.recv(1000)
    assert running.status().phase is Phase.RUNNING
