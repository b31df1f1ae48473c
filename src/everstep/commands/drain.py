"""Takes this node out of Slurm: its HealthCheckProgram must do so by itself (man slurm.conf).

Used by `everstep check --drain`. A node that is drained already is left alone, whoever did it: a
second reason would hide the first. Nothing here ever resumes a node.
"""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
from collections.abc import Mapping
from typing import NamedTuple

NODE_VARIABLE = "SLURMD_NODENAME"
"""What Slurm calls this node, where Slurm started us."""
WITHIN_S = 10.0
"""For one call of scontrol: a controller that is busy answers in a second or two."""
REASON_CHARS = 200
"""sinfo -R shows 20, scontrol all of it: long enough for the numbers."""
_STATE = re.compile(r"\bState=(\S+)")
_REASON = re.compile(r"\bReason=(.*?)(?: [A-Z]\w+=|$)", re.MULTILINE)


class Drained(NamedTuple):
    """What became of it."""

    done: bool
    """Drained now, or before."""
    say: str
    """One sentence."""


def drain(why: str, environ: Mapping[str, str], *, dry_run: bool) -> Drained:
    """Drain the node that this process runs on, unless it is drained."""
    node = environ.get(NODE_VARIABLE) or socket.gethostname().partition(".")[0]
    command = _command(node, why)
    try:
        already = _drained_for(_scontrol(["scontrol", "--oneliner", "show", "node", node]))
        if already is not None:
            reason = f", reason {already!r}" if already else ""
            return Drained(done=True, say=f"Slurm node {node} is drained already{reason}.")
        if not dry_run:
            _scontrol(command)
    except (OSError, subprocess.SubprocessError) as error:
        if not dry_run:
            return Drained(done=False, say=f"Slurm node {node} is not drained: {_reason(error)}.")
    if dry_run:
        return Drained(done=False, say=f"Without --dry-run: {shlex.join(command)}")
    return Drained(done=True, say=f"Slurm node {node} is drained: {why}.")


def _command(node: str, why: str) -> list[str]:
    text = " ".join(f"everstep: {why}".split()).replace('"', "'")[:REASON_CHARS]
    return ["scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={text}"]


def _scontrol(command: list[str]) -> str:
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=WITHIN_S,
        check=True,
    )
    return done.stdout


def _drained_for(shown: str) -> str | None:
    """The reason of a node that is drained or is to be; None if it is not."""
    state = _STATE.search(shown)
    if state is None or "DRAIN" not in state[1].upper():
        return None
    reason = _REASON.search(shown)
    return reason[1].strip() if reason else ""


def _reason(error: OSError | subprocess.SubprocessError) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        said = " ".join((error.stderr or error.stdout or "").split())
        return f"scontrol ended with {error.returncode}{f' ({said[:200]})' if said else ''}"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"scontrol did not answer within {WITHIN_S:.0f} s"
    if isinstance(error, FileNotFoundError):
        return "there is no scontrol on PATH"
    return str(error)
