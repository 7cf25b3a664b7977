"""Exchange of JSON values between the ranks of a checkpoint, over a gloo group that nothing else uses.

A rank may write or read for hours, so no timeout can bound a save. Instead each working rank sends a heartbeat in every
round: a rank that is killed or stopped sends none, and is named within MESHFLASH_TIMEOUT seconds.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshflash.comm.handshake import timeout
from meshflash.runtime.liveness import LostRankError, naming_lost_ranks, one_line
from meshflash.runtime.store import start_thread

#: Seconds between two heartbeats: at least, and at most; in between, this share of the time that the work has taken.
MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS, PAUSE_SHARE = 0.01, 4.0, 0.1
#: The message of a rank that has no result yet: a heartbeat.
_WORKING = b""


def _value(rank: int, answer: dict[str, Any]) -> Any:
    if "error" in answer:
        raise RuntimeError(f"rank {rank} of the checkpoint's ranks raised {answer['error']}")
    return answer["value"]


class Ranks:
    """The ranks that save and load together; the process group is made on first use."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self._group: Any = None
        self._members: list[int] | None = None
        self.rank, self.world = 0, 1
        if dist.is_available() and dist.is_initialized():
            everyone = list(range(dist.get_world_size()))
            members = everyone if mesh is None else sorted(mesh.mesh.flatten().tolist())
            if dist.get_rank() not in members:
                raise ValueError("mesh: this rank is not in it; only its ranks save and load together")
            self._members = None if members == everyone else members
            self.rank, self.world = members.index(dist.get_rank()), len(members)

    def exchange(self, value: Any) -> list[Any]:
        """Return the value of each rank, in order. All ranks must call it at about the same time."""
        return self.gather(lambda: value) if self.world > 1 else [value]

    def gather(self, work: Callable[[], Any]) -> list[Any]:
        """Run `work` on every rank and return the results, in order; an exception on one rank raises on all.

        The work may take any time, and different times on each rank. LostRankError names a rank that has ended or
        stopped.
        """
        if self.world == 1:
            return [work()]
        results: list[bytes] = []
        done = threading.Event()

        def worker() -> None:
            try:
                text = json.dumps({"value": work()})
            except BaseException as error:  # the other ranks wait for a result of this one
                text = json.dumps({"error": one_line(error)})
            results.append(text.encode())
            done.set()

        begin = time.monotonic()
        pause = MIN_PAUSE_SECONDS
        start_thread(worker, "meshflash checkpoint")
        with naming_lost_ranks():
            while True:
                done.wait(pause)
                messages = self._round(results[0] if results else _WORKING)
                if all(text != _WORKING for text in messages):
                    return [_value(rank, json.loads(text)) for rank, text in enumerate(messages)]
                longest = min(MAX_PAUSE_SECONDS, timeout() / 4)
                pause = min(longest, max(MIN_PAUSE_SECONDS, PAUSE_SHARE * (time.monotonic() - begin)))

    def _round(self, text: bytes) -> list[bytes]:
        """Exchange one message of any length with each rank: first the lengths, then the messages."""
        if self._group is None:
            local = self._members is not None
            limit = timedelta(seconds=timeout())
            self._group = dist.new_group(self._members, limit, "gloo", use_local_synchronization=local)
        sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.world)]
        self._swap(torch.tensor([len(text)], device="cpu"), sizes)
        texts = [torch.empty(int(size), dtype=torch.uint8, device="cpu") for size in sizes]
        self._swap(torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0), texts)
        return [bytes(text.numpy()) for text in texts]

    def _swap(self, mine: Tensor, theirs: list[Tensor]) -> None:
        """Send a tensor to every other rank and receive one from each; empty tensors are not sent."""
        theirs[self.rank] = mine
        peers = [peer for peer in range(self.world) if peer != self.rank]
        works: list[tuple[int, Any]] = []
        peer = self.rank
        limit = timedelta(seconds=timeout())
        try:
            for peer in peers:
                if theirs[peer].numel():
                    works.append((peer, self._group.recv([theirs[peer]], peer, 0)))
            for peer in peers:
                if mine.numel():
                    works.append((peer, self._group.send([mine], peer, 0)))
            for peer, work in works:  # noqa: B007 - the error names it
                work.wait(limit)
        except RuntimeError as error:
            # only the first error names the lost rank: gloo fails all pending messages when one times out
            reason = str(error).strip().splitlines()[0]
            lost = int(dist.get_global_rank(self._group, peer))
            raise LostRankError(
                f"rank {lost} was lost or did not answer within {timeout():g} s ({reason})", (lost,)
            ) from error
