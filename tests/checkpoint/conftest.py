"""Shared memory for one test, and shards made of plain bytes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def shm() -> Iterator[Path]:
    """A machine's directory of shared memory, gone after the test."""
    directory = Path(tempfile.mkdtemp(prefix="everstep-test-", dir="/dev/shm"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)
