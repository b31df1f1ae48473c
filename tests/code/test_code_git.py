"""A commit as a snapshot: the same version as its directory, of real repositories."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from everstep.code import git
from everstep.code.git import at_ref
from everstep.code.manifest import version_of
from everstep.code.snapshot import CodeTooLarge, Limits, take
from everstep.code.store import CodeStore
from everstep.model import UserError
from tests.code.trees import TREE, contents, paths, plant, targets

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 12345\n"


class Repository:
    """One with a commit, and its `git` command."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.git("init", "--quiet", "--initial-branch=main")

    def git(self, *words: str) -> str:
        who = ["-c", "user.name=Anna", "-c", "user.email=anna@example.org"]
        who += ["-c", "protocol.file.allow=always", "-c", "commit.gpgsign=false"]
        self.root.mkdir(exist_ok=True)
        argv = ["git", "-C", str(self.root), *who, *words]
        return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()

    def commit(self) -> str:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message=more")
        return self.git("rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    made = Repository(tmp_path / "repo")
    plant(made.root, TREE)
    (made.root / "train.py").chmod(0o755)
    made.commit()
    return made


def test_a_commit_is_the_same_version_as_its_directory(
    repository: Repository, tmp_path: Path
) -> None:
    commit = repository.git("rev-parse", "HEAD")
    as_it_lies = take([repository.root])
    (repository.root / "train.py").write_bytes(b"later = 1\n")
    repository.commit()
    for ref in (commit, commit[:8], "main~1", "HEAD^"):
        snapshot = at_ref(repository.root, ref)
        assert snapshot.commit == commit
        assert version_of(snapshot.manifest) == version_of(as_it_lies.manifest)
    store = CodeStore(tmp_path / "code")
    version = store.add(at_ref(repository.root, commit))
    assert version == version_of(as_it_lies.manifest)
    store.verify(version)
    assert contents(store.roots(version)[0]) == TREE


def test_changes_that_are_not_committed_are_not_in_it(repository: Repository) -> None:
    before = at_ref(repository.root, "main")
    assert before.remarks == ()
    plant(repository.root, {"new.py": b"", "data/x": b""})
    (repository.root / "train.py").write_bytes(b"later = 1\n")
    after = at_ref(repository.root, "main")
    assert after.manifest == before.manifest
    (remark,) = after.remarks
    assert f"In {repository.root}, but not in the commit" in remark
    assert "data, new.py" in remark


def test_a_root_may_be_a_directory_of_the_repository(repository: Repository) -> None:
    plant(repository.root, {"net/up": "../train.py", "net/own": "layers.py"})
    repository.commit()
    snapshot = at_ref(repository.root / "net", "main")
    assert paths(snapshot.manifest) == ["__init__.py", "layers.py", "own", "up"]
    assert targets(snapshot.manifest) == {
        "own": "layers.py",
        "up": f"{repository.root}/net/../train.py",
    }
    assert snapshot.manifest == take([repository.root / "net"]).manifest


def test_the_environment_of_a_hook_does_not_lead_elsewhere(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    assert paths(at_ref(repository.root, "main").manifest) == sorted(TREE)


def test_names_with_spaces_quotes_and_line_breaks_come_through(repository: Repository) -> None:
    names = {"a b.py": b"1", 'q"x.py': b"2", "line\nbreak.py": b"3", "ü.py": b"4"}
    plant(repository.root, names)
    repository.commit()
    assert set(names) < set(paths(at_ref(repository.root, "main").manifest))


def test_what_is_left_out_and_linked_is_that_of_a_directory(repository: Repository) -> None:
    tree = {
        ".gitignore": b"data/\n",
        ".everstepignore": b"data/\nbig.bin\n",
        "data/x": b"1",
        "big.bin": b"2",
        "venv/x": b"3",
    }
    plant(repository.root, tree)
    repository.git("add", "--force", "venv/x")
    repository.commit()
    snapshot = at_ref(repository.root, "main")
    assert snapshot.manifest == take([repository.root]).manifest
    linked = {path: f"{repository.root}/{path}" for path in ("data", "big.bin")}
    assert targets(snapshot.manifest) == {**linked, "latest.yaml": "configs/small.yaml"}


def test_the_everstepignore_of_the_commit_counts(repository: Repository) -> None:
    plant(repository.root, {".everstepignore": b"configs/\n"})
    assert "configs" in targets(at_ref(repository.root, "main").manifest)  # none in the commit
    repository.commit()
    (repository.root / ".everstepignore").write_bytes(b"")
    assert "configs" in targets(at_ref(repository.root, "main").manifest)
    repository.commit()
    assert "configs" not in targets(at_ref(repository.root, "main").manifest)


def test_submodules_and_files_in_lfs_are_linked_with_a_remark(
    repository: Repository, tmp_path: Path
) -> None:
    library = Repository(tmp_path / "library")
    plant(library.root, {"lib.py": b""})
    library.commit()
    repository.git("submodule", "--quiet", "add", str(library.root), "third/library")
    plant(repository.root, {"weights.pt": POINTER, "gone.pt": POINTER})
    repository.commit()
    (repository.root / "gone.pt").unlink()
    snapshot = at_ref(repository.root, "main")
    linked = targets(snapshot.manifest)
    assert linked["third/library"] == f"{repository.root}/third/library"
    assert linked["weights.pt"] == f"{repository.root}/weights.pt"
    assert "gone.pt" in paths(snapshot.manifest)
    assert "gone.pt" not in linked
    submodules, in_lfs = snapshot.remarks
    assert "third/library" in submodules
    assert "weights.pt" in in_lfs
    assert "gone.pt" in in_lfs


def test_a_large_file_of_a_commit_is_refused_by_name(repository: Repository) -> None:
    with pytest.raises(CodeTooLarge, match=r"configs/small\.yaml has .*everstepignore"):
        at_ref(repository.root, "main", Limits(file_bytes=4))
    with pytest.raises(CodeTooLarge, match="more than 2 files"):
        at_ref(repository.root, "main", Limits(files=2))


@pytest.mark.parametrize("ref", ["nope", "", "--help", "-n", "main:train.py", "HEAD~99", "a b"])
def test_a_ref_that_is_none_is_one_sentence(repository: Repository, ref: str) -> None:
    with pytest.raises(UserError, match="has no commit, branch or tag"):
        at_ref(repository.root, ref)


def test_a_directory_without_repository_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="lies in no git repository"):
        at_ref(plant(tmp_path / "one", TREE), "main")


def test_a_repository_without_commits_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no commit, branch or tag 'main'"):
        at_ref(Repository(tmp_path / "repo").root, "main")


def test_a_directory_that_the_commit_lacks_is_one_sentence(repository: Repository) -> None:
    with pytest.raises(UserError, match=r"Commit .* \(main\) has no directory later/"):
        at_ref(plant(repository.root / "later", TREE), "main")


def test_a_missing_git_is_one_sentence(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="There is no program git here"):
        at_ref(repository.root, "main")


def test_a_git_that_hangs_is_given_up(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = plant(tmp_path / "bin", {"git": b"#!/bin/sh\nexec sleep 600\n"}) / "git"
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(git, "GIT_WITHIN_S", 0.2)
    with pytest.raises(UserError, match="Git did not answer within"):
        at_ref(repository.root, "main")


def test_an_object_that_is_lost_is_one_sentence(repository: Repository) -> None:
    blob = repository.git("rev-parse", "main:train.py")
    (repository.root / ".git/objects" / blob[:2] / blob[2:]).unlink()
    with pytest.raises(UserError, match="Git cannot"):
        at_ref(repository.root, "main")
