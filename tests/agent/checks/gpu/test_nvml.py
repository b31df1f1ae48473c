"""The GPU sources against a library of NVML's ABI: nvidia-ml-py and ctypes are the real ones."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from everstep.agent.checks.check import Here, History, NotReadable, Stamped
from everstep.agent.checks.gpu import CHECKS
from everstep.agent.checks.gpu.activity import Activity
from everstep.agent.checks.gpu.dcgm import DcgmSample, DcgmSource
from everstep.agent.checks.gpu.library import driver_version
from everstep.agent.checks.gpu.nvml import NvmlSource
from everstep.agent.checks.gpu.reading import Reading, read_signals
from everstep.agent.checks.gpu.samples import Code, NvmlSample, Signal, XidSample
from everstep.diagnosis.words import Verdict
from everstep.health import Result
from tests.agent.checks.gpu.asking import Asking
from tests.agent.checks.gpu.fake import FakeNvml
from tests.agent.checks.gpu.histories import judged

ROOT = Path(__file__).parents[4]


@pytest.fixture
def fake(tmp_path: Path) -> FakeNvml:
    return FakeNvml(tmp_path / "nvml")


@pytest.fixture(scope="module")
def one_child(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeNvml, Asking]]:
    fake = FakeNvml(tmp_path_factory.mktemp("nvml"))
    with Asking("nvml", fake) as asking:
        yield fake, asking


@pytest.fixture
def asking(fake: FakeNvml) -> Iterator[Asking]:
    with Asking("nvml", fake) as asking:
        yield asking


@pytest.fixture
def healed(one_child: tuple[FakeNvml, Asking]) -> tuple[FakeNvml, Asking]:
    """A child that others have used, with everything healthy again."""
    one_child[0].heal()
    return one_child


def history(*samples: NvmlSample) -> History[NvmlSample]:
    stamped = [Stamped(at=1000.0 + 10 * at, sample=each) for at, each in enumerate(samples)]
    return History(first=stamped[0], past=tuple(stamped[:-1]), now=stamped[-1])


def failed(*samples: NvmlSample) -> dict[str, Result]:
    """Check -> its fail, over everything that judges NVML's samples."""
    training = Here(pids=(1,))
    by_nvml = [check.name for check in CHECKS if check.source == "nvml"]
    return {
        name: each
        for name in by_nvml
        for each in judged(name, history(*samples), here=training).values()
        if each.failed
    }


def item(gpu: int) -> str:
    return f"GPU {FakeNvml.pci(gpu)}"


def test_a_healthy_machine_of_eight_gpus(healed: tuple[FakeNvml, Asking]) -> None:
    _, asking = healed
    first, second = asking.sample(), asking.sample()
    assert (second.driver, second.error, len(second.gpus)) == ("570.86.15", 0, 8)
    assert second.on_bus == tuple(FakeNvml.pci(index) for index in range(8))
    gpu = second.gpus[2]
    assert (gpu.pci, gpu.serial) == (FakeNvml.pci(2), "1650000000002")
    assert not gpu.errors
    missing = set(Signal) - set(gpu.values) - {Signal.IDENTITY, Signal.PROCESSES}
    assert not missing
    assert (gpu.values[Signal.NVLINKS], gpu.values[Signal.SLOWDOWN_MARGIN_C]) == (0x3FFFF, -2)
    assert failed(first, second) == {}


def test_a_gpu_is_lost_in_a_running_process(healed: tuple[FakeNvml, Asking]) -> None:
    fake, asking = healed
    before = asking.sample()
    fake.fail("*", Code.GPU_IS_LOST, gpu=3)
    lost = failed(before, asking.sample())
    assert list(lost) == ["gpu.lost"]
    assert (lost["gpu.lost"].item, lost["gpu.lost"].verdict) == (item(3), Verdict.EVICT)
    fake.heal()
    assert failed(before, asking.sample()) == {}


def test_a_gpu_that_was_lost_before_anybody_looked(fake: FakeNvml, asking: Asking) -> None:
    fake.fail("*", Code.GPU_IS_LOST, gpu=3)
    lost = failed(asking.sample())
    assert (lost["gpu.lost"].item, lost["gpu.lost"].verdict) == ("GPU #3", Verdict.EVICT)


@pytest.mark.parametrize(
    ("change", "check", "verdict"),
    [
        (lambda fake: fake.fail("*", 16, gpu=1), "gpu.needs_reset", Verdict.EVICT),
        (lambda fake: fake.field(230, 2, gpu=1), "gpu.recovery", Verdict.EVICT),
        (lambda fake: fake.field(230, 3, gpu=1), "gpu.recovery", Verdict.SUSPECT),
        (lambda fake: fake.field(4, 1, gpu=1), "gpu.ecc_uncorrected", Verdict.SUSPECT),
        (lambda fake: fake.field(145, 1, gpu=1), "gpu.remap", Verdict.EVICT),
        (lambda fake: fake.field(59, 1, gpu=1), "gpu.nvlink_errors", Verdict.SUSPECT),
        (lambda fake: fake.value("nvmlDeviceGetNvLinkState/4", 0, gpu=1), "gpu.nvlink", "evict"),
        (
            lambda fake: fake.value("nvmlDeviceGetCurrPcieLinkWidth", 8, 1),
            "gpu.pcie_link",
            "suspect",
        ),
        (lambda fake: fake.value("nvmlDeviceGetSramEccErrorStatus", 1, 1), "gpu.sram", "evict"),
        (lambda fake: fake.value("nvmlDeviceGetTemperature", 91, 1), "gpu.temperature", "evict"),
        (lambda fake: fake.value("nvmlDeviceGetEnforcedPowerLimit", 3e5, 1), "gpu.power", "warn"),
        (lambda fake: fake.fail("nvmlDeviceGetPowerUsage", 999, 1), "gpu.power", "warn"),
        (lambda fake: fake.value("nvmlDeviceGetEccMode", 0, gpu=1), "gpu.settings", "warn"),
        (lambda fake: fake.value("nvmlDeviceGetCount", 7), "gpu.inventory", "suspect"),
        (lambda fake: fake.value("nvmlDeviceGetUUID", "GPU-other", 1), "gpu.inventory", "evict"),
        (lambda fake: fake.fail("nvmlDeviceGetCount", 18), "gpu.driver", "suspect"),
    ],
)
def test_every_fault_is_found_through_the_library(
    healed: tuple[FakeNvml, Asking], change: Callable[[FakeNvml], None], check: str, verdict: str
) -> None:
    fake, asking = healed
    before = asking.sample()
    change(fake)
    found = failed(before, asking.sample(), asking.sample())
    assert list(found) == [check]
    assert found[check].verdict == verdict
    assert found[check].item in {item(1), ""}


def test_a_gpu_that_loses_its_fabric(healed: tuple[FakeNvml, Asking]) -> None:
    fake, asking = healed
    before = asking.sample()
    fake.value("nvmlDeviceGetGpuFabricInfo", 1, 1)
    found = failed(before, *(asking.sample() for _ in range(7)))
    assert {name: each.verdict for name, each in found.items()} == {"gpu.fabric": Verdict.EVICT}


def test_only_the_gpus_of_the_job_are_looked_at(fake: FakeNvml) -> None:
    """Another job on this machine may lose its own."""
    ours = tuple(FakeNvml.pci(index) for index in (0, 1))
    with Asking("nvml", fake, gpus=ours) as asking, Asking("nvml-events", fake, gpus=ours) as xids:
        before = asking.sample()
        assert tuple(gpu.pci for gpu in before.gpus) == before.on_bus == ours
        assert set(xids.sample().answers) == set(ours)
        fake.fail("*", Code.GPU_IS_LOST, gpu=3)
        assert failed(before, asking.sample()) == {}
        assert set(xids.sample().answers.values()) == {0}


def test_hot_and_held_down_gpus(healed: tuple[FakeNvml, Asking]) -> None:
    fake, asking = healed
    fake.value("nvmlDeviceGetTemperature", 84, gpu=5)
    fake.value("nvmlDeviceGetCurrentClocksEventReasons", 0x48, gpu=5)
    fake.value("nvmlDeviceGetClockInfo", 990, gpu=5)
    found = failed(*(asking.sample() for _ in range(5)))
    assert set(found) == {"gpu.temperature", "gpu.throttle", "gpu.clocks"}
    assert {each.item for each in found.values()} == {item(5)}


def test_processes_of_others(healed: tuple[FakeNvml, Asking]) -> None:
    fake, asking = healed
    fake.value("nvmlDeviceGetComputeRunningProcesses", "4711,815", gpu=2)
    assert asking.sample().gpus[2].pids == (815, 4711)


def test_a_driver_that_never_answers_leaves_the_child_hanging(
    fake: FakeNvml, asking: Asking
) -> None:
    asking.sample()
    fake.hang("nvmlDeviceGetTemperature", gpu=6)
    asking.ask()
    with pytest.raises(TimeoutError):
        asking.answer(within_s=0.3)
    fake.heal()
    with pytest.raises(TimeoutError):  # it is stuck for ever, as in the driver
        asking.answer(within_s=0.1)


def test_a_slow_start_is_no_hang(fake: FakeNvml, asking: Asking) -> None:
    """The first call may take long: the child comes back meanwhile, and says so."""
    fake.hang("nvmlInit")
    with pytest.raises(NotReadable, match=r"starting for \d s"):
        asking.sample()


@pytest.mark.parametrize(
    ("code", "verdict"),
    [(9, Verdict.SUSPECT), (18, Verdict.SUSPECT), (4, Verdict.ERROR), (999, Verdict.ERROR)],
)
def test_a_driver_that_does_not_start(
    fake: FakeNvml, asking: Asking, code: int, verdict: Verdict
) -> None:
    fake.fail("nvmlInit", code)
    sample = asking.sample()
    assert (sample.error, sample.gpus) == (code, ())
    assert judged("gpu.driver", history(sample))[""].verdict is verdict
    fake.heal()
    assert failed(asking.sample()) == {}


def test_what_fails_in_between_is_opened_anew(healed: tuple[FakeNvml, Asking]) -> None:
    fake, asking = healed
    asking.sample()
    fake.fail("nvmlDeviceGetTemperature", Code.UNINITIALIZED, gpu=0)
    sample = asking.sample()
    assert sample.error == Code.UNINITIALIZED
    assert failed(sample) == {}
    fake.heal()
    assert len(asking.sample().gpus) == 8


def test_an_older_library_lacks_calls_and_nothing_more(tmp_path: Path) -> None:
    fake = FakeNvml(tmp_path / "nvml", old=True)
    with Asking("nvml", fake) as asking:
        first, second = asking.sample(), asking.sample()
    gpu = second.gpus[0]
    assert gpu.errors[Signal.MARGIN_C] == Code.FUNCTION_NOT_FOUND
    assert gpu.errors[Signal.RECOVERY_ACTION] == Code.NOT_SUPPORTED
    assert gpu.values[Signal.CLOCK_REASONS] == 4  # by the name it had
    assert gpu.values[Signal.TEMPERATURE_C] == 55
    assert failed(first, second) == {}


class Missing(Exception):
    """As NVMLError for a call that the library lacks."""

    value = Code.FUNCTION_NOT_FOUND


def test_an_older_package_lacks_calls_and_nothing_more() -> None:
    def no_fields(*_: object) -> None:
        raise Missing

    package = SimpleNamespace(NVMLError=Missing, nvmlDeviceGetFieldValues=no_fields)
    reading = Reading(package, 0)
    read_signals(reading, None)
    Activity(package).read(reading, None)
    assert reading.values == {}
    assert set(reading.errors.values()) == {Code.FUNCTION_NOT_FOUND}


def test_garbage_is_missing(healed: tuple[FakeNvml, Asking]) -> None:
    fake, asking = healed
    before = asking.sample()
    for function in ("nvmlDeviceGetTemperature", "nvmlDeviceGetCurrPcieLinkWidth"):
        fake.value(function, 0xFFFFFFFF)
    fake.value("nvmlDeviceGetUUID", "GPU-\udcff\udcfe".encode(errors="replace").decode(), gpu=0)
    fake.value("nvmlDeviceGetPciInfo", "rubbish", gpu=1)
    fake.value("nvmlGpmMetricsGet/5", "nan")
    sample = asking.sample()
    assert Signal.TEMPERATURE_C not in sample.gpus[0].values
    assert Signal.TENSOR_PERCENT not in sample.gpus[0].values
    assert sample.gpus[1].pci == FakeNvml.pci(1)  # as it was known before
    assert failed(before, sample) == {}


def test_a_gpu_that_leaves_the_bus(fake: FakeNvml, asking: Asking) -> None:
    before = asking.sample()
    device = fake.machine() / "sys/bus/pci/devices" / FakeNvml.pci(4)
    (device / "config").write_bytes(b"\xff" * 64)
    found = failed(before, asking.sample(), asking.sample())
    assert (found["gpu.lost"].item, found["gpu.lost"].verdict) == (item(4), Verdict.EVICT)


# --- whether there is NVML ---


def absent(root: Path, env: dict[str, str]) -> str:
    code = (
        "import sys; from everstep.agent.checks.check import Here;"
        "from everstep.agent.checks.gpu.library import why_absent;"
        "print(why_absent(Here(root=sys.argv[1])))"
    )
    argv = [sys.executable, "-c", code, str(root)]
    env = {**os.environ, **env}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


def test_a_machine_without_a_driver_lacks_the_source(tmp_path: Path, fake: FakeNvml) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    nowhere = {"LD_LIBRARY_PATH": str(empty)}
    assert "no NVIDIA driver" in absent(empty, nowhere)
    assert absent(fake.machine(), nowhere) == ""
    assert absent(empty, fake.env) == ""


def test_a_driver_without_its_library_cannot_be_asked(tmp_path: Path, fake: FakeNvml) -> None:
    (fake.directory / "libnvidia-ml.so.1").write_text("no library")
    for name in ("nvml", "nvml-events"):
        with Asking(name, fake) as asking, pytest.raises(NotReadable, match=r"libnvidia-ml\.so"):
            asking.sample()


VERSIONS = {
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23 2025\nGCC version: 12": (
        "570.86.15"
    ),
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54  Release Build": "550.54",
    "rubbish": "",
}
"""The kernel's module says its version in one of these forms."""


@pytest.mark.parametrize(("text", "version"), VERSIONS.items())
def test_a_hung_driver_is_named_by_its_version(tmp_path: Path, text: str, version: str) -> None:
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(text)
    here = Here(root=str(tmp_path))
    assert driver_version(here) == version
    source = NvmlSource()
    source.absent(here)
    hung = source.unanswered(10.0, 2)
    assert hung is not None
    assert hung.cause == (f"driver {version}" if version else "")


# --- DCGM ---


def test_dcgm_is_seen_in_the_process_table_and_in_systemds_links(tmp_path: Path) -> None:
    here = Here(root=str(tmp_path))
    source = DcgmSource()
    assert source.absent(here)
    for path in ("usr/bin", "proc/17", "proc/self", "run/systemd/system"):
        (tmp_path / path).mkdir(parents=True)
    (tmp_path / "usr/bin/nv-hostengine").touch()
    assert source.absent(here) == ""
    assert source.sample(here) == DcgmSample()
    wants = tmp_path / "etc/systemd/system/multi-user.target.wants"
    wants.mkdir(parents=True)
    (wants / "nvidia-dcgm.service").symlink_to("/lib/systemd/system/nvidia-dcgm.service")
    assert source.sample(here) == DcgmSample(enabled=True)
    (tmp_path / "proc/17/comm").write_text("nv-hostengine\n")
    assert source.sample(here) == DcgmSample(enabled=True, running=True)


# --- XIDs ---


def with_xid(asking: Asking) -> Any:
    """The next sample that tells of one."""
    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline:
        sample = asking.sample()
        if sample.events:
            return sample
    raise AssertionError("no XID came")


def test_an_xid_comes_through_nvmls_events(fake: FakeNvml) -> None:
    fake.xid(31, gpu=0)  # before anybody listened: NVML does not tell of it
    with Asking("nvml-events", fake) as asking:
        assert asking.sample().events == ()
        asking.ask()  # waits in the library
        fake.field(230, 1, gpu=3)
        fake.xid(79, gpu=3)
        began = time.clock_gettime(time.CLOCK_BOOTTIME)
        sample: XidSample = asking.answer()
        if not sample.events:
            sample = with_xid(asking)
        (event,) = sample.events
        assert (event.pci, event.code, event.action) == (FakeNvml.pci(3), 79, 1)
        assert event.at >= began - 1.0
        now = Stamped(at=event.at + 0.1, sample=sample)
        result = judged("gpu.xid", History(first=now, now=now))[item(3)]
        assert result.verdict is Verdict.EVICT
        fake.xid(45, gpu=3)
        while len(sample.events) < 2:  # what was is told again, for repeats and echoes
            sample = with_xid(asking)
        now = Stamped(at=sample.events[1].at, sample=sample)
        assert "echoed by XID 45" in judged("gpu.xid", History(first=now, now=now))[item(3)].why


def test_gpus_that_tell_of_no_events_cannot_be_watched(fake: FakeNvml) -> None:
    fake.fail("nvmlDeviceRegisterEvents", Code.NOT_SUPPORTED)
    with Asking("nvml-events", fake) as asking, pytest.raises(NotReadable, match="3"):
        asking.sample()


def test_one_gpu_without_events_leaves_the_others_watched(fake: FakeNvml) -> None:
    fake.fail("nvmlDeviceRegisterEvents", Code.NOT_SUPPORTED, gpu=0)
    with Asking("nvml-events", fake) as asking:
        assert len(asking.sample().answers) == 8
        fake.xid(48, gpu=1)
        assert with_xid(asking).events[0].code == 48


def test_waiting_survives_a_lost_gpu_and_a_driver_that_was_replaced(fake: FakeNvml) -> None:
    fake.fail("nvmlEventSetWait", Code.GPU_IS_LOST)
    with Asking("nvml-events", fake) as asking:
        asking.sample()
        assert asking.sample().events == ()
        fake.fail("nvmlEventSetWait", Code.UNINITIALIZED)
        with pytest.raises(NotReadable):
            asking.sample()
        fake.heal()
        assert asking.sample().answers
        fake.xid(94, gpu=2)
        assert with_xid(asking).events[0].pci == FakeNvml.pci(2)


def test_a_short_question_finds_a_lost_gpu_and_hangs_with_the_driver(fake: FakeNvml) -> None:
    with Asking("nvml-events", fake) as asking:
        asking.sample()
        fake.say("nvmlEventSetWait ret=10")  # no need to wait for it
        fake.fail("*", Code.GPU_IS_LOST, gpu=3)
        now = Stamped(at=1.0, sample=asking.sample())
        results = judged("gpu.answers", History(first=now, now=now))
        assert results[item(3)].verdict is Verdict.EVICT
        fake.hang("*", gpu=5)
        asking.ask()
        with pytest.raises(TimeoutError):
            asking.answer(within_s=0.3)
