"""One rank's surroundings: shared memory, the agent's notice socket, and runs that end cleanly."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer.surroundings import Surroundings


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Surroundings]:
    """What an agent would have prepared for rank 0 of 1, gone after the test."""
    shm = Path(tempfile.mkdtemp(prefix="everstep-test-", dir="/dev/shm"))
    surroundings = Surroundings(shm, tmp_path)
    yield surroundings
    surroundings.close()
    shutil.rmtree(shm, ignore_errors=True)
