"""What an update becomes: what it is put on, what it is merged with, what its author is told."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import msgspec
import pytest

from everstep.actions import FinishJob, Outcome
from everstep.code.manifest import Entry, Manifest, version_of
from everstep.controller.accepting import Asked, Draft, draft, known, objections, script_paths
from everstep.controller.lineage import Lineage
from everstep.core.history import Condition, Ran, VersionBook
from everstep.core.state import Machine, State
from everstep.model import (
    NO_STEP,
    CheckpointSpec,
    CodeOrigin,
    CodeSpec,
    CodeVersion,
    JobId,
    JobSpec,
    MachineId,
    NodeRank,
    VersionId,
)

FIRST = {"train.py": "import model", "model.py": "1", "data.py": "1"}
ROLLED_BACK_AT = 1_700_000_000.0
A, B, C = "a" * 40, "b" * 40, "c" * 40


def manifest(*roots: dict[str, str]) -> Manifest:
    return Manifest(
        roots=tuple(
            tuple(
                Entry(
                    path=path,
                    digest=hashlib.sha256(text.encode()).hexdigest(),
                    size=len(text),
                )
                for path, text in sorted(root.items())
            )
            for root in roots
        )
    )


def from_directory(path: str = "/home/anna/gpt", host: str = "login1") -> CodeOrigin:
    return CodeOrigin(kind="dir", path=path, host=host)


class Job:
    """A job and what it knows of code."""

    def __init__(self, *roots: dict[str, str]) -> None:
        self.kept: dict[VersionId, Manifest] = {}
        first = manifest(*(roots or (FIRST,)))
        self.state = State(
            spec=JobSpec(
                job=JobId("j"),
                uid="0",
                command=("train.py", "--lr", "1"),
                working_dir="/job",
                nnodes=1,
                nproc_per_node=1,
                checkpoint=CheckpointSpec(directory="/c"),
                code=CodeSpec(
                    version=version_of(first),
                    roots=("/job", "/lib", "/more")[: len(first.roots)],
                ),
            )
        )
        self.add(first, Condition.RUNNING)

    def add(self, content: Manifest, condition: Condition, **told: Any) -> VersionBook:
        """One more version, put on the newest."""
        version = version_of(content)
        before = list(self.state.versions)
        base = told.pop("base", before[-1] if before else VersionId(""))
        origin, sent = told.pop("origin", CodeOrigin()), told.pop("sent", VersionId(""))
        number = len(before) + 1
        self.kept[version] = content
        book = VersionBook(
            code=CodeVersion(
                version=version, source="somewhere", base=base, sent=sent, origin=origin
            ),
            number=number,
            event=number,
            at=0.0,
            condition=condition,
            **{"by": "ben", **told},
        )
        self.state.versions[version] = book
        if condition is Condition.RUNNING:
            for other in self.state.versions.values():
                if other is not book and other.condition is Condition.RUNNING:
                    other.condition = Condition.RAN
            self.state.version = version
        return book

    def roll_back(self, book: VersionBook) -> None:
        """To the first."""
        book.condition, book.why = Condition.ROLLED_BACK, "TypeError: no"
        book.runs = [Ran(since=0.0, until=ROLLED_BACK_AT, from_step=NO_STEP)]
        first = next(iter(self.state.versions.values()))
        first.condition, self.state.version = Condition.RUNNING, first.code.version

    def draft(self, *roots: dict[str, str], **said: Any) -> Draft:
        theirs = manifest(*roots)
        told: dict[str, Any] = {"version": version_of(theirs), "source": "here", "by": "anna"}
        asked = Asked(**(told | {"origin": from_directory()} | said))
        return draft(asked, theirs, known(self.state), lambda version: self.kept[version])

    def refused(self, *roots: dict[str, str], **said: Any) -> str:
        found = self.draft(*roots, **said).objections
        assert found
        return "; ".join(found)

    def accepted(self, *roots: dict[str, str], **said: Any) -> CodeVersion:
        found = self.draft(*roots, **said)
        assert not found.objections
        assert found.code is not None
        assert found.code.version == version_of(found.manifest)
        return found.code


def test_a_first_update_is_what_was_sent() -> None:
    job = Job()
    found = job.draft(FIRST | {"model.py": "2", "new.py": "x"})
    assert found.code is not None
    assert found.objections == found.merged_from == ()
    assert found.code.changed == found.against_running == ("model.py", "new.py")
    assert (found.code.files, found.code.size_bytes) == (4, 15)
    assert found.code.base == job.state.version
    assert found.code.includes == ()
    assert found.code.remarks == ("it is based on v1, which runs",)


def test_what_two_people_changed_is_merged_by_files() -> None:
    job = Job()
    second = job.add(
        manifest(FIRST | {"model.py": "2"}), Condition.PENDING, origin=from_directory("/home/ben")
    )
    found = job.draft(FIRST | {"data.py": "2"})
    assert found.manifest == manifest(FIRST | {"model.py": "2", "data.py": "2"})
    assert found.merged_from == (second.code.version, job.state.version)
    assert found.code is not None
    assert found.code.base == second.code.version
    assert found.code.includes == (second.code.version,)
    assert found.code.changed == ("data.py",)
    assert found.against_running == ("data.py", "model.py")
    assert found.code.remarks == ("it is based on v2, which waits; changes of v2 (ben) stay in it",)


def test_what_two_people_changed_in_one_file_is_refused_with_its_name_and_theirs() -> None:
    job = Job()
    book = job.add(manifest(FIRST | {"model.py": "2"}), Condition.PENDING)
    book.code = msgspec.structs.replace(book.code, changed=("model.py",))
    said = job.refused(FIRST | {"model.py": "3"})
    assert said.startswith("model.py was changed by v2 of ben as well")
    assert "--exact" in said
    assert job.accepted(FIRST | {"model.py": "3"}, exact=True).remarks == (
        "it replaces v2, which waits, as a whole",
    )


def test_what_came_from_the_same_directory_is_continued() -> None:
    job = Job()
    job.add(manifest(FIRST | {"model.py": "2"}), Condition.RUNNING, origin=from_directory())
    found = job.draft(FIRST | {"model.py": "3"})
    assert found.objections == ()
    assert found.manifest == manifest(FIRST | {"model.py": "3"})
    # From another host, the same path is another directory.
    elsewhere = from_directory(host="login2")
    assert "model.py was changed" in job.refused(FIRST | {"model.py": "3"}, origin=elsewhere)


def test_who_continues_does_not_take_back_what_others_changed_meanwhile() -> None:
    job = Job(FIRST, {"lib.py": "1"})
    others = manifest(FIRST | {"model.py": "2"}, {"lib.py": "2"})
    book = job.add(others, Condition.RUNNING, by="ben", origin=from_directory("/home/ben"))
    book.code = msgspec.structs.replace(book.code, changed=("model.py",))
    sent = manifest(FIRST | {"data.py": "2"}, {})
    merged = job.draft(FIRST | {"data.py": "2"}, {})
    assert merged.code is not None
    assert merged.code.sent == version_of(sent)
    assert merged.manifest == manifest(FIRST | {"model.py": "2", "data.py": "2"}, {"lib.py": "2"})
    job.kept[version_of(sent)] = sent
    origin = from_directory()
    job.add(merged.manifest, Condition.RUNNING, origin=origin, sent=merged.code.sent)
    found = job.draft(FIRST | {"data.py": "3"}, {})
    assert found.manifest == manifest(FIRST | {"model.py": "2", "data.py": "3"}, {"lib.py": "2"})
    assert "model.py was changed by v2 of ben" in job.refused(FIRST | {"model.py": "3"}, {})


def test_what_was_deleted_is_gone() -> None:
    job = Job()
    job.add(manifest(FIRST | {"old.py": "2"}), Condition.RUNNING, origin=from_directory())
    assert job.accepted(FIRST | {"model.py": "2"}).changed == ("model.py", "old.py")


def test_a_commit_continues_the_newest_version_that_it_contains() -> None:
    job = Job()
    job.add(
        manifest(FIRST | {"model.py": "2"}),
        Condition.RUNNING,
        origin=CodeOrigin(kind="git", path="/g", host="h", commit=A),
    )
    job.add(
        manifest(FIRST | {"model.py": "2", "data.py": "2"}),
        Condition.RUNNING,
        origin=CodeOrigin(kind="git", path="/g", host="h", commit=B),
    )
    origin = CodeOrigin(kind="git", path="/elsewhere", host="other", commit=C)
    found = job.draft(FIRST | {"model.py": "3"}, origin=origin, ancestors=(A,))
    assert found.manifest == manifest(FIRST | {"model.py": "3", "data.py": "2"})
    said = job.refused(FIRST | {"model.py": "3"}, origin=origin)  # it contains neither
    assert said.startswith("model.py was changed by")


def test_what_was_rolled_back_is_no_longer_built_on_and_named_if_it_comes_back() -> None:
    job = Job()
    bad = job.add(
        manifest(FIRST | {"kernels.py": "fused"}), Condition.RUNNING, origin=from_directory()
    )
    job.roll_back(bad)
    moment = time.strftime("%d %b at %H:%M", time.localtime(ROLLED_BACK_AT))
    code = job.accepted(FIRST | {"kernels.py": "fused", "data.py": "2"})
    assert code.base == job.state.version
    assert code.remarks == (
        f"it is based on v1, which runs since v2 was rolled back on {moment}",
        f"it contains kernels.py as v2 had it, which was rolled back on {moment} (TypeError: no)",
    )
    clean = job.accepted(FIRST | {"kernels.py": "mended", "data.py": "2"})
    assert len(clean.remarks) == 1


def test_exactly_what_was_rolled_back_needs_another_word() -> None:
    job = Job()
    bad = job.add(manifest(FIRST | {"model.py": "2"}), Condition.RUNNING)
    job.roll_back(bad)
    said = job.refused(FIRST | {"model.py": "2"})
    assert said.startswith("it is exactly v2, which was rolled back on ")
    assert "--again" in said
    assert job.accepted(FIRST | {"model.py": "2"}, again=True).version == bad.code.version


def test_requirements_are_not_installed_and_that_is_said() -> None:
    code = Job().accepted(FIRST | {"requirements.txt": "x", "sub/environment.yaml": "y"})
    assert code.requirements == ("requirements.txt", "sub/environment.yaml")
    assert "does not install anything" in code.remarks[1]
    assert code.remarks[1].startswith("requirements.txt, sub/environment.yaml changed")


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (FIRST, "nothing changes: it is the same as v1, which runs"),
        ({"model.py": "2"}, "train.py, which the job runs, is not in it"),
    ],
)
def test_what_cannot_be_meant_is_refused(sent: dict[str, str], said: str) -> None:
    assert said in Job().refused(sent)


def test_what_runs_is_not_sent_again_while_another_one_waits() -> None:
    job = Job()
    job.add(manifest(FIRST | {"model.py": "2"}), Condition.PENDING, origin=from_directory())
    assert "it is the same as v1, which runs" in job.refused(FIRST)
    assert "it is the same as v2, which waits" in job.refused(FIRST | {"model.py": "2"})


def test_a_refused_version_is_not_built_on_and_may_be_sent_again() -> None:
    job = Job()
    job.add(manifest(FIRST | {"model.py": "("}), Condition.REFUSED, origin=from_directory())
    assert job.accepted(FIRST | {"model.py": "2"}).base == job.state.version
    assert job.accepted(FIRST | {"model.py": "("}).changed == ("model.py",)


def test_source_roots_that_are_not_given_stay() -> None:
    job = Job(FIRST, {"lib.py": "1"})
    found = job.draft(FIRST | {"model.py": "2"}, {}, given=(0,))
    assert found.manifest == manifest(FIRST | {"model.py": "2"}, {"lib.py": "1"})
    found = job.draft({}, {"lib.py": "2"}, given=(1,))
    assert found.code is not None
    assert found.code.changed == ("root-1/lib.py",)
    for given, roots in [((0,), [FIRST]), ((), [FIRST, {}]), ((2,), [FIRST, {}])]:
        assert "made for another job" in job.refused(*roots, given=given)


def test_a_script_is_looked_for_where_it_lies() -> None:
    spec = Job(FIRST, {"lib.py": "1"}).state.job
    assert script_paths(spec) == ["train.py"]
    replace = msgspec.structs.replace
    assert script_paths(replace(spec, command=("../lib/go.py",))) == ["root-1/go.py"]
    assert script_paths(replace(spec, command=("/usr/bin/x.py",))) == []
    assert script_paths(replace(spec, command=("pkg.main",), module=True)) == [
        "pkg/main.py",
        "pkg/main/__main__.py",
    ]
    assert script_paths(replace(spec, no_python=True)) == []


# --- no update at all ----------------------------------------------------------------------------


def test_a_job_that_is_over_gets_no_code() -> None:
    state = Job().state
    state.finish = FinishJob(
        id="1.0", cause="1", why="so it was", outcome=Outcome.FINISHED, exit_code=0
    )
    assert objections(state) == ["the job is over (finished): so it was"]


def test_a_job_without_versions_says_why_it_has_none() -> None:
    state = Job().state
    state.spec = msgspec.structs.replace(state.job, code=CodeSpec(why_none="too much in /home"))
    assert objections(state)[0].startswith("the code of this job is not versioned: too much in")


def test_an_agent_that_cannot_change_code_is_named() -> None:
    state = Job().state
    for number, old in enumerate((False, True, True)):
        name = MachineId(f"m{number}")
        state.machines[name] = Machine(
            machine=name, agent="", address="", host="", versions=None if old else {}
        )
    # A standby that cannot is never woken for code that it cannot run.
    state.positions = {NodeRank(0): MachineId("m0"), NodeRank(1): MachineId("m1")}
    assert "the agent of m1 is of an everstep that cannot change code" in objections(state)[0]


# --- names ---------------------------------------------------------------------------------------


def test_a_version_is_named_by_its_number_or_its_id() -> None:
    job = Job()
    second = job.add(manifest({"b": "2"}), Condition.RUNNING)
    lineage = Lineage(job.state.versions.values(), job.state.version)
    for text in ("v2", "2", second.code.version[:8], second.code.version):
        assert lineage.named(text) is second
    for text in ("", "v", "v3", "0", "v-1", second.code.version[:3], "²"):
        assert lineage.named(text) is None


def test_a_lineage_has_an_end_although_a_version_came_back() -> None:
    job = Job()
    first = next(iter(job.state.versions.values()))
    second = job.add(manifest(FIRST | {"model.py": "2"}), Condition.RUNNING)
    first.code = msgspec.structs.replace(first.code, base=second.code.version)
    lineage = Lineage(job.state.versions.values(), job.state.version)
    assert lineage.of(second) == [second, first]
