"""A controller that takes code and plays scenes: for the tests of update, rollback, versions."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from everstep.code.store import CodeStore
from everstep.controller.accepting import Asked
from everstep.controller.code import Accepted, RollsBack
from everstep.controller.version_views import RunView, VersionsView, VersionView
from everstep.controller.views import StatusView
from everstep.core.history import Condition
from everstep.journal import StoryLine
from everstep.journal.index import Part
from everstep.model import CodeOrigin, JobId, Step, VersionId
from tests.commands.fake_controller import FakeController, Refusal, job_in, status_view


def version_view(name: str = "v2", **changed: Any) -> VersionView:
    told: dict[str, Any] = {
        "name": name,
        "version": VersionId(name[1:] * 64),
        "condition": Condition.PENDING,
        "by": "anna",
        "note": "",
        "at": 1_700_000_000.0,
        "source": "/home/anna/gpt on login1",
        "origin": CodeOrigin(),
        "files": 3,
        "size_bytes": 300,
        "base": "v1",
        "includes": (),
        "changed": ("model.py",),
        "requirements": (),
        "remarks": (),
        "urgent": True,
        "due_at": None,
        "overlap": 0,
        "why": "",
        "failure": "",
        "detail": "",
        "tried": False,
        "untold": (),
        "elsewhere": (),
        "held": 0,
        "not_held": {},
        "runs": (),
        "ran_s": 0.0,
        "ran_steps": 0,
        "repeats": "",
    }
    return VersionView(**(told | changed))


RAN = RunView(since=0.0, until=60.0, from_step=Step(-1), steps=120, well=True)
FIRST = version_view(
    "v1", by="", base="", condition=Condition.RUNNING, runs=(RAN,), ran_s=7200.0, ran_steps=120
)


class Scene:
    """What the controller says from one look at it to the next."""

    def __init__(self, status: StatusView | None = None, **changed: Any) -> None:
        self.status = status or status_view()
        self.changed = changed


class CodeController(FakeController):
    """Takes code, and plays a few scenes with v2 once that was asked for."""

    def __init__(self, directory: Path) -> None:
        super().__init__(job_in(directory))
        self.store = CodeStore(self.paths.root / "taken")
        self.roots: tuple[str, ...] = ("/home/anna/gpt",)
        self.why_none = ""
        self.first = FIRST
        self.puts = 0
        self.asked: list[Asked] = []
        self.refusal = ""
        self.remarks: tuple[str, ...] = ("it is based on v1, which runs",)
        self.objections: tuple[str, ...] = ()
        self.scenes: list[Scene] = []
        self.after: Callable[[], None] = lambda: None
        self.before_taking: Callable[[], None] = lambda: None
        self._sent = VersionId("")

    def take(self, path: str, body: bytes) -> Any:
        self.before_taking()
        self.puts += 1
        self.store.receive(VersionId(path.rpartition("/")[2]), io.BytesIO(body))
        return {}

    def reply(self, path: str, body: Any) -> Any:
        if path == "/v1/rollback":
            self.posted.append((path, body))
            self._sent = FIRST.version
            return RollsBack(name="v1", version=FIRST.version, running="v2")
        assert path == "/v1/update"
        asked = msgspec.convert(body, Asked)
        self.asked.append(asked)
        if self.refusal:
            raise Refusal(409, self.refusal)
        self._sent = asked.version
        return Accepted(
            name="v2",
            version=asked.version,
            base="v1",
            remarks=self.remarks,
            changed=("model.py",),
            against_running=("model.py",) if asked.dry_run else (),
            objections=self.objections,
        )

    def answer(self, path: str, query: dict[str, str]) -> Any:
        scene = self.scenes[0] if self.scenes else Scene()
        if path.startswith("/v1/code/"):
            version = VersionId(path.split("/")[3])
            if not self.store.has(version):
                raise Refusal(404, "it is not here")
            return self.store.manifest(version)
        if path == "/v1/versions":
            return self._versions(scene)
        if path == "/v1/status" and self._sent:
            if len(self.scenes) > 1:
                self.scenes.pop(0)
            elif self.scenes:
                self.after()
            return scene.status
        if path.startswith("/v1/why/"):
            tried = {"machine": "m4", "took_s": 1.26}
            line = StoryLine(
                id="9",
                part=Part.EVENT,
                time=1.0,
                name="VersionTried",
                cause="8.0",
                why="",
                fields=tried,
            )
            return {"story": [line]}
        return super().answer(path, query)

    def _versions(self, scene: Scene) -> VersionsView:
        views = [self.first]
        if self._sent and self._sent != FIRST.version:
            views.append(version_view(version=self._sent, **scene.changed))
        elif self._sent:
            views = [msgspec.structs.replace(FIRST, **scene.changed), version_view()]
        return VersionsView(
            job=JobId("j"),
            versions=tuple(views),
            running="v1",
            machines=5,
            roots=self.roots,
            why_none=self.why_none,
        )
