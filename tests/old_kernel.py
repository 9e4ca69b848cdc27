"""Runs a program as on Linux 4.18: every system call that came later is refused.

    python old_kernel.py PROGRAM [ARGUMENT…]

It installs a seccomp filter, which the program and all its children keep. x86-64 only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys


# Numbers from here on were given after Linux 4.18 (the first is pidfd_send_signal, of 5.1).
FIRST = 424
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
# Classic BPF (linux/filter.h): load a word, jump if greater or equal, return.
LOAD, JUMP_GE, RETURN = 0x20, 0x35, 0x06
ALLOW, ERRNO = 0x7FFF0000, 0x00050000


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def refuse_new_calls() -> None:
    code = b"".join(
        struct.pack("=HBBI", *line)
        for line in (
            (LOAD, 0, 0, 0),
            (JUMP_GE, 0, 1, FIRST),
            (RETURN, 0, 0, ERRNO | errno.ENOSYS),
            (RETURN, 0, 0, ALLOW),
        )
    )
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    program = _Program(len(code) // 8, code)
    for arguments in (
        (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0),
    ):
        if prctl(*arguments):
            code_of = ctypes.get_errno()
            raise OSError(code_of, os.strerror(code_of))


if __name__ == "__main__":
    refuse_new_calls()
    os.execvp(sys.argv[1], sys.argv[1:])
