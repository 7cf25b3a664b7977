"""Small disks for the soak campaign: a tmpfs if this user may mount one, else a limit on the size of files."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: Error texts of a full disk: no blocks or inodes left, or RLIMIT_FSIZE exceeded.
REASONS = ("No space left on device", "File too large")


@dataclass(frozen=True)
class Disk:
    """A folder with little space; `small_disk` makes it.

    `max_file_bytes` limits the size of each file; it is 0 on a mounted disk.
    """

    folder: Path
    max_file_bytes: int

    def fill(self) -> None:
        """Fill the disk completely."""
        if not self.max_file_bytes:
            with contextlib.suppress(OSError), (self.folder / "other").open("wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass

    def grow(self) -> None:
        """Enlarge the disk, as if a user had freed space."""
        if not self.max_file_bytes:
            _mount("remount,size=64m,nr_inodes=10000", self.folder)


@contextlib.contextmanager
def small_disk(folder: Path, num_bytes: int, num_files: int = 0) -> Iterator[Disk]:
    """Mount a disk of limited bytes and files; 0 files means no limit of files."""
    folder.mkdir(parents=True)
    # The smallest tmpfs is one page; size=0 would mean no limit.
    options = f"size={max(4096, num_bytes)}" + (f",nr_inodes={num_files}" if num_files else "")
    if not _mount(options, folder):
        yield Disk(folder, max(4096, num_bytes))
        return
    try:
        yield Disk(folder, 0)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _mount(options: str, folder: Path) -> bool:
    """Mount a tmpfs; return whether this user may do that."""
    command = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:  # there is no `mount` command
        return False
