"""What the documents say can be done, can be done; what they point at is there."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.documents import ROOT, Block, blocks, pages

BLOCKS = blocks()
RUN = [block for block in BLOCKS if block.mark == "run"]
_LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")


def test_every_block_of_commands_has_a_test() -> None:
    assert not [block.place for block in BLOCKS if not _known(block)]


def _known(block: Block) -> bool:
    if block.mark == "run":
        return True
    if block.mark.startswith("make "):
        return _make_targets_exist(block)
    path, _, name = block.mark.partition("::")
    return bool(name) and (ROOT / path).is_file() and name in _tests_of(ROOT / path)


def _make_targets_exist(block: Block) -> bool:
    said = re.findall(r"\bmake ([a-z]+)", block.commands)
    text = (ROOT / "Makefile").read_text()
    return said == block.mark.split()[1:] and all(
        re.search(rf"^{target}:", text, re.MULTILINE) for target in said
    )


def _tests_of(path: Path) -> list[str]:
    tree = ast.parse(path.read_text())
    return [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


@pytest.mark.parametrize("block", RUN, ids=[block.place for block in RUN])
def test_commands_in_the_documents_work(block: Block, tmp_path: Path) -> None:
    environ = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "EVERSTEP_HOME": str(tmp_path / "jobs"),
    }
    script = f"set -euo pipefail\n{block.commands}"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_links_lead_to_files_that_are_there() -> None:
    broken = [
        f"{page.name}: {target}"
        for page in pages()
        for target in _LINK.findall(page.read_text())
        if not (page.parent / target).exists()
    ]
    assert not broken


def test_the_reading_order_names_modules_that_are_there() -> None:
    named = re.findall(r"`((?:src/everstep/)?[a-z_]+(?:/[a-z_]+)*\.py)`", _text("ARCHITECTURE.md"))
    assert named
    places = (ROOT, ROOT / "src" / "everstep")
    assert not [name for name in named if not any((place / name).exists() for place in places)]


def _text(name: str) -> str:
    return (ROOT / name).read_text()
