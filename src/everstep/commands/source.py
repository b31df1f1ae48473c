"""The user's code at submission: looked at for --dry-run, kept as the job's first version.

A version is worth having and never worth a failed or slow submission: whatever goes wrong becomes
the sentence why the job has none. Its ranks then run the code as it lies, as under torchrun.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from everstep.checkpoint.tier import is_url
from everstep.code.manifest import short, version_of
from everstep.code.snapshot import MIB, Snapshot, take
from everstep.code.store import CodeStore
from everstep.model import CodeSpec, EverstepError, JobSpec

COPY_WITHIN_S = 5.0
"""For the copy into the job's directory; what it reads was read just before."""
TRIES = 2
"""An editor that saves a file while we look takes it away for a moment."""


class Apart(NamedTuple):
    """Directories that are no code, wherever they lie."""

    without: tuple[Path, ...]
    """Of everstep's own; they are no part of a version."""
    linked: tuple[Path, ...]
    """Of what the job writes; a version has links to them."""


def apart(spec: JobSpec, state_dir: Path, log_dir: str | None = None) -> Apart:
    """What of the source roots is left out besides what names say. An update asks as well."""
    jobs = [path.parent for path in state_dir.glob("*/spec.json")]
    checkpoint = spec.checkpoint
    written = [checkpoint.directory, checkpoint.local_directory, log_dir or ""]
    return Apart(
        without=(state_dir, *jobs),
        linked=tuple(
            Path(spec.working_dir) / path for path in written if path and not is_url(path)
        ),
    )


def versioned(
    spec: JobSpec, store: CodeStore, apart_from: Apart, say: Callable[[str], None]
) -> JobSpec:
    """The same job with its first code version, kept in this store, or with why there is none."""
    if not spec.code.roots:
        return spec
    try:
        code = _kept(spec.code, store, apart_from, say)
    except (EverstepError, OSError) as error:
        code = CodeSpec(roots=spec.code.roots, why_none=_sentence(error))
        say(_not_versioned(code))
    return msgspec.structs.replace(spec, code=code)


def described(spec: JobSpec, apart_from: Apart) -> list[str]:
    """The lines of --dry-run."""
    if not spec.code.roots:
        return [_not_versioned(spec.code)] if spec.code.why_none else []
    try:
        snapshot = _taken(spec.code, apart_from)
    except (EverstepError, OSError) as error:
        return [_not_versioned(CodeSpec(why_none=_sentence(error)))]
    manifest = snapshot.manifest
    size = f"{manifest.files} files, {manifest.size_bytes / MIB:.2f} MiB"
    where = ", ".join(spec.code.roots)
    line = f"code version {short(version_of(manifest))}: {size} in {where}"
    return [line, *(f"  {remark}" for remark in snapshot.remarks)]


def _kept(
    code: CodeSpec, store: CodeStore, apart_from: Apart, say: Callable[[str], None]
) -> CodeSpec:
    left = TRIES
    while True:
        left -= 1
        try:
            snapshot = _taken(code, apart_from)
            version = store.add(snapshot, within_s=COPY_WITHIN_S)
        except FileNotFoundError:
            if not left:
                raise
        else:
            for remark in snapshot.remarks:
                say(remark)
            kept = store.manifest(version)
            return CodeSpec(
                roots=code.roots, version=version, files=kept.files, size_bytes=kept.size_bytes
            )


def _taken(code: CodeSpec, apart_from: Apart) -> Snapshot:
    roots = [Path(root) for root in code.roots]
    return take(roots, without=apart_from.without, linked=apart_from.linked)


def _sentence(error: EverstepError | OSError) -> str:
    if isinstance(error, OSError):
        return f"{error.filename or 'the code'} cannot be read or copied: {error.strerror or error}"
    return str(error).rstrip(".")


def _not_versioned(code: CodeSpec) -> str:
    return f"the code is not versioned: {code.why_none}"
