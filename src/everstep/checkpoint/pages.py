"""What the kernel is asked about memory: fault it in now, give it in huge pages. Without the GIL.

slots.py faults in its slots with it, load.py asks for large tensors. A kernel that refuses costs
time, nothing else.
"""

from __future__ import annotations

import ctypes
import mmap

_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23


def fault_in(memory: memoryview) -> None:
    """Have all pages there and writable. Kernels before 5.14 refuse: then the first use does it."""
    anchor = ctypes.c_char.from_buffer(memory)
    _advise(ctypes.addressof(anchor), len(memory), _MADV_POPULATE_WRITE)


def prefer_huge(address: int, size: int) -> None:
    """For fresh memory of many MiB: one fault instead of 512 for each 2 MiB, where allowed."""
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    if begin < address + size:
        _advise(begin, address + size - begin, _MADV_HUGEPAGE)


def _advise(address: int, size: int, advice: int) -> None:
    libc = ctypes.CDLL(None)
    libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice)
