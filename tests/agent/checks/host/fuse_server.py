"""A file system over /dev/fuse with one empty directory: `python fuse_server.py MOUNTPOINT`.

Stopped by a signal, it is storage that hangs; killed, storage whose server is gone. Of the
protocol of <linux/fuse.h> it has what statvfs() and stat() of the directory need.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

_LOOKUP, _FORGET, _GETATTR, _STATFS, _INIT, _INTERRUPT, _BATCH_FORGET = 1, 2, 3, 17, 26, 36, 42
_IN = struct.Struct("<IIQQIIIHH")
_OUT = struct.Struct("<IiQ")
_DIRECTORY = 0o40755


def mount(directory: str) -> int:
    """The descriptor that requests come from."""
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode={_DIRECTORY & 0o170000:o},user_id=0,group_id=0,allow_other"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"everstep-test", directory.encode(), b"fuse.everstep", 0, options.encode()):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), directory)
    return device


def answer(opcode: int) -> tuple[int, bytes]:
    """Error and body."""
    if opcode == _INIT:
        return 0, struct.pack("<IIIIHHIIHH32x", 7, 31, 0, 0, 16, 12, 65536, 1, 0, 0)
    if opcode == _GETATTR:
        attributes = struct.pack(
            "<6Q10I", 1, 0, 0, 0, 0, 0, 0, 0, 0, _DIRECTORY, 2, 0, 0, 0, 512, 0
        )
        return 0, struct.pack("<QII", 0, 0, 0) + attributes
    if opcode == _STATFS:
        return 0, struct.pack("<5Q4I24x", 1000, 900, 900, 100, 90, 4096, 255, 4096, 0)
    return (errno.ENOENT if opcode == _LOOKUP else errno.ENOSYS), b""


def serve(device: int) -> None:
    while True:
        try:
            request = os.read(device, 1 << 20)
        except OSError as error:
            if error.errno == errno.ENODEV:  # unmounted
                return
            raise
        _, opcode, unique, *_ = _IN.unpack_from(request)
        if opcode not in {_FORGET, _BATCH_FORGET, _INTERRUPT}:
            error_number, body = answer(opcode)
            os.write(device, _OUT.pack(_OUT.size + len(body), -error_number, unique) + body)


if __name__ == "__main__":
    serve(mount(sys.argv[1]))
