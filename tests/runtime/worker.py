"""One rank of a job: the script that tests start under launchers. It imports no module of the tests."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch

import meshflash
from meshflash import Layout, Mask, attention, flash_attention, init
from meshflash.engine.group_context import group_context
from meshflash.runtime.world import current_job

TOKENS = 37


def print_report(**values: object) -> None:
    """Print one JSON line in a single write, so that lines of ranks do not mix."""
    os.write(1, f"report {json.dumps(values)}\n".encode())


def attend(timeout: float) -> None:
    """Run attention over the ranks of the job; compare output and gradients with a single process."""
    with init(timeout=timeout) as world:
        assert init() is world
        generator = torch.Generator().manual_seed(0)
        q, k, v, dout = (torch.randn(1, TOKENS, 2, 8, generator=generator).double() for _ in range(4))
        layout, whole = Layout.zigzag(TOKENS, world.world_size), [x.requires_grad_() for x in (q, k, v)]
        rows = torch.from_numpy(layout.positions(world.rank))
        local = [x.detach()[:, rows].requires_grad_() for x in whole]
        options: dict[str, Any] = dict(layout=layout, schedule="zigzag") if world.world_size > 1 else {}
        got = attention(*local, mask=Mask.causal(), **options)
        want = flash_attention(*whole, mask=Mask.causal())
        pairs = [
            (got, want),
            *zip(torch.autograd.grad(got, local, dout[:, rows]), torch.autograd.grad(want, whole, dout), strict=True),
        ]
        error = max(float((part - full[:, rows]).abs().max()) for part, full in pairs)
        job = current_job()
        print_report(
            rank=world.rank,
            size=world.world_size,
            local=world.local_rank,
            local_size=world.local_world_size,
            node=world.node,
            launcher=world.launcher,
            backend=world.backend,
            error=error,
            mpi="mpi4py.MPI" in sys.modules,
            master=job.rendezvous.address if job and job.rendezvous else "",
        )


def kinds(timeout: float) -> None:
    """Make several kinds of calls, of which one rank makes the last with another scale; report its error."""
    with init(timeout=timeout) as world:
        generator = torch.Generator().manual_seed(0)
        whole = [torch.randn(1, 2 * world.world_size, 2, 8, generator=generator).double() for _ in range(3)]
        local = [x.chunk(world.world_size, 1)[world.rank] for x in whole]
        error = 0.0
        for mask in (Mask.causal(), Mask.full(), Mask.causal(), Mask.window(5, 0)):
            want = flash_attention(*whole, mask=mask).chunk(world.world_size, 1)[world.rank]
            error = max(error, float((attention(*local, mask=mask, schedule="ring") - want).abs().max()))
        text = ""
        try:
            attention(*local, scale=0.25 if world.rank == world.world_size - 5 else 0.5, schedule="ring")
        except meshflash.DisagreementError as found:
            text = str(found)
        after = attention(*local, scale=0.125, schedule="ring")  # a failed handshake leaves the group usable
        want = flash_attention(*whole, scale=0.125).chunk(world.world_size, 1)[world.rank]
        error = max(error, float((after - want).abs().max()))
        group: Any = torch.distributed.group.WORLD
        handshakes = group_context(group.group_name).handshakes
        print_report(rank=world.rank, error=error, text=text, handshakes=handshakes)


def again(timeout: float) -> None:
    """Initialize and shut down three times in the same processes; rank 0 leaves late."""
    for n in range(3):
        with init(timeout=timeout) as world:
            x = torch.ones(1)
            torch.distributed.all_reduce(x)
            if world.rank == 0:
                time.sleep(0.7)
        assert "MASTER_PORT" not in os.environ or sys.argv[-1] == "given"
        print_report(rank=world.rank, n=n, sum=x.item())


def loop(timeout: float) -> None:
    """Repeat attention until a rank is lost."""
    os.environ["MESHFLASH_TIMEOUT"] = str(timeout)
    world = init(timeout=timeout)
    x = torch.randn(1, 64, 2, 16, requires_grad=True)
    n = 0
    while True:
        try:
            attention(x, x, x, schedule="ring", mask=Mask.causal()).sum().backward()
        except (meshflash.TransportError, meshflash.MissingRankError) as error:
            print_report(rank=world.rank, calls=n, lost=str(error), kind=type(error).__name__)
            os._exit(3)
        n += 1
        if n == 1:
            print_report(rank=world.rank, process=os.getpid())


def fail(timeout: float) -> None:
    """Call `init` where it cannot succeed, and report its error."""
    begin = time.monotonic()
    try:
        init(timeout=timeout)
    except RuntimeError as error:
        print_report(error=f"{type(error).__name__}: {error}", seconds=time.monotonic() - begin)
        os._exit(4)


if __name__ == "__main__":
    for name in sys.argv[3:]:  # variables that this rank must not see
        os.environ.pop(name, None)
    {"attend": attend, "kinds": kinds, "again": again, "loop": loop, "fail": fail}[sys.argv[1]](float(sys.argv[2]))
