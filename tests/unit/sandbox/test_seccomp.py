"""The seccomp program, run on made-up system calls by a small interpreter of its instructions."""

from __future__ import annotations

import errno
import struct

import pytest

from megathunder.errors import IsolationError
from megathunder.sandbox.seccomp import ALLOW, AUDIT_ARCH, DENIED, ERRNO, KILL_PROCESS, build_filter


def verdict(program: bytes, architecture: int, number: int, argument: int = 0) -> int:
    """What the filter says to one system call."""
    data = {0: number, 4: architecture, 16: argument}
    code = [struct.unpack_from("=HBBI", program, at) for at in range(0, len(program), 8)]
    accumulator, at = 0, 0
    while True:
        op, if_true, if_false, operand = code[at]
        at += 1
        if op == 0x20:
            accumulator = data[operand]
        elif op == 0x06:
            return operand
        else:
            holds = {0x15: accumulator == operand, 0x35: accumulator >= operand, 0x45: bool(accumulator & operand)}[op]
            at += if_true if holds else if_false


@pytest.mark.parametrize(("machine", "column"), [("x86_64", 0), ("aarch64", 1)])
def test_filter_denies_what_is_listed_and_allows_the_rest(machine: str, column: int) -> None:
    program, architecture = build_filter(machine), AUDIT_ARCH[column]
    read, execve, clone, clone3, socket = ((0, 63), (59, 221), (56, 220), (435, 435), (41, 198))
    for numbers in DENIED.values():
        assert verdict(program, architecture, numbers[column]) == ERRNO | errno.EPERM
    assert verdict(program, architecture, read[column]) == ALLOW
    assert verdict(program, architecture, execve[column]) == ALLOW
    assert verdict(program, architecture, clone[column], 0x01200011) == ALLOW  # fork
    for flag in (0x10000000, 0x00020000, 0x20000000, 0x40000000):
        assert verdict(program, architecture, clone[column], flag | 17) == ERRNO | errno.EPERM
    assert verdict(program, architecture, clone3[column]) == ERRNO | errno.ENOSYS
    assert verdict(program, AUDIT_ARCH[1 - column], read[column]) == KILL_PROCESS
    for family, wanted in ((1, ALLOW), (2, ALLOW), (10, ALLOW), (16, None), (38, None), (40, None)):
        expected = wanted if wanted is not None else ERRNO | errno.EAFNOSUPPORT
        assert verdict(program, architecture, socket[column], family) == expected


def test_x32_calls_do_not_pass_on_x86_64() -> None:
    assert verdict(build_filter("x86_64"), AUDIT_ARCH[0], 0x40000000 + 101) == ERRNO | errno.ENOSYS


def test_unknown_machine_is_refused() -> None:
    with pytest.raises(IsolationError, match="riscv64"):
        build_filter("riscv64")
