"""Commands as ranks: under a launcher a command is a rank of its job, and `--nproc` starts ranks of this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

Nproc = Annotated[
    int, typer.Option("--nproc", min=1, help="Start so many ranks on this machine, unless one is started.")
]


def rerun(nproc: int) -> None:
    """Become torchrun with this very command as ranks; nothing to do for one rank, or where a launcher started us."""
    from meshflash.runtime.launchers import detect

    if nproc > 1 and detect().world_size == 1:
        become(nproc, ["-m", "meshflash", *without_nproc(sys.argv[1:])])


def become(nproc: int, program: Sequence[str], prefixed: bool = False) -> None:
    """Become torchrun, with the cores of the machine divided by its ranks."""
    from meshflash.runtime.cores import cores_here
    from meshflash.runtime.guard import TOKEN, new_token
    from meshflash.runtime.listen import LOOPBACK, LOOPBACK_RENDEZVOUS
    from meshflash.runtime.parent import STARTER

    os.environ[STARTER] = str(os.getpid())  # which torchrun keeps
    os.environ[TOKEN] = new_token()  # of this job alone, whatever was set around it
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, LOOPBACK)  # all ranks are here: nobody else needs to reach them
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(cores_here()) // nproc)))  # torchrun would say 1
    os.environ.setdefault("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[rank ${rank}] ")
    how = ["--rdzv-backend", LOOPBACK_RENDEZVOUS, "--rdzv-endpoint", "127.0.0.1:0", "--nproc-per-node", str(nproc)]
    how += ["--tee", "3"] if prefixed else []
    sys.stdout.flush()
    how += ["-m", "--", *program[1:]] if program[0] == "-m" else ["--", *program]  # options behind are the program's
    os.execv(sys.executable, [sys.executable, "-m", "meshflash.runtime.torchrun", *how])


def without_nproc(arguments: Sequence[str]) -> list[str]:
    """A command line without its --nproc.

    >>> without_nproc(["checksum", "--nproc", "4", "--dim", "8", "--nproc=2"])
    ['checksum', '--dim', '8']
    """
    out: list[str] = []
    skip = False
    for word in arguments:
        if skip or word == "--nproc" or word.startswith("--nproc="):
            skip = word == "--nproc" and not skip
            continue
        out.append(word)
    return out
