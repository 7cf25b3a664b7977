"""Find the fastest configuration of each variant of a fused GEMM + collective.

Each configuration is checked and timed alone for a few rounds; `fused` then times the best ones interleaved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch

from meshflash.bench.fused import Harness, open_case_heap, plan_case
from meshflash.bench.fused_cases import Case, Setup
from meshflash.comm.transports.contract import TransportError
from meshflash.gemm import configs
from meshflash.gemm.configs import Config
from meshflash.gemm.distributed.plan import BULK, VARIANTS, FusedConfig, supports_warp_specialized_send
from meshflash.runtime.devices import take_device

#: Rounds of a trial.
ROUNDS = 3
#: Numbers of communication SMs that are tried in the best configuration, besides the one that the sizes suggest.
NUM_COMM_SMS = (1, 2, 4, 8)
#: The variant with communication SMs.
PRODUCER_CONSUMER = "producer_consumer"
#: Stands between the name of a configuration that is left out and the reason.
FAILED = "does not run:"

Say = Callable[[str], None]


def candidates(case: Case, device: torch.device) -> dict[str, list[Config]]:
    """Return the configurations worth trying, by variant. For the bulk variant only the tile sizes matter.

    Only the epilogue of an all_scatter can be warp-specialized, on devices that run Gluon kernels. One stage less
    leaves shared memory for a whole tile to send. Tiles in row-major order (no L2 swizzle) suit few columns.
    """
    local = case.problem.local_problem(device)
    every = configs.candidates(local.dtype_name, device)
    found = list(dict.fromkeys(replace(config, warp_specialized=0) for config in every))
    tiles = {(config.block_m, config.block_n): config for config in reversed(found)}
    tried = {name: list(tiles.values()) if name == BULK else found for name in VARIANTS}
    if supports_warp_specialized_send(case.problem, device):
        warp_specialized = [config for config in every if config.warp_specialized]
        fewer_stages = [replace(config, num_stages=config.num_stages - 1) for config in warp_specialized]
        row_major = list(dict.fromkeys(replace(config, l2_swizzle=1) for config in warp_specialized))
        tried["epilogue"] = [*warp_specialized, *fewer_stages, *row_major, *found]
    return tried


def best(rank: int, setup: Setup, case: Case, say: Say) -> dict[str, Config]:
    """Return the fastest configuration of each variant, the same on all ranks; a variant without one is left out."""
    device = take_device(torch.device(case.device).type, rank)
    tried = candidates(case, device)
    with open_case_heap(case, setup, rank, [(name, x) for name in tried for x in tried[name]], at_once=1) as heap:
        harness = Harness(case, heap)
        chosen: dict[str, Config] = {}
        for name in tried:
            times = _times(harness, name, tried[name], say)
            if name == PRODUCER_CONSUMER and times:
                first = min(times, key=lambda config: times[config])
                plan = plan_case(case, setup, device, PRODUCER_CONSUMER, first)
                num_sms = plan.num_ctas // first.ctas_per_sm + plan.num_comm_sms
                fit = [FusedConfig.of(first, count) for count in NUM_COMM_SMS if 2 * count <= num_sms]
                times |= _times(harness, name, fit, say)
            if times:
                chosen[name] = min(times, key=lambda config: times[config])
    if BULK not in chosen:
        raise RuntimeError(f"no configuration of the bulk variant runs at {case}")
    return chosen


def _times(harness: Harness, variant: str, tried: Iterable[Config], say: Say) -> dict[Config, float]:
    """Return the milliseconds of the configurations that run."""
    found = {config: _trial(harness, variant, config, say) for config in tried}
    return {config: ms for config, ms in found.items() if ms is not None}


def _trial(harness: Harness, variant: str, config: Config, say: Say) -> float | None:
    """Return the milliseconds of a configuration; None if it fails on any rank. A wrong result raises."""
    name = f"{variant} {config}"
    say(name)
    heap = harness.heap
    gemm = harness.make_gemm(variant, config=config)
    problem = ""
    try:
        results = harness.call(gemm, copy=False)
    except TransportError:
        raise
    except Exception as error:  # the compiler fails, or shared memory is too small: not a candidate here
        problem = f"{type(error).__name__}: {error}"
    problem = next(filter(None, harness.gather(problem)), "")
    ms = None
    if problem:
        say(f"{name} {FAILED} {problem}")
    else:
        harness.check(name, results)
        ms = harness.max_over_ranks(harness.time({name: partial(harness.call, gemm, copy=False)}, ROUNDS)[name])
    gemm.free()
    heap.barrier()
    return ms
