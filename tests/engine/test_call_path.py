"""A repeated call goes straight down: few files, each entered once, from the public call to the kernel."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch

import meshflash
from meshflash import Mask, api, attention, flash_attention
from meshflash.engine.op import repeat

SOURCE = f"{Path(meshflash.__file__).parent.as_posix()}/"
#: Files that a repeated call enters at most.
MAX_FILES = 8
#: All files below `kernels/` but the registry count as one step: how a kernel launches is its own affair.
KERNEL = "the kernel"
#: The files that a repeated call may enter, by their role.
ROLES = {
    "public call": {"api.py", "groups.py", "runtime/state.py"},
    "key of the call": {"arguments.py"},
    "cache": {"engine/cache.py"},
    "autograd boundary": {"engine/op.py"},
    "executable": {"engine/executable.py"},
    "kernel": {"kernels/registry.py", KERNEL},
}


class Entry(NamedTuple):
    """A call of a function in another file of the package."""

    caller: str
    file: str
    function: str

    def __str__(self) -> str:
        return f"{self.caller or 'test'} -> {self.file}: {self.function}"


def record_path(call: Callable[[], Any]) -> list[Entry]:
    """Return the calls from one file of the package to another, in order; frames outside of it are looked through."""
    entries: list[Entry] = []

    def profile(frame: FrameType, event: str, _: Any) -> None:
        file = _step(frame)
        if event != "call" or not file:
            return
        back = frame.f_back
        while back is not None and not _step(back):
            back = back.f_back
        caller = "" if back is None else _step(back)
        if caller != file:
            entries.append(Entry(caller, file, frame.f_code.co_name))

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    return entries


def _step(frame: FrameType) -> str:
    """Return the file of a frame from the package's folder on, KERNEL, or "" outside of the package."""
    path = Path(frame.f_code.co_filename).as_posix()
    if not path.startswith(SOURCE):
        return ""
    file = path.removeprefix(SOURCE)
    return KERNEL if file.startswith("kernels/") and file != "kernels/registry.py" else file


def files_in_order(entries: list[Entry]) -> list[str]:
    """Return the files that a path enters, once where a file calls another one in a row."""
    out: list[str] = []
    last_called: dict[str, str] = {}
    for entry in entries:
        if last_called.get(entry.caller) != entry.file:
            out.append(entry.file)
        last_called[entry.caller] = entry.file
    return out


def assert_straight(entries: list[Entry], max_files: int) -> None:
    """Assert that a path enters only files with a role, at most so many, and each of them once."""
    path = "\n".join(f"  {entry}" for entry in entries)
    allowed = {file for files in ROLES.values() for file in files}
    unexpected = sorted({entry.file for entry in entries} - allowed)
    assert not unexpected, f"a repeated call enters {unexpected}, which have no role on its path:\n{path}"
    files = files_in_order(entries)
    again = sorted({file for file in files if files.count(file) > 1})
    assert not again, f"a repeated call comes back to {again}:\n{path}"
    entered = {entry.file for entry in entries}
    assert len(entered) <= max_files, f"a repeated call enters {len(entered)} files, at most {max_files}:\n{path}"


def record_repeated_call(function: Any, grad: bool = False, **given: Any) -> list[Entry]:
    """Return the path of a call that was made before with other tensors of the same shapes."""

    def call() -> None:
        function(*(torch.randn(2, 9, 4, 8, requires_grad=grad) for _ in range(3)), **given)

    for _ in range(2):
        call()
    return record_path(call)


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("mask", [None, Mask.causal()], ids=["full", "causal"])
@pytest.mark.parametrize("kernel", ["auto", "tiled"])
@pytest.mark.parametrize("function", [flash_attention, attention])
def test_repeated_call_enters_few_files_and_each_once(function, kernel, mask, grad):
    entries = record_repeated_call(function, grad, kernel=kernel, mask=mask)
    assert [entries[0].file, entries[-1].file] == ["api.py", KERNEL], entries  # the whole way was recorded
    assert_straight(entries, MAX_FILES)


def by_way_of(file: str) -> Any:
    """Return `repeat` behind a function that seems to be in another file of the package."""
    namespace = {"repeat": repeat}
    source = "def detour(*given):\n    return repeat(*given)"
    exec(compile(source, SOURCE + file, "exec"), namespace)
    return namespace["detour"]


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("engine/fast_path.py", r"enters \['engine/fast_path.py'\], which have no role"),
        ("engine/cache.py", r"comes back to \['engine/cache.py'\]"),
    ],
)
def test_detour_on_the_path_is_found_and_the_path_is_shown(monkeypatch, file, message):
    monkeypatch.setattr(api, "repeat", by_way_of(file))
    entries = record_repeated_call(flash_attention)
    with pytest.raises(AssertionError, match=message) as raised:
        assert_straight(entries, MAX_FILES)
    shown = [line.strip() for line in str(raised.value).splitlines()]
    detour = shown.index(f"api.py -> {file}: detour")
    assert shown[detour + 1] == f"{file} -> engine/op.py: repeat"


def test_file_counts_once_if_another_file_calls_it_in_a_row():
    helper = [
        Entry("", "api.py", "f"),
        Entry("api.py", "arguments.py", "f"),
        Entry("arguments.py", "core/mask.py", "f"),
    ]
    again = Entry("api.py", "arguments.py", "g")
    assert files_in_order([*helper, again]) == ["api.py", "arguments.py", "core/mask.py"]
    between = Entry("api.py", "engine/cache.py", "get")
    assert files_in_order([*helper, between, again]).count("arguments.py") == 2


def test_one_file_more_than_allowed_is_found():
    entries = record_repeated_call(attention)
    with pytest.raises(AssertionError, match="at most"):
        assert_straight(entries, len({entry.file for entry in entries}) - 1)


def test_first_call_is_not_a_straight_path():
    entries = record_path(lambda: flash_attention(*[torch.zeros(1, 7, 3, 8)] * 3, scale=0.321))
    with pytest.raises(AssertionError, match="no role"):
        assert_straight(entries, MAX_FILES)
