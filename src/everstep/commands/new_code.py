"""Where new code comes from: a directory, or a commit of a git repository, as a snapshot.

For `everstep update`. It also finds out what the code continues, so that the controller knows which
version its author started from.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from everstep.code.git import at_ref
from everstep.code.manifest import Manifest
from everstep.code.snapshot import LIMITS, Snapshot, joined, take
from everstep.commands.source import Apart
from everstep.model import CodeOrigin, UserError

GIT_WITHIN_S = 10.0


class Source(NamedTuple):
    """New code."""

    snapshot: Snapshot
    given: tuple[int, ...]
    """Source roots of the job that it brings; the others are empty in the snapshot."""
    text: str
    """Where it comes from, for people."""
    origin: CodeOrigin
    ancestors: tuple[str, ...]
    """Of the commits that were asked about, those that it contains."""


class Sought(NamedTuple):
    """What the user named."""

    what: str
    """A directory, or a commit, branch or tag."""
    others: Sequence[str]
    """N=DIR for further source roots."""
    roots: Sequence[str]
    """The job's source roots, where they were when it was submitted."""
    apart: Apart
    """Directories that are no code, wherever they lie."""
    commits: Iterable[str]
    """Those that the job's versions came from."""


def find(sought: Sought) -> Source:
    """Take the snapshot. UserError says what is not there, or too large."""
    others = _others(sought.others, len(sought.roots))
    directory = Path(os.path.abspath(Path(sought.what).expanduser()))
    if directory.is_dir():
        first = _taken(directory, sought)
        repository = directory
        kind, text = "dir", f"{directory} on {socket.gethostname()}"
    else:
        repository, first = _at_ref(sought)
        kind, text = "git", f"git {first.commit[:12]} of {repository}"
    snapshots = {0: first} | {n: _taken(path, sought) for n, path in others.items()}
    text += "".join(f", root {number} from {path}" for number, path in others.items())
    commit = first.commit or _head(repository)
    return Source(
        snapshot=joined([snapshots.get(n, _NOTHING) for n in range(len(sought.roots))]),
        given=tuple(sorted(snapshots)),
        text=text,
        origin=CodeOrigin(
            kind=kind, path=str(repository), host=socket.gethostname(), commit=commit
        ),
        ancestors=_contained(repository, commit, sought.commits),
    )


_NOTHING = Snapshot(Manifest(roots=((),)), ({},))
_LIMITS = replace(LIMITS, within_s=60.0)
"""Unlike a submission, an update may wait for a slow file system."""


def _taken(directory: Path, sought: Sought) -> Snapshot:
    if not any(directory.iterdir()):
        raise UserError(f"{directory} is empty: there is no code in it.")
    apart = sought.apart
    return take([directory], _LIMITS, without=apart.without, linked=apart.linked)


def _at_ref(sought: Sought) -> tuple[Path, Snapshot]:
    """From the repository of the job's first source root, else from where the user is."""
    root = Path(sought.roots[0])
    repository = root if _head(root) else Path.cwd()
    if not _head(repository):
        raise UserError(
            f"{sought.what} is not a directory, and neither {root} nor {repository} lies in a git"
            " repository that could know it: name a directory."
        )
    return repository, at_ref(repository, sought.what, _LIMITS)


def _others(texts: Sequence[str], count: int) -> dict[int, Path]:
    found: dict[int, Path] = {}
    for text in texts:
        number, equals, path = text.partition("=")
        if not equals or not number.isdecimal() or not 0 < int(number) < count:
            last = f"1 to {count - 1}" if count > 2 else "1"
            known = (
                f"its further source roots are {last}" if count > 1 else "it has one source root"
            )
            raise UserError(f"--root {text} is no NUMBER=DIR of this job: {known}.")
        directory = Path(os.path.abspath(Path(path).expanduser()))
        if not directory.is_dir():
            raise UserError(f"--root {text}: there is no directory {directory}.")
        found[int(number)] = directory
    return dict(sorted(found.items()))


# --- git -----------------------------------------------------------------------------------------


def _head(directory: Path) -> str:
    """The commit that is checked out around this directory; empty if there is none."""
    done = _git(directory, "rev-parse", "--verify", "--quiet", "HEAD^{commit}")
    return done.stdout.strip() if done is not None and done.returncode == 0 else ""


def _contained(repository: Path, commit: str, commits: Iterable[str]) -> tuple[str, ...]:
    if not commit:
        return ()
    return tuple(
        each
        for each in dict.fromkeys(commits)
        if each and (each == commit or _is_ancestor(repository, each, commit))
    )


def _is_ancestor(repository: Path, older: str, newer: str) -> bool:
    done = _git(repository, "merge-base", "--is-ancestor", older, newer)
    return done is not None and done.returncode == 0


def _git(directory: Path, *words: str) -> subprocess.CompletedProcess[str] | None:
    """None if there is no git, no such directory, or it hangs."""
    git = shutil.which("git")
    if git is None or not directory.is_dir():
        return None
    # Variables of a hook, or of a person's shell, would lead to another repository.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        return subprocess.run(
            [git, "-C", str(directory), *words],
            stdin=subprocess.DEVNULL,
            env=environ,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=GIT_WITHIN_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
