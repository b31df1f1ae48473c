"""`make docs`: writes the files that are generated from code. Tests say when they are stale."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.house.frozen import (  # noqa: E402 -- after the path
    CHECKS_PAGE,
    FLAGS_PAGE,
    FROZEN_FLAGS,
    LADDER_PAGE,
    checks_page,
    flag_lines,
    ladder_page,
    reference_page,
)

if __name__ == "__main__":
    FROZEN_FLAGS.write_text("\n".join(flag_lines()) + "\n")
    FLAGS_PAGE.write_text(reference_page())
    CHECKS_PAGE.write_text(checks_page())
    LADDER_PAGE.write_text(ladder_page())
    for written in (FROZEN_FLAGS, FLAGS_PAGE, CHECKS_PAGE, LADDER_PAGE):
        print(f"wrote {written.relative_to(ROOT)}")
