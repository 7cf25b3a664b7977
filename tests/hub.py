"""Run programs with one thread for each rank, over a loopback `Hub`, without autograd or process groups."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshflash.check.spread import Item, shards, whole
from meshflash.comm.transports.contract import Transport
from meshflash.comm.transports.loopback import Hub, HubTransport
from meshflash.engine.executable import MeshExecutable, Plan
from meshflash.engine.local import rows_of, sink_gradient
from meshflash.engine.placement import Setting
from meshflash.kernels.contract import Grads, accumulator_dtype, new_outputs
from meshflash.schedules.registry import build


def in_threads(world: int, function: Callable[[int, HubTransport], Any], timeout: float = 30.0) -> list[Any]:
    """Run `function(rank, transport)` for every rank in a thread of its own; return the results in rank order."""
    hub = Hub(world, timeout)
    results: dict[int, Any] = {}
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            results[rank] = function(rank, hub.transport(rank))
        except BaseException as error:
            errors.append(error)

    before = torch.get_num_threads()
    torch.set_num_threads(1)  # each rank already has a thread of its own
    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.set_num_threads(before)
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(world)]


def prepare(item: Item, rank: int) -> MeshExecutable:
    """Return the executable of one rank of an item, without a process group."""
    case = item.case
    setting = Setting(
        batch=case.batch,
        dim=case.dim,
        value_dim=case.value_dim or case.dim,
        dtype=item.dtype,
        reduce_dtype=item.reduce_dtype or accumulator_dtype(item.dtype),
        device=torch.device("cpu"),
        kernel=item.kernel,
        deterministic=False,
    )
    plan = Plan(item.schedule, item.q, item.k, case.q_offset, lse=item.lse)
    return MeshExecutable(plan, case.mask, case.heads, case.kv_heads or case.heads, rank, setting, build)


def upstream(item: Item, out: Tensor, lse: Tensor, rank: int) -> tuple[Tensor, Tensor | None]:
    """Return the oracle's gradients of out and lse for the rows of one rank."""
    case, rows = item.case, torch.from_numpy(item.q.positions(rank))
    generator = torch.Generator().manual_seed(7)
    shape = (case.batch, case.tokens, case.heads, case.value_dim or case.dim)
    dout = torch.randn(shape, generator=generator)[:, rows].to(out)
    dlse = torch.randn(case.batch, case.heads, case.tokens, generator=generator)[:, :, rows].to(lse)
    return dout, dlse.masked_fill(lse == -torch.inf, 0.0) if case.lse_gradient else None


def run_rank(
    item: Item, leaves: dict[str, Tensor], rank: int, transport: Transport, times: int = 1
) -> dict[str, Tensor]:
    """Run forward and backward of one rank; outputs start as NaN, so that a row that stays unwritten fails the test."""
    case, local = item.case, {name: x.detach() for name, x in shards(item, leaves, rank).items()}
    q, k, v = local["q"], local["k"], local["v"]
    features, prepared = case.features(local), prepare(item, rank)
    for _ in range(times):
        out, lse = (x.fill_(torch.nan) for x in new_outputs(q, v))
        if case.batch:
            saved = torch.full((prepared.saved_bytes,), 0xFF, dtype=torch.uint8)  # NaN in every dtype
            prepared.run("forward", [q, k, v, out, lse, saved], features, transport)
        rows = rows_of(out, lse, *upstream(item, out, lse, rank))
        grads = Grads.like(q, k, v)
        made = [grads.dq_BTHD.fill_(torch.nan), grads.dk_BSKD.fill_(torch.nan), grads.dv_BSKE.fill_(torch.nan)]
        if case.batch:
            given = [q, k, v, rows.out_BTHE, rows.lse_BHT, rows.dout_BTHE, rows.delta_BHT]
            prepared.run("backward", [*given, *made, saved], features, transport, lse_gradient=case.lse_gradient)
    results = dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *made), strict=True))
    if not item.lse:
        assert results.pop("lse").isnan().all()
    share = sink_gradient(features.sink_logits_H, rows)
    return results if share is None else results | {"dsink_logits": share}


def run_item(item: Item, leaves: dict[str, Tensor] | None = None, times: int = 1) -> dict[str, Tensor]:
    """Run an item with one thread for each rank, and return the reassembled results."""
    given = item.case.inputs(item.dtype) if leaves is None else leaves
    return whole(item, in_threads(item.world, lambda rank, hub: run_rank(item, given, rank, hub, times)))
