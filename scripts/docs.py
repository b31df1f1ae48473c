"""`make docs`: writes the files that are generated from code. Tests say when they are stale."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.house.frozen import (  # noqa: E402 -- after the path
    FLAGS_PAGE,
    FROZEN_FLAGS,
    flag_lines,
    reference_page,
)

if __name__ == "__main__":
    FROZEN_FLAGS.write_text("\n".join(flag_lines()) + "\n")
    FLAGS_PAGE.write_text(reference_page())
    print(f"wrote {FROZEN_FLAGS.relative_to(ROOT)} and {FLAGS_PAGE.relative_to(ROOT)}")
