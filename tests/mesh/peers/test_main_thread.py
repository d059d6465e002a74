"""Who has called the function of the C library in which the main thread waits: OneFlow, or Python."""

from __future__ import annotations

import struct
import time
from threading import Thread

import pytest

from libai_data.mesh.peers.main_thread import MainThread, ends_with_call, first_caller

C, ONEFLOW, PYTHON = 0x7F3CD6000000, 0x7F3BDC200000, 0x7F3CD6400000
SIZES = {C: ("C library", 2 << 20), ONEFLOW: ("OneFlow", 2 << 30), PYTHON: ("Python", 2 << 20)}
CODE = [(first, first + size, owner) for first, (owner, size) in SIZES.items()]
# As found below a lock of Python: half of the second word is FUTEX_WAIT_BITSET.
# The code before each even address is a call here.
STALE = (ONEFLOW + 0x1000000, 0x7F3C00000189, 0x0, C + 0xAED90, 0x7F3C00000001)


def before(address: int) -> bytes:
    """The code from an address on."""
    return bytes.fromhex("90 90 e8 80 25 f0 ff") if address % 2 else b"\x90" * 7


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((*STALE, PYTHON + 2, ONEFLOW + 0x1000000), "Python"),
        ((*STALE, ONEFLOW + 0x2000000, PYTHON + 2), "OneFlow"),
        (STALE, ""),
    ],
)
def test_stale_words_of_the_stack_are_no_callers(words: tuple[int, ...], expected: str) -> None:
    assert first_caller(struct.pack(f"@{len(words)}N", *words) + b"\0", CODE, before) == expected


@pytest.mark.parametrize("moved", list(SIZES))
def test_callers_are_found_wherever_the_system_has_put_the_libraries(moved: int) -> None:
    places = {first: 0x7FCB00800000 if first == moved else first for first in SIZES}
    code = [(places[first], places[first] + size, owner) for first, (owner, size) in SIZES.items()]
    words = (places[C] + 0xAED90, places[ONEFLOW] + 0x2000, places[PYTHON] + 2)
    assert first_caller(struct.pack("@3N", *words), code, before) == "OneFlow"
    assert first_caller(struct.pack("@2N", words[0], words[2]), code, before) == "Python"


@pytest.mark.parametrize(
    ("code", "is_call"),
    [
        ("90 90 e8 80 25 f0 ff", True),  # call offset
        ("90 90 90 90 90 ff d0", True),  # call rax
        ("90 90 90 90 ff 50 10", True),  # call [rax + 16]
        ("90 90 90 ff 54 24 08", True),  # call [rsp + 8]
        ("90 ff 15 00 10 00 00", True),  # call [rip + 4096]
        ("ff 94 24 00 10 00 00", True),  # call [rsp + 4096]
        ("90 ff 25 00 10 00 00", False),  # jmp [rip + 4096]
        ("90 90 90 90 90 ff e0", False),  # jmp rax
        ("90 90 e9 80 25 f0 00", False),  # jmp offset
        ("e8 80 25 f0 00 90 90", False),  # call offset; nop; nop
    ],
)
def test_functions_return_to_where_a_call_ends(code: str, is_call: bool) -> None:
    assert ends_with_call(bytes.fromhex(code)) == is_call


def test_a_rank_that_seems_idle_has_time_for_what_takes_6_s_on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    main = MainThread(has_gpus=False)
    found: list[float] = []
    monkeypatch.setattr(main, "_was_called_by_oneflow", lambda: True)

    def look() -> None:
        for _ in range(4):
            found.append(main.seconds_to_wait(has_left=False))
            time.sleep(0.3)

    thread = Thread(target=look)
    thread.start()
    thread.join()  # The main thread waits.
    assert found[-1] > 6.0
