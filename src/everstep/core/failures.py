"""What a failure is, apart from what is done about it: its class, and what only echoes another.

Asked by ladder.py and guards.py, which must mean the same by "the same failure".
"""

from __future__ import annotations

from everstep.core.evidence import Judged
from everstep.core.state import Failure, FailureKind, State

ECHO_KINDS = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError", "DistError"})
"""torch.distributed's exceptions: what a rank raises because another one is gone."""
ECHO_TEXTS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "gloo",
    "NCCL",
)
"""Texts of the plain RuntimeErrors that gloo and NCCL raise for the same reason."""


def is_echo(failure: Failure) -> bool:
    """Whether the rank only reports that another rank is gone."""
    error = failure.error
    if error is None:
        return False
    return error.kind in ECHO_KINDS or any(text in error.message for text in ECHO_TEXTS)


def failure_class(state: State, found: Judged | None) -> str:
    """What makes two failures the same: the rule of the evidence, else how ranks ended."""
    if found is not None and found.rule:
        return found.rule.replace("_", " ")
    first = first_own(state)
    if first is None:
        return "machine accused"
    if first.kind is FailureKind.HANG and state.judged is not None:
        return str(state.judged.purpose)
    if first.kind is not FailureKind.EXITED:
        return str(first.kind)
    if first.error is not None:
        return first.error.kind
    return str(first.exit) if first.exit is not None else "rank gone"


def first_own(state: State) -> Failure | None:
    """The first failure that is no echo of another one, of this recovery."""
    incident = state.incident
    if incident is None:
        return None
    since = incident.starts[-1].at if incident.starts else float("-inf")
    known = {failure.event: failure for failure in (*incident.failures, *state.failures)}
    mine = [failure for failure in known.values() if failure.at >= since]
    own = [failure for failure in mine if not is_echo(failure)]
    return next(iter([*own, *mine]), None)
