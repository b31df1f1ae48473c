"""The vocabulary of diagnosis: categories of failures, who is at fault, what to do first.

Every rule, every analyser and the answer use these words and no others. Categories are those of
ByteRobust's Table 1, with "code/data adjustment" split where the first action differs.
"""

from __future__ import annotations

from enum import StrEnum


class Category(StrEnum):
    """What kind of failure it is."""

    CUDA_ERROR = "cuda_error"
    CPU_OVERLOAD = "cpu_overload"
    """Also limits of processes, threads and open files."""
    CPU_OOM = "cpu_oom"
    INSUFFICIENT_DISK_SPACE = "insufficient_disk_space"
    INFINIBAND_ERROR = "infiniband_error"
    """Any training network, RoCE and TCP too."""
    FILESYSTEM_MOUNT = "filesystem_mount"
    HDFS_OR_REMOTE_STORAGE_ERROR = "hdfs_or_remote_storage_error"
    CONTAINER_ERROR = "container_error"
    """The runtime, /dev/shm, the image, devices lost by the container."""
    OS_KERNEL_PANIC = "os_kernel_panic"
    """Also lock-ups, and machines that are gone."""
    GPU_MEMORY_ERROR = "gpu_memory_error"
    EXTERNAL_SERVICE_ERROR = "external_service_error"
    GPU_UNAVAILABLE = "gpu_unavailable"
    """Lost, or its fabric, NVLink or firmware is."""
    DISK_FAULT = "disk_fault"
    JOB_HANG = "job_hang"
    MFU_DECLINE = "mfu_decline"
    NAN_VALUE = "nan_value"
    """Also spikes and divergence."""
    MANUAL_RESTART = "manual_restart"
    """A limit, a preemption, a person's signal."""
    USER_CODE_ERROR = "user_code_error"
    DATA_ERROR = "data_error"
    GPU_OOM = "gpu_oom"
    NONE = "none"
    """Nothing failed."""


class RootClass(StrEnum):
    """Where the cause lies."""

    INFRASTRUCTURE = "infrastructure"
    USER_CODE = "user_code"
    """Code, configuration, data, asked-for limits, the version of a library."""
    TRANSIENT = "transient"
    """Passes by itself or lies outside; no machine to blame."""
    AMBIGUOUS = "ambiguous"
    """Only a test, history or the spread over ranks can decide."""
    NONE = "none"


class FirstAction(StrEnum):
    """What to do first."""

    EVICT_MACHINE = "evict_machine"
    STOP_TIME_CHECK = "stop_time_check"
    RETRY = "retry"
    ROLL_BACK_CODE = "roll_back_code"
    ASK_USER = "ask_user"
    NONE = "none"


class Role(StrEnum):
    """What a line is in the chain from cause to noise."""

    ROOT = "root"
    """May be the cause."""
    CONFIRM = "confirm"
    """Not a cause by itself, but decides between causes: a time-out, a kernel's witness."""
    ECHO = "echo"
    """A consequence of something that happened elsewhere or before."""
    NOISE = "noise"
    """Advice, tear-down, words that frighten only."""


class Verdict(StrEnum):
    """The one vocabulary of checks, rules and tests: how a finding is to be taken."""

    INFO = "info"
    WARN = "warn"
    SUSPECT = "suspect"
    EVICT = "evict"
    JOB = "job"
    """Concerns the whole job or a service: no machine's fault."""
    USER = "user"
    ERROR = "error"
    """A check that could not run: never an answer about a job."""


ACTION_OF = {
    Verdict.EVICT: FirstAction.EVICT_MACHINE,
    Verdict.SUSPECT: FirstAction.STOP_TIME_CHECK,
    Verdict.JOB: FirstAction.RETRY,
    Verdict.WARN: FirstAction.RETRY,
    Verdict.USER: FirstAction.ROLL_BACK_CODE,
    Verdict.INFO: FirstAction.NONE,
}
"""The first action of a verdict, unless its rule names another one."""


class Grade(StrEnum):
    """How much a root counts against another one: tables/grades.toml orders them."""

    POLICY = "policy"
    """Somebody or something ended the job on purpose, and says so."""
    HOST = "host"
    """The machine, its kernel or its devices say themselves that they are broken."""
    HARDWARE = "hardware"
    """A library reports a fault that only hardware has."""
    CODE = "code"
    """The program says what is wrong with it, its configuration or its data."""
    RESOURCE = "resource"
    """Memory, disk or a limit ran out."""
    SERVICE = "service"
    """Storage or a service outside did not answer."""
    NETWORK = "network"
    """A link or a peer did not answer, and the line tells more than that."""
    OUTCOME = "outcome"
    """Something could not be done, for a reason that stands elsewhere if it is known."""
    DEVICE = "device"
    """A device error that code and hardware both can cause."""
    NUMERIC = "numeric"
    """Values that are not finite, or loss that went away."""
    EXIT = "exit"
    """A signal or an exit code alone."""
    WAITING = "waiting"
    """Ranks waited for each other in vain: something else came before."""
    SPEED = "speed"
    """It runs, but slower."""
