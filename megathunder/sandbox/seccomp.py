"""A seccomp filter for what a sandbox never needs: namespaces, mounts, tracing, kernel interfaces, odd sockets.

    wrong architecture -> kill;  x32 and clone3 -> ENOSYS;  listed calls -> EPERM;  clone with namespace flags -> EPERM;
    setting extended attributes -> EOPNOTSUPP, on which sed and cp go on without them;
    socket families other than UNIX, IPv4, IPv6 -> EAFNOSUPPORT (AF_VSOCK would reach a hypervisor);  the rest -> allow

clone3 hides its flags behind a pointer, so it is refused and libc falls back to clone. Extended attributes are refused
because they could outlive the cleaning of a work folder, memfd and System V memory because no folder bounds them.
Called by sandbox.bubblewrap. Refuses machines without a table.
"""

from __future__ import annotations

import errno
import platform
import struct

from megathunder.errors import IsolationError

X86_64, AARCH64 = 0, 1
AUDIT_ARCH = (0xC000003E, 0xC00000B7)
CLONE, CLONE3, SOCKET = (56, 220), (435, 435), (41, 198)
DENIED = {  # name: (x86_64, aarch64)
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "keyctl": (250, 219),
    "add_key": (248, 217), "request_key": (249, 218), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "move_mount": (429, 429), "open_tree": (428, 428), "mount_setattr": (442, 442), "acct": (163, 89),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196),
    "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180), "syslog": (103, 116), "quotactl": (179, 60),
    "fanotify_init": (300, 262), "personality": (135, 92), "vhangup": (153, 58), "pidfd_getfd": (438, 438),
}  # fmt: skip
UNSUPPORTED = {"setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463)}
NAMESPACES = 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000 | 0x00020000 | 0x00000080
FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF: load word, jumps, return
NUMBER, ARCHITECTURE, ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data (argument: low half of the first)
ALLOW, KILL_PROCESS, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000


def instruction(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """One struct sock_filter."""
    return struct.pack("=HBBI", code, if_true, if_false, operand)


def unless(code: int, operand: int, verdict: int) -> list[bytes]:
    """Return `verdict` if the test holds, else go on."""
    return [instruction(code, operand, 0, 1), instruction(RETURN, verdict)]


def build_filter(machine: str | None = None) -> bytes:
    """The filter program for `machine` (this one by default), as bwrap --seccomp reads it."""
    machine = machine or platform.machine()
    if machine not in ("x86_64", "aarch64"):
        raise IsolationError(
            f"this machine is {machine}", expected="x86_64 or aarch64", remedy="run the sandbox on one of these"
        )
    column = X86_64 if machine == "x86_64" else AARCH64
    program = [
        instruction(LOAD, ARCHITECTURE),
        instruction(EQUAL, AUDIT_ARCH[column], 1, 0),
        instruction(RETURN, KILL_PROCESS),
        instruction(LOAD, NUMBER),
    ]
    if column == X86_64:
        program += unless(AT_LEAST, 0x40000000, ERRNO | errno.ENOSYS)
    program += unless(EQUAL, CLONE3[column], ERRNO | errno.ENOSYS)
    for numbers in DENIED.values():
        program += unless(EQUAL, numbers[column], ERRNO | errno.EPERM)
    for numbers in UNSUPPORTED.values():
        program += unless(EQUAL, numbers[column], ERRNO | errno.EOPNOTSUPP)
    program += [instruction(EQUAL, CLONE[column], 0, 4), instruction(LOAD, ARGUMENT)]
    program += unless(ANY_BIT, NAMESPACES, ERRNO | errno.EPERM) + [instruction(RETURN, ALLOW)]
    program += [instruction(EQUAL, SOCKET[column], 0, 2 + len(FAMILIES)), instruction(LOAD, ARGUMENT)]
    program += [instruction(EQUAL, f, len(FAMILIES) - i, 0) for i, f in enumerate(FAMILIES)]
    program += [instruction(RETURN, ERRNO | errno.EAFNOSUPPORT), instruction(RETURN, ALLOW)]
    return b"".join(program)
