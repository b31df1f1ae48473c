"""Fixtures of the tests of commands."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands.odd_host import Host


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Host]:
    """Not below pytest's own directory, which is closed to other users."""
    root = Path(tempfile.mkdtemp(prefix="everstep-check-"))
    yield Host(root, monkeypatch, capsys)
    shutil.rmtree(root)
