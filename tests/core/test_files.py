"""Output files: checked before the work, written atomically, with errors that name the path and the reason."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from meshflash.core.files import OutputError, check_file, check_folder, write_whole
from meshflash.core.reading import read_object


@contextmanager
def full_disk(max_bytes: int = 0) -> Iterator[None]:
    """Let no file of this process grow beyond `max_bytes`: writing fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_check_file_leaves_existing_files_unchanged(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("kept")
    check_file(tmp_path / "old")
    check_file(tmp_path / "folder" / "new")
    check_folder(tmp_path / "other" / "folder")
    check_file(Path("/dev/null"))
    assert (tmp_path / "old").read_text() == "kept"
    assert not list((tmp_path / "folder").iterdir())
    assert not list((tmp_path / "other" / "folder").iterdir())


@pytest.mark.parametrize("check", [check_file, check_folder])
@pytest.mark.parametrize("where", ["below a file", "/proc", "disk full"])
def test_error_names_the_path_that_cannot_be_written(tmp_path: Path, check: object, where: str) -> None:
    (tmp_path / "file").touch()
    path = {"below a file": tmp_path / "file" / "x", "/proc": Path("/proc/x/y"), "disk full": tmp_path / "x"}[where]
    with full_disk(0 if where == "disk full" else resource.RLIM_INFINITY), pytest.raises(OutputError) as caught:
        check(path)  # type: ignore[operator]
    assert str(path) in str(caught.value)
    assert "cannot be written (" in str(caught.value)
    assert not path.is_file()


def test_check_file_refuses_a_folder(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="Is a directory"):
        check_file(tmp_path)


def test_full_disk_keeps_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "record"
    write_whole(path, "first")
    with full_disk(1000), pytest.raises(OutputError, match=f"^{path}: it cannot be written "):
        write_whole(path, "x" * 10_000)
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(OutputError, match=r"/dev/full: it cannot be written \(No space left on device\)"):
        write_whole(Path("/dev/full"), "x")
    assert Path("/dev/full").is_char_device()


def test_write_whole_keeps_symbolic_links(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_whole(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "text"


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), (b'{"rows": [', "not JSON"), (b"\xff", "not JSON"), (b"[1]", "a list")],
)
def test_error_names_json_of_another_type(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{path}.*{message}.*expected a record"):
        read_object(path, "a record")
