"""Makes the virtual environment that every make target uses: `python3 scripts/venv.py .venv`.

A torch that the user's own Python has is used and never replaced: someone with a GPU chose it with
care. Otherwise the pinned release is installed. Standard library only, and nothing newer than
Python 3.6, so that an old one can be told that it is too old.
"""

import os
import subprocess
import sys

OLDEST = (3, 11)
TORCH = "torch==2.13.0"
FIND = """
import importlib.util, sys
spec = importlib.util.find_spec(sys.argv[1])
print(spec.submodule_search_locations[0] if spec else "")
"""


def main(directory: str) -> None:
    if sys.version_info < OLDEST:
        found = "{}.{}".format(*sys.version_info[:2])
        fail(f"Python 3.11 or newer is needed, {sys.executable} is {found}: make PYTHON=python3.12")
    directory = os.path.abspath(directory)
    python = os.path.join(directory, "bin", "python")
    if not os.path.exists(python):
        make(directory)
    # Before the user's packages can be seen: else pip would leave out what they have of ours.
    say("installing everstep and its tools")
    pip(python, "-e", ".[dev]")
    theirs = directory_of("torch", sys.executable)
    if theirs and not directory_of("torch", python):
        say(f"using the torch that you have: {theirs}")
        see_also(python, os.path.dirname(theirs))
    for package in (TORCH, "numpy"):
        if not directory_of(package.partition("=")[0], python):
            say(f"installing {package} (torch takes a few minutes, once)")
            pip(python, package)
    say(f"ready: {directory}")


def make(directory: str) -> None:
    say(f"making {directory} with Python {sys.version.split()[0]}")
    argv = [sys.executable, "-m", "venv", directory]
    made = subprocess.run(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True, check=False
    )
    if made.returncode != 0:
        sys.stderr.write(made.stdout)
        fail(
            "python -m venv failed: on Debian and Ubuntu, install it with "
            "`sudo apt install python3-venv`, then run the same make command again"
        )


def directory_of(package: str, python: str) -> str:
    """Where this Python has the package, asked in a directory that holds none; empty: nowhere."""
    argv = [python, "-c", FIND, package]
    found = subprocess.run(
        argv, stdout=subprocess.PIPE, universal_newlines=True, cwd="/", check=False
    )
    return found.stdout.strip()


def see_also(python: str, packages: str) -> None:
    """Make the new environment see one more directory of packages, after its own.

    Unlike --system-site-packages this also reaches the environment that is active right now.
    """
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = subprocess.run(
        [python, "-c", code], stdout=subprocess.PIPE, universal_newlines=True, check=True
    )
    path = os.path.join(own.stdout.strip(), "everstep-torch.pth")
    with open(path, "w", encoding="utf-8") as file:
        file.write(packages + "\n")


def pip(python: str, *words: str) -> None:
    argv = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *words]
    if subprocess.run(argv, check=False).returncode != 0:
        fail(
            "pip could not install {}: see its message above; with a network, run the same make "
            "command again".format(" ".join(words))
        )


def say(text: str) -> None:
    print("venv: " + text, flush=True)


def fail(text: str) -> None:
    sys.exit("venv: " + text)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else ".venv")
