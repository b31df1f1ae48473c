"""The flag that rewrites transcripts."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-transcripts", action="store_true", default=False)
