"""How `make` sets itself up: which torch it uses, and what it says to a Python that is too old."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts import venv


def test_a_python_that_is_too_old_is_told_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(venv, "OLDEST", (4, 0))
    with pytest.raises(SystemExit, match=r"Python 3.11 or newer is needed, .* make PYTHON="):
        venv.main(str(tmp_path / ".venv"))
    assert not (tmp_path / ".venv").exists()


def test_a_torch_that_the_user_has_is_seen_and_everything_else_of_the_venv_comes_first(
    tmp_path: Path,
) -> None:
    theirs = tmp_path / "theirs"
    (theirs / "torch").mkdir(parents=True)
    (theirs / "torch" / "__init__.py").touch()
    made = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(made)], check=True)
    python = str(made / "bin" / "python")
    assert venv.directory_of("torch", python) == ""
    venv.see_also(python, str(theirs))
    assert venv.directory_of("torch", python) == str(theirs / "torch")
    path = subprocess.run(
        [python, "-c", "import sys; print(*sys.path, sep='\\n')"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert path.stdout.splitlines()[-1] == str(theirs)
