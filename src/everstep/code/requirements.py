"""Which files of a change say what has to be installed. Pure; asked when an update comes.

A code version brings no packages: whoever changes what must be installed has to be told that the
machines do not get it by an update.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_NAMES = re.compile(
    r"(.*/)?requirements/[^/]*\.(txt|in)"
    r"|(.*/)?(requirements[^/]*\.(txt|in)|constraints[^/]*\.txt|pyproject\.toml|setup\.(py|cfg)"
    r"|environment[^/]*\.ya?ml|uv\.lock|poetry\.lock|pdm\.lock|Pipfile[^/]*|Dockerfile[^/]*)"
)


def requirement_files(paths: Iterable[str]) -> tuple[str, ...]:
    """Those of these files that say what has to be installed, in the same order."""
    return tuple(path for path in paths if _NAMES.fullmatch(path))
