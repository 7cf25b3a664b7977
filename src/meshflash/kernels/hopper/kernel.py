"""The Hopper kernel behind the contract: warp-specialized Gluon kernels for sm_90, with a portable remainder.

Gluon serves the tiles of a worklist that loop over full blocks only. The remaining tiles of the same call,
such as those of short documents, go to the portable Triton kernel, which writes to the same outputs and sums.
"""

from __future__ import annotations

from meshflash.kernels.contract import Grads, Inputs, KernelRequest, Outputs, Rows
from meshflash.kernels.hopper import launch as hopper_launch
from meshflash.kernels.launches import Launcher
from meshflash.kernels.triton.block_tables import TileTable, make_run_tables, make_tile_table
from meshflash.kernels.triton.kernel import Triton, dq_sums
from meshflash.kernels.triton.launch import config_of, launch_bwd_dkdv, launch_bwd_dq, launch_forward

#: A configuration of a Gluon kernel, which says how many rows its tiles and blocks have.
Sizes = hopper_launch.ForwardConfig | hopper_launch.BackwardConfig | hopper_launch.BackwardDqConfig


class Hopper(Triton):
    """The Hopper kernel, with the portable one for the tiles that Gluon does not serve.

    The registry makes one, and `serving` another for deterministic calls.
    """

    name = "hopper"
    reads_delta = False
    summary = "Gluon on sm_90: half precision, head dims 64 and 128, every mask; no ALiBi, no dropout"

    def release(self) -> None:
        hopper_launch._counters.clear()

    def unsupported_reason(self, request: KernelRequest) -> str | None:
        return hopper_launch.unsupported_reason(request)

    def off_reason(self, request: KernelRequest) -> tuple[str, bool] | None:
        off = hopper_launch.off_reason(request)
        return (str(off), off.fixable) if off else None

    def _launch_forward(self, launcher: Launcher, x: Inputs, outputs: Outputs, carry: Outputs | None) -> None:
        config = hopper_launch.forward_config(x)
        served, rest = _split_tiles(x, "forward", config)
        if config and served:
            hopper_launch.forward(launcher, x, outputs, carry, config, served)
        launch_forward(launcher, x, outputs, carry, rest)

    def _launch_backward(self, launcher: Launcher, x: Inputs, rows: Rows, grads: Grads) -> None:
        q = x.q_BTHD
        config = hopper_launch.backward_config(x, rows, grads, self.deterministic)
        atomic = not self.deterministic
        dq = grads.dq_BTHD
        served, rest = _split_tiles(x, "bwd_dkdv", config)
        if rows.delta is None and (served is None or len(rest) or self.deterministic or rows.out_BTHE.stride(-1) != 1):
            delta = launcher.empty(*rows.lse_BHT.shape, like=rows.lse_BHT, dtype=rows.lse_BHT.dtype)
            rows = rows._replace(delta=delta)
            from meshflash.kernels.triton.rowwise import launch_delta

            launch_delta(launcher, rows.out_BTHE, rows.dout_BTHE, rows.lse_BHT, delta)
        sums = None
        if config and served:
            if atomic:
                tiled = served.on_grid and not len(rest) and not grads.add_dq
                sums = hopper_launch.DqSums(launcher, q, grads, tiled, config.block_m, zeroed=rows.delta is not None)
                dq = sums.rows
            hopper_launch.backward(launcher, x, rows, grads, sums, config, served)
        elif atomic:
            dq = dq_sums(launcher, q, grads)
        launch_bwd_dkdv(launcher, x, rows, grads, dq, atomic, rest)
        if sums:
            sums.finalize(x.features.scale)
        elif atomic:
            if dq is not grads.dq_BTHD:
                launcher.copy(grads.dq_BTHD, dq)
        else:
            second = hopper_launch.BACKWARD_DQ[q.shape[-1]] if config else None
            served, rest = _split_tiles(x, "bwd_dq", second)
            if second and served:
                hopper_launch.backward_dq(launcher, x, rows, grads, second, served)
            launch_bwd_dq(launcher, x, rows, grads, rest)


def _split_tiles(x: Inputs, direction: str, gluon: Sizes | None) -> tuple[TileTable | None, TileTable]:
    """The tiles that a Gluon kernel of these sizes serves, None where it serves none, and the remaining ones.

    Without sizes all tiles remain: the portable kernel serves them.
    """
    batch, device = x.q_BTHD.shape[0], x.q_BTHD.device
    by_key = direction == "bwd_dkdv"
    portable = config_of(direction, x)
    size = portable.block_n if by_key else portable.block_m
    if gluon is None:
        return None, make_tile_table(x.work, by_key, size, batch, device)
    sizes = (gluon.block_n, gluon.block_m) if by_key else (gluon.block_m, gluon.block_n)
    served, rest = make_run_tables(x.work, by_key, *sizes, size, batch, device, filled=by_key, grid=by_key)
    return served if len(served) else None, rest
