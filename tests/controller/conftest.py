"""Fixtures of the controller's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.paths import JobPaths
from tests.controller.support import Controller, FakeAgent, controller, make_job


@pytest.fixture
def paths(tmp_path: Path) -> JobPaths:
    """Of a fresh job."""
    return make_job(tmp_path)


@pytest.fixture
def running(paths: JobPaths) -> Iterator[Controller]:
    """The job's controller."""
    with controller(paths) as started:
        yield started


@pytest.fixture
def agent() -> Iterator[FakeAgent]:
    """The agent of the job's only machine, not connected yet."""
    made = FakeAgent()
    yield made
    made.disconnect()
