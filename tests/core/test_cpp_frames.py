"""C++ frames in the output of ranks."""

from __future__ import annotations

from monarch._core.text.cpp_frames import mark_cut, without_cpp_frames

WARNING = "[rank0]:[W1123 20:17:01 TCPStore.cpp:138] [c10d] recvValue failed on SocketImpl(fd=46): got 0 bytes.\n"
FRAMES = """Exception raised from recvBytes at /c10d/Utils.hpp:787 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x9d (0x7fc0 in libc10.so)
frame #1: <unknown function> + 0x674888d (0x7fc0 in libtorch_cpu.so)
<omitting python frames>
frame #62: <unknown function> + 0x2724a (0x7fc0 in libc.so.6)
"""


def test_frames_become_their_number() -> None:
    shown = without_cpp_frames(f"before\n{WARNING}{FRAMES}\nafter\n")
    line = "  (3 C++ frames omitted; TORCH_SHOW_CPP_STACKTRACES=1 shows them)\n"
    assert shown == f"before\n{WARNING}{line}after\n"


def test_each_warning_is_kept() -> None:
    shown = without_cpp_frames((WARNING + FRAMES + "\n") * 2)
    assert shown.count(WARNING) == 2 and shown.count("3 C++ frames") == 2 and "recvBytes" not in shown


def cut_warning(fd: int) -> str:
    return (
        f"[W1127 20:44:02.984996746 TCPStore.cpp:138] [c10d] recvValueWithTimeout failed on SocketImpl(fd={fd}, "
        f"addr=[4056:2355::]:21795, remote=[::]:17408): Failed to recv, got 0 bytes.\n"
    )


def test_warnings_of_cut_connections_are_left_out() -> None:
    text = f"mine\n{cut_warning(51)}{FRAMES}\n[rank0]:{cut_warning(52)}after\n{cut_warning(7)}{FRAMES}\n"
    marked = mark_cut(text.encode(), {51, 52}.__contains__)
    assert len(marked) == len(text.encode())
    shown = without_cpp_frames(marked.decode())
    assert shown.startswith(f"mine\nafter\n{cut_warning(7)}  (3 C++ frames omitted"), shown


def test_only_warnings_of_torch_are_marked() -> None:
    for text in ("SocketImpl(fd=51, ", f"print: {cut_warning(51)}", cut_warning(51).replace("TCPStore", "Mine"), ""):
        assert mark_cut(text.encode(), lambda _: True) == text.encode()
        assert without_cpp_frames(text) == text


def test_other_text_stays() -> None:
    for text in (
        "frame #1 of the video\n",
        "frame #0: here\nframe #1: there\n",
        "".join(f"frame #{number}: 3 objects, loss 0.1\n" for number in range(9)),
        "x" * 100,
        "",
    ):
        assert without_cpp_frames(text) == text
