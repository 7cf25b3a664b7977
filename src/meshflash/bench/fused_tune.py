"""Configurations of fused products: which is the fastest for each variant of a case.

Each is tried by itself, checked first, for a few rounds; `fused_sweep` times the best of them in turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch

from meshflash.bench.fused import Played, opened, planned
from meshflash.bench.fused_cases import Case, Setup
from meshflash.comm.transports.contract import TransportError
from meshflash.gemm import configs
from meshflash.gemm.configs import Config
from meshflash.gemm.distributed.plan import BULK, VARIANTS, FusedConfig, supports_warp_specialized_send
from meshflash.runtime.devices import take_device

#: Rounds of a trial.
ROUNDS = 3
#: Multiprocessors that move: besides what the sizes suggest, tried in the best configuration.
MOVERS = (1, 2, 4, 8)
MOVING = "producer_consumer"
#: What is said of one that is left out, before why.
FAILED = "does not run:"

Say = Callable[[str], None]


def candidates(case: Case, device: torch.device) -> dict[str, list[Config]]:
    """What is worth trying, by variant. Of the bulk only tiles matter.

    Warps have roles in the epilogue of an all_scatter alone, where kernels in Gluon run. A stage less leaves room in
    shared memory for all of a tile that is sent. Tiles may also be gone through row by row, which suits few columns.
    """
    part = case.product.local_problem(device)
    every = configs.candidates(part.dtype_name, device)
    found = list(dict.fromkeys(replace(config, warp_specialized=0) for config in every))
    tiles = {(config.block_m, config.block_n): config for config in reversed(found)}
    tried = {name: list(tiles.values()) if name == BULK else found for name in VARIANTS}
    if supports_warp_specialized_send(case.product, device):
        warp_specialized = [config for config in every if config.warp_specialized]
        fewer = [replace(config, num_stages=config.num_stages - 1) for config in warp_specialized]
        by_rows = list(dict.fromkeys(replace(config, l2_swizzle=1) for config in warp_specialized))
        tried["epilogue"] = [*warp_specialized, *fewer, *by_rows, *found]
    return tried


def best(rank: int, setup: Setup, case: Case, say: Say) -> dict[str, Config]:
    """The fastest configuration of each variant, the same on all ranks; a variant of which none runs is left out."""
    device = take_device(torch.device(case.device).type, rank)
    tried = candidates(case, device)
    with opened(case, setup, rank, [(name, x) for name in tried for x in tried[name]], at_once=1) as heap:
        played = Played(case, heap)
        chosen: dict[str, Config] = {}
        for name in tried:
            times = _times(played, name, tried[name], say)
            if name == MOVING and times:
                first = min(times, key=lambda config: times[config])
                plan = planned(case, setup, device, MOVING, first)
                num_sms = plan.num_ctas // first.ctas_per_sm + plan.num_comm_sms
                fit = [FusedConfig.of(first, movers) for movers in MOVERS if 2 * movers <= num_sms]
                times |= _times(played, name, fit, say)
            if times:
                chosen[name] = min(times, key=lambda config: times[config])
    if BULK not in chosen:
        raise RuntimeError(f"no configuration of the bulk runs at {case}")
    return chosen


def _times(played: Played, variant: str, tried: Iterable[Config], say: Say) -> dict[Config, float]:
    """Milliseconds of those that run."""
    found = {config: _trial(played, variant, config, say) for config in tried}
    return {config: ms for config, ms in found.items() if ms is not None}


def _trial(played: Played, variant: str, config: Config, say: Say) -> float | None:
    """Milliseconds of one; None where it does not compile, or does not fit, on any rank. What is wrong raises."""
    name = f"{variant} {config}"
    say(name)
    heap = played.heap
    gemm = played.gemm(variant, config=config)
    problem = ""
    try:
        results = played.call(gemm, copy=False)
    except TransportError:
        raise
    except Exception as error:  # a compiler's own, or too much shared memory: it is no candidate here
        problem = f"{type(error).__name__}: {error}"
    problem = next(filter(None, played.said(problem)), "")
    ms = None
    if problem:
        say(f"{name} {FAILED} {problem}")
    else:
        played.check(name, results)
        ms = played.most(played.time({name: partial(played.call, gemm, copy=False)}, ROUNDS)[name])
    gemm.free()
    heap.barrier()
    return ms
