"""A seccomp filter for sandbox payloads as classic BPF, assembled here: no native library is
needed.

On x86-64, of the system calls that Linux had up to 6.17, all are allowed but what changes mounts,
namespaces, clocks, modules or keys, what reads other processes, and socket families that are not
confined by a network namespace (AF_VSOCK, AF_ALG, AF_PACKET). ``clone3`` and io_uring answer
ENOSYS, so that the C library falls back to what can be filtered; so does every call that is newer.
Foreign architectures are killed.
"""

from __future__ import annotations

import platform
import struct

_LOAD, _EQ, _GE, _SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_ERRNO = 0x00050000
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97
_ARCH_X86_64 = 0xC000003E
# Offsets in struct seccomp_data: number, architecture, low words of the first two arguments.
_NR, _ARCH, _ARG0, _ARG1 = 0, 4, 16, 24

# Linux x86-64 system call numbers (arch/x86/entry/syscalls/syscall_64.tbl).
_DENIED = {
    "ptrace": 101, "syslog": 103, "pivot_root": 155, "adjtimex": 159, "chroot": 161, "acct": 163,
    "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169,
    "sethostname": 170, "setdomainname": 171, "iopl": 172, "ioperm": 173, "init_module": 175,
    "delete_module": 176, "quotactl": 179, "clock_settime": 227, "mbind": 237, "set_mempolicy": 238,
    "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250, "migrate_pages": 256,
    "unshare": 272, "move_pages": 279, "perf_event_open": 298, "fanotify_init": 300,
    "name_to_handle_at": 303, "open_by_handle_at": 304, "clock_adjtime": 305, "setns": 308,
    "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "finit_module": 313,
    "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_getfd": 438,
    "process_madvise": 440, "mount_setattr": 442, "quotactl_fd": 443, "memfd_secret": 447,
    "open_tree_attr": 467,
}  # fmt: skip
_MISSING = {
    "statmount": 457,
    "listmount": 458,
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "clone3": 435,
}
_CLONE, _SOCKET, _SOCKETPAIR, _IOCTL = 56, 41, 53, 16
# CLONE_NEWTIME, NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET.
_NAMESPACE_FLAGS = 0x7E020080
# AF_UNIX, AF_INET, AF_INET6, AF_NETLINK.
_FAMILIES = (1, 2, 10, 16)
# TIOCSTI and TIOCLINUX push characters into a terminal's input.
_TERMINAL_TRICKS = (0x5412, 0x541C)
_X32 = 0x40000000
# file_setattr; the calls of processes that isolate others (landlock, lsm) are among the known.
_LAST = 469


def supported() -> bool:
    """Whether the filter exists for this machine's architecture."""
    return platform.machine() == "x86_64"


def program() -> bytes:
    """The filter as an array of ``struct sock_filter``."""
    code: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, _ARCH),
        (_EQ, 1, 0, _ARCH_X86_64),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NR),
        (_GE, 0, 1, _X32),
        (_RETURN, 0, 0, _ERRNO | _EPERM),
        (_GE, 0, 1, _LAST + 1),
        (_RETURN, 0, 0, _ERRNO | _ENOSYS),
    ]
    for number in _DENIED.values():
        code += [(_EQ, 0, 1, number), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    for number in _MISSING.values():
        code += [(_EQ, 0, 1, number), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
    code += [
        (_EQ, 0, 4, _CLONE),
        (_LOAD, 0, 0, _ARG0),
        (_SET, 0, 1, _NAMESPACE_FLAGS),
        (_RETURN, 0, 0, _ERRNO | _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    for number in (_SOCKET, _SOCKETPAIR):
        code += _families(number)
    code += [
        (_EQ, 0, 5, _IOCTL),
        (_LOAD, 0, 0, _ARG1),
        (_EQ, 1, 0, _TERMINAL_TRICKS[0]),
        (_EQ, 0, 1, _TERMINAL_TRICKS[1]),
        (_RETURN, 0, 0, _ERRNO | _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def _families(number: int) -> list[tuple[int, int, int, int]]:
    """Allow ``number`` (socket, socketpair) for the listed families; the rest is unknown."""
    count = len(_FAMILIES)
    checks = [(_EQ, count - i, 0, family) for i, family in enumerate(_FAMILIES)]
    return [
        (_EQ, 0, count + 3, number),
        (_LOAD, 0, 0, _ARG0),
        *checks,
        (_RETURN, 0, 0, _ERRNO | _EAFNOSUPPORT),
        (_RETURN, 0, 0, _ALLOW),
    ]
