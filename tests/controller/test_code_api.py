"""Code over HTTP: a real controller with a real store, and everybody who sends it something."""

from __future__ import annotations

import asyncio
import errno
import http.client
import io
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import httpx2
import msgspec
import pytest
from starlette.applications import Starlette

from everstep.actions import HoldVersion, TryVersion
from everstep.code.manifest import Manifest, encoded
from everstep.code.snapshot import LIMITS, take
from everstep.code.store import CodeStore
from everstep.controller.accepting import Asked
from everstep.controller.code import Accepted, CodeApi, CodeDesk, RollsBack
from everstep.controller.gate import findings_token
from everstep.controller.version_views import VersionsView, VersionView
from everstep.core.history import Condition, VersionBook
from everstep.core.state import Phase, State
from everstep.events import VersionHeld, VersionTried
from everstep.files import read_json, write_atomically
from everstep.model import CodeOrigin, CodeSpec, CodeVersion, JobId, JobSpec, VersionId
from everstep.paths import JobPaths
from tests.controller.support import (
    TOKEN,
    Controller,
    FakeAgent,
    controller,
    make_job,
    wait_for,
)

TRAIN = {"train.py": "import model\n", "model.py": "SIZE = 1\n", "data.py": "SEED = 0\n"}


def write(directory: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory


def fresh() -> dict[str, str]:
    """Code that nobody has sent yet."""
    return TRAIN | {"model.py": f"SIZE = {uuid4().int}\n"}


class Author:
    """Somebody with a directory of code, and a store of their own to send it from."""

    def __init__(self, root: Path, name: str) -> None:
        self.name = name
        self.directory = root / name
        self._store = CodeStore(root / f"{name}-store")

    def has(self, files: dict[str, str]) -> VersionId:
        """Exactly these files; returns their version."""
        for path in self.directory.rglob("*.py"):
            path.unlink()
        write(self.directory, files)
        return self._store.add(take([self.directory]))

    def archive(self, version: VersionId) -> bytes:
        return b"".join(self._store.chunks(version))

    def manifest(self, version: VersionId) -> Manifest:
        return self._store.manifest(version)


class Job:
    """A controller whose one machine trains v1, and how people speak to it."""

    def __init__(self, paths: JobPaths, running: Controller, agent: FakeAgent) -> None:
        self.paths = paths
        self.running = running
        self.agent = agent
        self.store = CodeStore(paths.code)

    def put(self, version: str, body: Any, token: str = TOKEN) -> httpx2.Response:
        url = f"{self.running.endpoint().url}/v1/code/{version}"
        headers = {"Authorization": f"Bearer {token}"}
        return httpx2.put(url, headers=headers, content=body, trust_env=False, timeout=30)

    def send(self, author: Author, files: dict[str, str]) -> VersionId:
        version = author.has(files)
        assert self.put(version, author.archive(version)).status_code == 200
        return version

    def update(self, author: Author, files: dict[str, str], **said: Any) -> httpx2.Response:
        """Send these files, and ask for them."""
        return self.ask(author, self.send(author, files), **said)

    def ask(self, author: Author, version: VersionId, **said: Any) -> httpx2.Response:
        told: dict[str, Any] = {
            "version": version,
            "source": f"{author.directory} on here",
            "origin": CodeOrigin(kind="dir", path=str(author.directory), host="here"),
            "by": author.name,
        }
        asked = Asked(**(told | said))
        return self.running.post("/v1/update", msgspec.json.encode(asked))

    def accepted(self, author: Author, files: dict[str, str], **said: Any) -> Accepted:
        response = self.update(author, files, **said)
        assert response.status_code == 200, response.text
        return msgspec.json.decode(response.content, type=Accepted)

    def refused(self, author: Author, files: dict[str, str], **said: Any) -> str:
        response = self.update(author, files, **said)
        assert response.status_code == 409, response.text
        return error_of(response)

    def versions(self) -> VersionsView:
        return msgspec.json.decode(self.running.get("/v1/versions").content, type=VersionsView)

    def named(self, name: str) -> VersionView:
        return next(view for view in self.versions().versions if view.name == name)


def error_of(response: httpx2.Response) -> str:
    sentence = response.json()["error"]
    assert isinstance(sentence, str)
    assert "\n" not in sentence
    return sentence


def job_with_code(root: Path, files: dict[str, str]) -> JobPaths:
    """A job as the command line submits it: its code is in the controller's store."""
    paths = make_job(root)
    directory = write(root / "code", files)
    version = CodeStore(paths.code).add(take([directory]))
    spec = read_json(paths.spec, JobSpec)
    code = CodeSpec(version=version, roots=(str(directory),))
    changed_spec = msgspec.structs.replace(spec, code=code, working_dir=str(directory))
    write_atomically(paths.spec, changed_spec)
    return paths


@contextmanager
def training(root: Path) -> Iterator[Job]:
    """Its agent answers no order about code, so whatever is accepted waits."""
    paths = job_with_code(root, TRAIN)
    version = read_json(paths.spec, JobSpec).code.version
    with controller(paths) as running:
        agent = FakeAgent()
        agent.connect(running.endpoint().url)
        agent.join(versions=(version,))
        agent.stop_ranks()
        agent.start_ranks()
        wait_for("running", lambda: running.status().phase is Phase.RUNNING)
        yield Job(paths, running, agent)
        agent.disconnect()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """One that is only sent code."""
    with training(tmp_path_factory.mktemp("job")) as job:
        yield job
        assert [view.name for view in job.versions().versions] in ([], ["v1"])


@pytest.fixture
def updated(tmp_path: Path) -> Iterator[Job]:
    """One of its own."""
    with training(tmp_path / "job") as job:
        yield job


@pytest.fixture
def anna(tmp_path: Path) -> Author:
    return Author(tmp_path, "anna")


@pytest.fixture
def ben(tmp_path: Path) -> Author:
    return Author(tmp_path, "ben")


# --- archives ------------------------------------------------------------------------------------


def test_an_archive_comes_back_as_it_was_sent(job: Job, anna: Author) -> None:
    version = job.send(anna, TRAIN | {"new.py": "x = 1\n" * 100_000})
    job.store.verify(version)
    given = job.running.get(f"/v1/code/{version}")
    assert given.content == anna.archive(version)
    assert int(given.headers["content-length"]) == len(given.content)
    listed = job.running.get(f"/v1/code/{version}/manifest").content
    assert listed == encoded(anna.manifest(version))
    other = CodeStore(anna.directory.parent / "elsewhere")
    other.receive(version, io.BytesIO(given.content))
    other.verify(version)
    assert job.put(version, b"").status_code == 200  # it is there: nothing needs to be sent


def test_many_may_send_the_same_at_once(job: Job, anna: Author) -> None:
    version = anna.has(TRAIN | {"big.py": "y = 2\n" * 200_000})
    archive, codes = anna.archive(version), []
    senders = [
        threading.Thread(target=lambda: codes.append(job.put(version, archive).status_code))
        for _ in range(6)
    ]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    assert codes == [200] * 6
    job.store.verify(version)
    assert [path for path in job.paths.code.iterdir() if path.name.startswith(".new")] == []


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        pytest.param(lambda archive: archive[:-3], "3 bytes before the end", id="cut"),
        pytest.param(lambda archive: archive[:-1] + b"?", "damaged", id="damaged"),
        pytest.param(lambda _: b"", "", id="nothing"),
        pytest.param(lambda _: b"\x00\xff garbage" * 1000, "", id="garbage"),
    ],
)
def test_a_bad_archive_is_refused_and_leaves_nothing(
    job: Job, anna: Author, spoil: Any, said: str
) -> None:
    version = anna.has(fresh())
    response = job.put(version, spoil(anna.archive(version)))
    assert response.status_code == 400
    assert said in error_of(response)
    assert not job.store.has(version)
    assert [path.name for path in job.paths.code.iterdir() if path.name[0] == "."] == [".lock"]


def test_who_vanishes_while_sending_leaves_nothing(job: Job, anna: Author) -> None:
    version = anna.has(TRAIN | {"big.py": "z = 3\n" * 200_000})
    archive = anna.archive(version)
    address = urlsplit(job.running.endpoint().url)
    assert address.hostname is not None
    connection = http.client.HTTPConnection(address.hostname, address.port)
    connection.putrequest("PUT", f"/v1/code/{version}")
    connection.putheader("Authorization", f"Bearer {TOKEN}")
    connection.putheader("Content-Length", str(len(archive)))
    connection.endheaders()
    connection.send(archive[: len(archive) // 2])
    half = lambda: [p for p in job.paths.code.iterdir() if p.name.startswith(".new")]  # noqa: E731
    wait_for("the half that came", half)
    connection.close()
    wait_for("nothing to be left of it", lambda: not half())
    assert not job.store.has(version)


def test_what_is_too_large_is_said_before_it_is_sent(job: Job) -> None:
    address = urlsplit(job.running.endpoint().url)
    assert address.hostname is not None
    connection = http.client.HTTPConnection(address.hostname, address.port)
    connection.putrequest("PUT", f"/v1/code/{'a' * 64}")
    connection.putheader("Authorization", f"Bearer {TOKEN}")
    connection.putheader("Content-Length", str(LIMITS.total_bytes * 2))
    connection.endheaders()
    response = connection.getresponse()
    assert response.status == 413
    assert b"256 MiB" in response.read()
    connection.close()


class FullStore(CodeStore):
    """On a file system without room."""

    def receive(self, version: VersionId, source: Any) -> None:
        source.read(1)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.root / version))


def test_what_nobody_asks_for_is_removed_after_an_hour(
    tmp_path: Path, anna: Author, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, sent, accepted, left, last = (anna.has(fresh()) for _ in range(5))
    spec = read_json(make_job(tmp_path / "job").spec, JobSpec)
    store = CodeStore(tmp_path / "kept")
    state = State(spec=msgspec.structs.replace(spec, code=CodeSpec(version=first)))
    code = CodeVersion(version=accepted, source="a test", sent=sent)
    state.versions[accepted] = VersionBook(code=code, number=2, by="anna", at=0.0, event=9)
    app = Starlette(routes=CodeApi(CodeDesk(state, store, lambda: VERSIONS, nothing)).routes())

    def put(version: VersionId) -> int:
        return asyncio.run(called(app, "PUT", version, anna.archive(version)))[0]

    assert [put(version) for version in (first, sent, accepted, left)] == [200] * 4
    assert set(store.versions()) == {first, sent, accepted, left}
    monkeypatch.setattr("everstep.controller.code.UNCLAIMED_S", 0.0)
    assert put(last) == 200
    assert set(store.versions()) == {first, sent, accepted, last}


def test_what_a_killed_controller_left_half_written_is_removed(tmp_path: Path) -> None:
    paths = job_with_code(tmp_path, TRAIN)
    half = paths.code / ".new-abc" / "root-0"
    half.mkdir(parents=True)
    (half / "train.py").write_text("imp")
    version = read_json(paths.spec, JobSpec).code.version
    with controller(paths):
        wait_for("it is gone", lambda: not half.parent.exists())
        assert CodeStore(paths.code).versions() == (version,)


def test_a_full_disk_is_said_with_what_to_do(tmp_path: Path) -> None:
    desk = CodeDesk(State(), FullStore(tmp_path), lambda: VERSIONS, nothing)
    code, body = asyncio.run(called(Starlette(routes=CodeApi(desk).routes()), "PUT", "ab" * 32))
    assert code == 507
    assert str(tmp_path).encode() in body
    assert b"make room" in body


async def nothing(_: Any) -> None:
    raise AssertionError("nothing may be journalled")


VERSIONS = VersionsView(job=JobId("j"), versions=(), running="", machines=0, roots=(), why_none="")


async def called(
    app: Starlette, method: str, version: str, body: bytes = b"abc"
) -> tuple[int, bytes]:
    """One request, without a server."""
    parts = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Any] = []

    async def receive() -> Any:
        return parts.pop(0) if parts else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": f"/v1/code/{version}",
        "query_string": b"",
        "headers": [(b"content-length", str(len(body)).encode())],
    }
    await app(scope, receive, send)
    return sent[0]["status"], b"".join(each.get("body", b"") for each in sent[1:])


def test_a_store_that_cannot_be_written_is_said(job: Job, anna: Author) -> None:
    version = anna.has(fresh())
    aside = job.paths.code.rename(job.paths.root / "aside")
    job.paths.code.write_text("no directory")
    response = job.put(version, anna.archive(version))
    assert response.status_code == 500
    assert str(job.paths.code) in error_of(response)
    job.paths.code.unlink()
    aside.rename(job.paths.code)
    assert job.put(version, anna.archive(version)).status_code == 200


@pytest.mark.parametrize("name", ["abc", "A" * 64, "..", "g" * 64, "%2e%2e%2fetc"])
def test_what_is_no_version_is_no_path(job: Job, name: str) -> None:
    for response in (job.put(name, b""), job.running.get(f"/v1/code/{name}")):
        assert response.status_code in (400, 404)
        assert "error" in response.json()
    assert job.running.get(f"/v1/code/{'0' * 64}").status_code == 404


# --- updates -------------------------------------------------------------------------------------


def test_an_update_goes_from_its_author_into_training(updated: Job, anna: Author) -> None:
    job, agent = updated, updated.agent
    answer = job.accepted(anna, TRAIN | {"model.py": "SIZE = 2\n"}, note="larger", overlap=3)
    assert (answer.name, answer.base) == ("v2", "v1")
    assert answer.changed == ("model.py",)
    hold = agent.order(HoldVersion)
    assert hold.version == answer.version
    view = job.named("v2")
    assert (view.condition, view.by, view.note) == (Condition.PENDING, "anna", "larger")
    assert (view.held, view.overlap, view.origin.path) == (0, 3, str(anna.directory))
    assert "v2 (urgent) is held by 0 of 1 machines" in job.running.status().code.waiting[0]
    agent.report(VersionHeld(machine=agent.machine, action=hold.id, version=hold.version))
    trial = agent.order(TryVersion)
    agent.report(
        VersionTried(
            machine=agent.machine,
            action=trial.id,
            version=trial.version,
            took_s=1.5,
            elsewhere=("/opt/x.py",),
        )
    )
    agent.stop_ranks()
    assert agent.start_ranks().version == answer.version
    wait_for("v2 to run", lambda: job.named("v2").condition is Condition.RUNNING)
    status = job.running.status()
    assert (status.code.running, status.code.waiting) == ("v2", ())
    assert job.named("v2").elsewhere == ("/opt/x.py",)
    told = job.running.get("/v1/why/v2").json()["story"]
    names = [line["name"] for line in told]
    assert [name for name in names if name in ("UpdateRequested", "VersionTried", "SwitchCode")]
    assert names.index("UpdateRequested") < names.index("VersionTried") < names.index("SwitchCode")
    incident = job.running.incidents().incidents[0]
    assert incident.planned
    assert (incident.version, [taken.rung for taken in incident.rungs]) == ("v1", ["hot update"])


def test_two_updates_at_once_are_both_in_the_newest(
    updated: Job, anna: Author, ben: Author
) -> None:
    first = updated.send(anna, TRAIN | {"model.py": "SIZE = 2\n"})
    second = updated.send(ben, TRAIN | {"data.py": "SEED = 2\n"})
    answers: list[httpx2.Response] = []
    sends = [
        threading.Thread(target=lambda a=author, v=version: answers.append(updated.ask(a, v)))
        for author, version in ((anna, first), (ben, second))
    ]
    for send in sends:
        send.start()
    for send in sends:
        send.join()
    assert [answer.status_code for answer in answers] == [200, 200]
    newest = updated.named("v3")
    merged = updated.store.roots(newest.version)[0]
    assert (merged / "model.py").read_text() == "SIZE = 2\n"
    assert (merged / "data.py").read_text() == "SEED = 2\n"
    updated.store.verify(newest.version)
    assert (newest.base, newest.includes) == ("v2", ("v2",))


def test_what_is_refused_is_one_sentence_and_changes_nothing(
    updated: Job, anna: Author, ben: Author
) -> None:
    job = updated
    unsent = anna.has(TRAIN | {"model.py": "SIZE = 9\n"})
    assert "send it before the update" in error_of(job.ask(anna, unsent))
    assert "nothing changes" in job.refused(anna, TRAIN)
    assert "train.py" in job.refused(anna, {"other.py": ""})
    assert job.ask(anna, VersionId("../x")).status_code == 400
    assert job.running.post("/v1/update", b"{}").status_code == 400
    assert [view.name for view in job.versions().versions] == ["v1"]
    job.accepted(anna, TRAIN | {"model.py": "SIZE = 2\n"})
    said = job.refused(ben, TRAIN | {"model.py": "SIZE = 3\n"})
    assert "model.py was changed by v2 of anna" in said
    assert [view.name for view in job.versions().versions] == ["v1", "v2"]


def test_a_dry_run_says_the_same_and_leaves_nothing(job: Job, anna: Author) -> None:
    before = list(job.paths.code.iterdir())
    version = anna.has(TRAIN | {"model.py": "SIZE = 7\n"})
    manifest = anna.manifest(version)
    response = job.ask(anna, version, dry_run=True, manifest=manifest)
    would = msgspec.json.decode(response.content, type=Accepted)
    assert (would.name, would.against_running, would.objections) == ("v2", ("model.py",), ())
    same = job.ask(anna, anna.has(TRAIN), dry_run=True, manifest=anna.manifest(anna.has(TRAIN)))
    assert "nothing changes" in msgspec.json.decode(same.content, type=Accepted).objections[0]
    assert job.ask(anna, version, dry_run=True).status_code == 400
    assert list(job.paths.code.iterdir()) == before


# --- rollbacks -----------------------------------------------------------------------------------


def test_a_rollback_without_anything_earlier_is_refused(job: Job) -> None:
    for to, said in [
        ("", "there is nothing to roll back to: v1 runs"),
        ("v1", "v1 is what runs"),
        ("v7", "there is no version v7: the job has v1"),
    ]:
        response = job.running.post("/v1/rollback", {"by": "anna", "to": to})
        assert response.status_code == 409
        assert said in error_of(response)


def test_a_version_that_ran_comes_back(updated: Job, anna: Author) -> None:
    job, agent = updated, updated.agent
    first = job.named("v1").version
    job.accepted(anna, TRAIN | {"model.py": "SIZE = 2\n"})
    assert "never ran" in error_of(job.running.post("/v1/rollback", {"by": "anna", "to": "v2"}))
    hold = agent.order(HoldVersion)
    agent.report(VersionHeld(machine=agent.machine, action=hold.id, version=hold.version))
    trial = agent.order(TryVersion)
    agent.report(VersionTried(machine=agent.machine, action=trial.id, version=trial.version))
    agent.stop_ranks()
    agent.start_ranks()
    wait_for("v2 to run", lambda: job.named("v2").condition is Condition.RUNNING)
    dry = job.running.post("/v1/rollback", {"by": "anna", "to": "v1", "dry_run": True})
    assert msgspec.json.decode(dry.content, type=RollsBack).name == "v1"
    assert job.named("v2").condition is Condition.RUNNING
    answer = job.running.post("/v1/rollback", {"by": "anna", "to": "v1", "note": "it is slow"})
    assert msgspec.json.decode(answer.content, type=RollsBack).running == "v2"
    agent.stop_ranks()
    assert agent.start_ranks().version == first
    wait_for("v1 to run", lambda: job.named("v1").condition is Condition.RUNNING)
    assert job.named("v2").condition is Condition.ROLLED_BACK
    assert "it is slow" in job.named("v2").why


# --- who may -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("token", "code"), [("wrong", 401), (findings_token(TOKEN), 403)])
def test_only_the_jobs_own_token_opens_code(job: Job, token: str, code: int) -> None:
    version = "a" * 64
    assert job.put(version, b"x", token).status_code == code
    for path in (f"/v1/code/{version}", f"/v1/code/{version}/manifest", "/v1/versions"):
        assert job.running.get(path, token=token).status_code == code
    for path in ("/v1/update", "/v1/rollback"):
        assert job.running.post(path, {"by": "x"}, token).status_code == code
