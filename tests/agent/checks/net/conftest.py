"""A machine made of files, and one made of network namespaces."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.agent.checks.check import Here
from tests.agent.checks.net.netns import Namespace, Network


@pytest.fixture
def here() -> Iterator[Here]:
    """A machine whose root any user may enter."""
    root = Path(tempfile.mkdtemp(prefix="everstep-tree-"))
    root.chmod(0o755)
    yield Here(root=str(root))
    shutil.rmtree(root)


@pytest.fixture
def network() -> Iterator[Network]:
    with contextlib.ExitStack() as namespaces:
        host = namespaces.enter_context(Namespace("evh"))
        built = Network(host, namespaces.enter_context(Namespace("evs")))
        built.build()
        yield built
