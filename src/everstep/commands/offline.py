"""What a job's journal says when no controller answers: the same views, by replay.

Reads files only and changes none, so it is safe beside a controller that writes. Every command
that shows something asks the controller first and comes here when that is away.
"""

from __future__ import annotations

from everstep import __version__
from everstep.controller import look_views, version_views, views
from everstep.controller.look_views import StacksView
from everstep.controller.version_views import VersionsView
from everstep.controller.views import IncidentsView, StatusView
from everstep.journal import Index, JournalError, Replayed, StoryLine
from everstep.journal.replay import replay_directory
from everstep.paths import JobPaths


def status(job: JobPaths) -> StatusView:
    """Where the job was at its last record. JournalError if there is none."""
    replayed = _replayed(job)
    return views.status(replayed.core.state, replayed.last_time)


def incidents(job: JobPaths) -> IncidentsView:
    replayed = _replayed(job)
    return views.incidents(replayed.core.state, replayed.last_time)


def versions(job: JobPaths) -> VersionsView:
    replayed = _replayed(job)
    return version_views.versions(replayed.core.state, replayed.last_time)


def stacks(job: JobPaths) -> StacksView:
    replayed = _replayed(job)
    return look_views.stacks(replayed.core.state, replayed.last_time)


def why(job: JobPaths, subject: str) -> list[StoryLine]:
    """The causal story of an incident, a decision, an event or a machine. UnknownId if none is."""
    try:
        index = Index(job.journal)
        try:
            return index.story(subject)
        finally:
            index.close()
    except OSError as error:
        raise _unreadable(job, error) from error


def _replayed(job: JobPaths) -> Replayed:
    try:
        replayed = replay_directory(job.journal, version=__version__)
    except OSError as error:
        raise _unreadable(job, error) from error
    if replayed.core.state.spec is None:
        raise JournalError(
            f"The journal of job {job.root.name} is empty: its controller never came up; see "
            f"{job.controller_log}."
        )
    return replayed


def _unreadable(job: JobPaths, error: OSError) -> JournalError:
    return JournalError(f"The journal in {job.journal} cannot be read: {error.strerror}.")
