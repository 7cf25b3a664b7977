"""Measured rates of kernels, and their interpolation over lengths. Imports no torch: planners run without it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from meshflash.core.program import Direction

#: What is special in a call whose rate is measured apart; PLAIN is nothing.
Variant = Literal["", "gqa", "documents"]
PLAIN: Variant = ""
#: FLOPs of a backward relative to a forward: five matrix multiplies instead of two.
BACKWARD = 2.5
#: More tokens, and more TFLOP/s, than any table has.
MOST_TOKENS, MOST_TFLOPS = 1 << 40, 1e9


@dataclass(frozen=True)
class Rate:
    """The measured rate of one kernel in one pass.

    Args:
        kernel: The name of the kernel.
        direction: The pass, "forward" or "backward".
        causal: Whether the mask was causal; otherwise it was full.
        head_dim: The head dim of queries, keys and values.
        tokens: The number of queries, and of keys.
        tflops: The rate in TFLOP/s; masked pairs do not count as work.
        variant: What was special in the call: "" if nothing, "gqa" if four query heads shared a KV head, "documents" if
            the tokens were packed documents of `tokens` tokens each.
    """

    kernel: str
    direction: Direction
    causal: bool
    head_dim: int
    tokens: int
    tflops: float
    variant: Variant = PLAIN

    @staticmethod
    def from_json(row: dict[str, Any]) -> Rate:
        """Return the rate of a row of a table; ValueError or KeyError if it is malformed.

        Args:
            row: What `to_json` returned.
        """
        if row["pass"] not in get_args(Direction) or row["mask"] not in ("causal", "full"):
            given = f"pass={row['pass']!r}, mask={row['mask']!r}"
            raise ValueError(f"{given}: expected forward or backward, and causal or full")
        rate = Rate(
            kernel=row["kernel"],
            direction=row["pass"],
            causal=row["mask"] == "causal",
            head_dim=row["head_dim"],
            tokens=row["tokens"],
            tflops=row["tflops"],
            variant=row.get("variant", PLAIN),
        )
        if rate.variant not in get_args(Variant):
            raise ValueError(f"unknown variant {rate.variant!r}")
        if not all(type(size) is int and 0 < size <= MOST_TOKENS for size in (rate.head_dim, rate.tokens)):
            raise ValueError("head dims and tokens must be whole numbers > 0")
        if type(rate.tflops) not in (int, float) or not 0 < rate.tflops < MOST_TFLOPS:
            raise ValueError("rates must be numbers > 0")
        return rate

    def to_json(self) -> dict[str, Any]:
        """Return the row of a table."""
        row = {
            "kernel": self.kernel,
            "pass": self.direction,
            "mask": "causal" if self.causal else "full",
            "head_dim": self.head_dim,
            "tokens": self.tokens,
            "tflops": float(f"{self.tflops:.4g}"),
        }
        return row | ({"variant": self.variant} if self.variant else {})


class RateCurves:
    """The rates of kernels over lengths. Between measured lengths they are interpolated."""

    def __init__(self, rates: Iterable[Rate]) -> None:
        """Sort the rates.

        Args:
            rates: The measured rates.
        """
        #: (tokens, TFLOP/s) in the order of tokens: by (kernel, pass, causal, variant), then by head dim.
        self._curves: dict[tuple[str, str, bool, str], dict[int, list[tuple[int, float]]]] = {}
        for rate in sorted(rates, key=lambda rate: rate.tokens):
            by_dim = self._curves.setdefault((rate.kernel, rate.direction, rate.causal, rate.variant), {})
            by_dim.setdefault(rate.head_dim, []).append((rate.tokens, rate.tflops))

    def tflops(
        self, kernel: str, direction: Direction, causal: bool, dim: int, keys: int, variant: Variant = PLAIN
    ) -> float | None:
        """Interpolate between the nearest lengths, at the next wider head dim that was measured; None without any.

        Args:
            kernel: The name of the kernel.
            direction: The pass.
            causal: Whether the mask is causal; otherwise it is full.
            dim: The head dim.
            keys: The number of keys.
            variant: What is special in the call.
        """
        curves = self._curves.get((kernel, direction, causal, variant))
        if not curves:
            return None
        curve = curves[min((d for d in curves if d >= dim), default=max(curves))]
        tokens = [t for t, _ in curve]
        at = bisect_left(tokens, keys)
        if at == 0:
            return curve[0][1] * min(1.0, keys / tokens[0])
        if at == len(curve):
            return curve[-1][1]
        (low, slow), (high, fast) = curve[at - 1 : at + 1]
        return slow + (fast - slow) * math.log(keys / low) / math.log(high / low)

    def head_dims(self, kernel: str, direction: Direction, causal: bool) -> list[int]:
        """Return the head dims at which plain calls of a kernel were measured.

        Args:
            kernel: The name of the kernel.
            direction: The pass.
            causal: Whether the mask is causal; otherwise it is full.
        """
        return sorted(self._curves.get((kernel, direction, causal, PLAIN), {}))

    def factor(self, variant: Variant, kernel: str, direction: Direction, dim: int, keys: int) -> float:
        """Return the speed of a variant over that of plain calls, from causal rates; 1 where it was not measured.

        Args:
            variant: What is special in the call.
            kernel: The name of the kernel.
            direction: The pass.
            dim: The head dim.
            keys: The number of keys.
        """
        curves = self._curves.get((kernel, direction, True, variant))
        if not curves:
            return 1.0
        dim = min((d for d in curves if d >= dim), default=max(curves))
        if dim not in self._curves.get((kernel, direction, True, PLAIN), {}):
            return 1.0
        tokens = [t for t, _ in curves[dim]]
        keys = min(max(keys, tokens[0]), tokens[-1])
        special, plain = (self.tflops(kernel, direction, True, dim, keys, name) for name in (variant, PLAIN))
        return special / plain if special and plain else 1.0
