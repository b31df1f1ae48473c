"""A fake NVIDIA driver for tests and benchmarks: libnvidia-ml.so.1 built with cc, and its script.

    fake = FakeNvml(directory)
    process = Popen(argv, env={**os.environ, **fake.env})  # its nvidia-ml-py finds this library
    fake.fail("*", 15, gpu=3)  # from now on, in the running process too, GPU 3 is lost

fake_nvml.c says what can be scripted. Where NVML is reached by hand, FakeNvml.machine gives a root
directory with the GPUs on its PCI bus.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path

LIBRARY = "libnvidia-ml.so.1"
_SOURCE = Path(__file__).with_name("fake_nvml.c")


@cache
def _built(old: bool) -> bytes:
    """The library, built once in each process that wants it."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / LIBRARY
        flags = ["-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", *(["-DOLD"] * old)]
        argv = ["cc", *flags, "-o", str(out), str(_SOURCE), "-lpthread", "-ldl"]
        subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60)
        return out.read_bytes()


class FakeNvml:
    """One fake driver in its own directory."""

    def __init__(self, directory: Path, gpus: int = 8, *, old: bool = False) -> None:
        """`old`: a library without the calls of newer drivers."""
        self.directory = directory
        self.gpus = gpus
        self._lines: list[str] = []
        self._events = 0
        directory.mkdir(parents=True, exist_ok=True)
        (directory / LIBRARY).write_bytes(_built(old))
        self._write()

    @property
    def env(self) -> dict[str, str]:
        """What a process needs to find this library instead of the real one."""
        return {"LD_LIBRARY_PATH": str(self.directory)}

    def say(self, *lines: str) -> None:
        """Statements as they stand in the script."""
        self._lines += lines
        self._write()

    def value(
        self, function: str, value: float | str, gpu: int | None = None, in_s: float = 0.0
    ) -> None:
        """`function` answers this from now on, or in so many seconds."""
        self.say(f"{_call(function, gpu, in_s)} value={value}")

    def field(self, number: int, value: float, gpu: int | None = None) -> None:
        """One of NVML's fields, for example 230."""
        self.value(f"nvmlDeviceGetFieldValues/{number}", value, gpu)

    def fail(self, function: str, code: int, gpu: int | None = None, in_s: float = 0.0) -> None:
        """It returns this code; 0: it works again. `*` is every call about a GPU."""
        self.say(f"{_call(function, gpu, in_s)} ret={code}")

    def hang(self, function: str, gpu: int | None = None, in_s: float = 0.0) -> None:
        """It never returns."""
        self.say(f"{_call(function, gpu, in_s)} hang")

    def xid(self, code: int, gpu: int) -> None:
        """The driver reports an XID, now."""
        self._events += 1
        self.say(f"event id={self._events} gpu={gpu} xid={code}")

    def heal(self) -> None:
        """Everything as at first."""
        self._lines = [line for line in self._lines if line.startswith("event ")]
        self._write()

    def machine(self) -> Path:
        """A root directory in which the GPUs stand on the PCI bus."""
        root = self.directory / "root"
        (root / "dev").mkdir(parents=True, exist_ok=True)
        (root / "dev/nvidiactl").touch()
        for gpu in range(self.gpus):
            device = root / "sys/bus/pci/devices" / self.pci(gpu)
            device.mkdir(parents=True, exist_ok=True)
            (device / "vendor").write_text("0x10de\n")
            (device / "class").write_text("0x030200\n")
            (device / "config").write_bytes(b"\xde\x10" + bytes(62))
        return root

    @staticmethod
    def pci(gpu: int) -> str:
        """Where that GPU is, as everstep writes it."""
        return f"0000:{0x1B + 0x10 * gpu:02x}:00.0"

    def _write(self) -> None:
        script = self.directory / "nvml.script"
        fresh = script.with_suffix(".new")
        fresh.write_text("".join(f"{line}\n" for line in (f"gpus {self.gpus}", *self._lines)))
        fresh.replace(script)


def _call(function: str, gpu: int | None, in_s: float) -> str:
    which = "" if gpu is None else f" gpu={gpu}"
    when = "" if not in_s else f" at={time.clock_gettime(time.CLOCK_BOOTTIME) + in_s:.6f}"
    return f"{function}{which}{when}"
