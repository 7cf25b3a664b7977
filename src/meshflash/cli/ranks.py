"""Commands as ranks of a job: `-n/--nproc` starts ranks on this machine.

Under torchrun, mpiexec or srun a command is one rank of that job, and `--nproc` is ignored.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

Nproc = Annotated[
    int, typer.Option("--nproc", "-n", min=1, help="Ranks to start on this machine; ignored under a launcher.")
]


def rerun(nproc: int) -> None:
    """Replace this process by torchrun running the same command on `nproc` ranks.

    Do nothing for one rank, or if a launcher already started this process as one of several.
    """
    from meshflash.runtime.launchers import detect

    if nproc > 1 and detect().world_size == 1:
        become(nproc, ["-m", "meshflash", *without_nproc(sys.argv[1:])])


def become(nproc: int, program: Sequence[str], prefixed: bool = False) -> None:
    """Replace this process by torchrun; its ranks share the cores of the machine equally.

    `program` is a script or `-m` and a module, with arguments. With `prefixed`, each line begins with its rank.
    """
    from meshflash.runtime.cores import cores_here
    from meshflash.runtime.guard import TOKEN, new_token
    from meshflash.runtime.listen import LOOPBACK, LOOPBACK_RENDEZVOUS
    from meshflash.runtime.parent import STARTER

    os.environ[STARTER] = str(os.getpid())  # exec keeps the process id
    os.environ[TOKEN] = new_token()  # one token per job, whatever the caller had set
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, LOOPBACK)  # all ranks are on this machine: do not listen on the network
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(cores_here()) // nproc)))  # torchrun would set 1
    os.environ.setdefault("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[rank ${rank}] ")
    how = ["--rdzv-backend", LOOPBACK_RENDEZVOUS, "--rdzv-endpoint", "127.0.0.1:0", "--nproc-per-node", str(nproc)]
    how += ["--tee", "3"] if prefixed else []
    sys.stdout.flush()
    how += ["-m", "--", *program[1:]] if program[0] == "-m" else ["--", *program]  # later options are the program's
    os.execv(sys.executable, [sys.executable, "-m", "meshflash.runtime.torchrun", *how])


def without_nproc(arguments: Sequence[str]) -> list[str]:
    """Return a command line without its -n or --nproc.

    >>> without_nproc(["checksum", "--nproc", "4", "--dim", "8", "--nproc=2", "-n", "3", "-n3"])
    ['checksum', '--dim', '8']
    """
    kept: list[str] = []
    is_value = False
    for word in arguments:
        if is_value:
            is_value = False
        elif word in ("--nproc", "-n"):
            is_value = True
        elif not (word.startswith("--nproc=") or (word.startswith("-n") and word[2:].isdigit())):
            kept.append(word)
    return kept
