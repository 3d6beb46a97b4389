"""System calls that code in a sandbox may not make, as a filter program for the kernel.

Namespaces and limits of processes leave some doors: memory that no limit counts (memfd, System V
segments, mounts in a user namespace of one's own), sockets that no network namespace holds (vsock),
and large parts of the kernel that tests of a function have no use for.
"""

from __future__ import annotations

import errno
import platform
import struct

# Numbers of x86_64 and aarch64; those above 400 are the same everywhere.
_CALLS = {
    'socket': (41, 198),
    'unshare': (272, 97),
    'setns': (308, 268),
    'mount': (165, 40),
    'umount2': (166, 39),
    'pivot_root': (155, 41),
    'chroot': (161, 51),
    'ptrace': (101, 117),
    'process_vm_readv': (310, 270),
    'process_vm_writev': (311, 271),
    'bpf': (321, 280),
    'perf_event_open': (298, 241),
    'add_key': (248, 217),
    'request_key': (249, 218),
    'keyctl': (250, 219),
    'userfaultfd': (323, 282),
    'memfd_create': (319, 279),
    'shmget': (29, 194),
    'msgget': (68, 186),
    'semget': (64, 190),
    'mq_open': (240, 180),
    'init_module': (175, 105),
    'finit_module': (313, 273),
    'kexec_load': (246, 104),
    'name_to_handle_at': (303, 264),
    'open_by_handle_at': (304, 265),
    'personality': (135, 92),
}
_EVERYWHERE = {
    'io_uring_setup': 425,
    'io_uring_enter': 426,
    'io_uring_register': 427,
    'open_tree': 428,
    'move_mount': 429,
    'fsopen': 430,
    'fsmount': 432,
    'mount_setattr': 442,
    'memfd_secret': 447,
}
_CLONE, _CLONE3 = (56, 220), 435
_NEW_NAMESPACES = 0x7E020000
_MACHINES = {'x86_64': (0, 0xC000003E), 'aarch64': (1, 0xC00000B7)}
MACHINES = tuple(_MACHINES)

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_KILL, _ALLOW, _ERROR = 0x80000000, 0x7FFF0000, 0x00050000


def program(machine: str = '') -> bytes:
    """The filter, as an array of `struct sock_filter`; ValueError for an unknown machine.

    Calls of the list, and of clone for new namespaces, fail with EPERM, clone3 with ENOSYS, upon
    which libraries use clone.
    """
    machine = machine or platform.machine()
    if machine not in _MACHINES:
        raise ValueError(f'machine is {machine}; legal is {" or ".join(_MACHINES)}')
    column, architecture = _MACHINES[machine]
    refused = [*(numbers[column] for numbers in _CALLS.values()), *_EVERYWHERE.values()]

    def line(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack('<HBBI', code, yes, no, value)

    refuse = line(_RETURN, _ERROR | errno.EPERM)
    body = [
        line(_LOAD, 4),  # the architecture that the call was made for
        line(_EQUAL, architecture, yes=1),
        line(_RETURN, _KILL),
        line(_LOAD, 0),  # the call's number
        line(_AT_LEAST, 0x40000000, no=1),  # the x32 ABI's own numbers
        refuse,
        line(_EQUAL, _CLONE3, no=1),
        line(_RETURN, _ERROR | errno.ENOSYS),
    ]
    for number in sorted(refused):
        body += [line(_EQUAL, number, no=1), refuse]
    body += [
        line(_EQUAL, _CLONE[column], no=3),
        line(_LOAD, 16),  # its flags, low half: little-endian
        line(_ANY_BIT, _NEW_NAMESPACES, no=1),
        refuse,
        line(_RETURN, _ALLOW),
    ]
    return b''.join(body)
