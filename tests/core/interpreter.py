"""A numeric interpreter: it runs the programs of all ranks together, in float64, under the harshest legal timing.

It shares no code with the verifier. A program is correct if its results equal dense attention, with ALiBi slopes and
sink logits that differ by head. Unwritten memory is NaN, and so are an LSE and a delta that did not travel with their
rows. If the caller wants the LSE, it also has a gradient. Messages leave and arrive either at once or as late as
possible. Scratch shares the memory of the output that it becomes, or has its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from meshflash.core.mask import Mask
from meshflash.core.problem import Problem
from meshflash.core.program import (
    KINDS,
    Add,
    Attend,
    AttendGrad,
    Buffer,
    Clear,
    Copy,
    Delta,
    Finish,
    Part,
    Post,
    Program,
    Ranges,
    Slice,
    Wait,
    fields_of,
)

Floats = npt.NDArray[np.float64]
#: The fields of some rows: [batch, rows, heads, width], or without a width [batch, rows, heads].
Fields = dict[str, Floats]
WIDTHS = {"dim": (2,), "value_dim": (3,), "": ()}


class BrokenError(Exception):
    """The program cannot be run, or its result is wrong."""


@lru_cache(maxsize=4096)
def visible(mask: Mask, q: Ranges, k: Ranges) -> npt.NDArray[np.bool_]:
    """Return the visible pairs as [batch, q rows, 1, k rows]."""
    i, j = positions(q), positions(k)
    rows = [mask.visible(i[:, None], j[None, :], batch) for batch in range(mask.batch_rows or 1)]
    return np.stack([np.broadcast_to(row, (len(i), len(j))) for row in rows])[:, :, None, :]


def positions(ranges: Ranges) -> npt.NDArray[np.int64]:
    return np.array([p for r in ranges for p in r], dtype=np.int64)


class DenseProblem:
    """Random inputs of the whole sequence, and the results and gradients of dense attention."""

    def __init__(self, problem: Problem, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.problem = problem
        self.batch = problem.mask.batch_rows or 1
        self.slopes = np.linspace(0.01, 0.05, problem.heads)
        self.sinks = np.linspace(-1.0, 0.5, problem.heads)

        def new(n: int, heads: int, width: str) -> Floats:
            return rng.standard_normal((self.batch, n, heads, *WIDTHS[width]))

        q, dout = (new(sum(problem.q_lengths), problem.heads, width) for width in ("dim", "value_dim"))
        k, v = (new(sum(problem.k_lengths), problem.kv_heads, width) for width in ("dim", "value_dim"))
        q_at, k_at = (tuple(r for held in side for r in held) for side in (problem.q, problem.k))
        heads = (0, problem.heads)
        with np.errstate(all="ignore"):
            out, lse = self.finish(self.attend(q, k, v, q_at, k_at, heads), heads)
            dlse = rng.standard_normal(lse.shape) if problem.lse else 0.0
            given = {"dout": dout, "delta": (dout * out).sum(axis=-1) - dlse}
            rows = {"out": out, "lse": lse, **given}
            dq, dk, dv = self.attend_grad(q, k, v, rows, q_at, k_at, heads)
        #: the rows of all ranks, one rank after another
        self.whole: dict[str, Fields] = {
            "q": {"q": q},
            "kv": {"k": k, "v": v},
            "out": {"out": out, "lse": lse},
            "dout": given,
            "dq": {"dq": dq},
            "dkv": {"dk": dk, "dv": dv},
        }

    def of(self, kind: str, rank: int) -> Fields:
        """Return the rows of one rank of a kind."""
        lengths = self.problem.k_lengths if kind in ("kv", "dkv") else self.problem.q_lengths
        begin = sum(lengths[:rank])
        return {name: x[:, begin : begin + lengths[rank]] for name, x in self.whole[kind].items()}

    def scores(self, q: Floats, k: Floats, q_at: Ranges, k_at: Ranges, heads: tuple[int, int]) -> Floats:
        shown, distance = visible(self.problem.mask, q_at, k_at), positions(k_at) - positions(q_at)[:, None]
        bias = self.slopes[slice(*heads)][None, :, None] * distance[:, None, :]
        return np.where(shown, np.einsum("bnhd,bmhd->bnhm", q, _repeat(k, q)) + bias, -np.inf)

    def attend(
        self, q: Floats, k: Floats, v: Floats, q_at: Ranges, k_at: Ranges, heads: tuple[int, int]
    ) -> tuple[Floats, Floats]:
        scores = self.scores(q, k, q_at, k_at, heads)
        row_max = scores.max(axis=-1, initial=-np.inf)
        weights = np.exp(scores - np.where(row_max == -np.inf, 0, row_max)[..., None])
        row_sum = weights.sum(axis=-1)
        out = np.einsum("bnhm,bmhe->bnhe", weights, _repeat(v, q)) / np.where(row_sum == 0, 1, row_sum)[..., None]
        return out, np.log(row_sum) + row_max

    def finish(self, partial: tuple[Floats, Floats], heads: tuple[int, int]) -> tuple[Floats, Floats]:
        """Add sink logits: a weight in the denominator without a value."""
        out, lse = partial
        sinks = self.sinks[slice(*heads)]
        return merge((out, lse), (np.zeros_like(out), np.broadcast_to(sinks, lse.shape)))

    def attend_grad(
        self, q: Floats, k: Floats, v: Floats, rows: Fields, q_at: Ranges, k_at: Ranges, heads: tuple[int, int]
    ) -> tuple[Floats, Floats, Floats]:
        weights = np.exp(self.scores(q, k, q_at, k_at, heads) - rows["lse"][..., None])
        dscores = weights * (np.einsum("bnhe,bmhe->bnhm", rows["dout"], _repeat(v, q)) - rows["delta"][..., None])
        dq = np.einsum("bnhm,bmhd->bnhd", dscores, _repeat(k, q))
        dk = np.einsum("bnhm,bnhd->bmhd", dscores, q)
        dv = np.einsum("bnhm,bnhe->bmhe", weights, rows["dout"])
        return dq, _sum_gqa_groups(dk, k), _sum_gqa_groups(dv, v)


def merge(a: tuple[Floats, Floats], b: tuple[Floats, Floats]) -> tuple[Floats, Floats]:
    """Merge two partial (out, lse)."""
    lse = np.logaddexp(a[1], b[1])
    base = np.where(lse == -np.inf, 0, lse)
    return sum(out * np.exp(x - base)[..., None] for out, x in (a, b)), lse  # type: ignore[return-value]


def _repeat(x: Floats, q: Floats) -> Floats:
    """Repeat each KV head for all of its query heads."""
    if not x.shape[2] or q.shape[2] % x.shape[2]:
        raise BrokenError("key heads do not divide query heads")
    return np.repeat(x, q.shape[2] // x.shape[2], axis=2)


def _sum_gqa_groups(x: Floats, like: Floats) -> Floats:
    """Sum gradients over the query heads of each KV head."""
    group = x.shape[2] // like.shape[2]
    return x.reshape(*x.shape[:2], like.shape[2], group, x.shape[3]).sum(axis=3)


@dataclass(eq=False)
class PostInFlight:
    """A post in flight: its parts, each with a sequence number between two ranks, and the messages that have left."""

    step: Post
    rank: int
    sends: list[tuple[Any, Part]]
    recvs: list[tuple[Any, Part]]
    left: dict[Any, Fields] = field(default_factory=dict)
    complete: bool = False
    waited: bool = False


class Run:
    """One run of all ranks.

    `late` delays messages as long as possible. `shared` lets scratch share the memory of the output that it becomes.
    `after` is the forward's run, from which a backward reads saved buffers.
    """

    def __init__(
        self, programs: Sequence[Program], dense: DenseProblem, late: bool, shared: bool, after: Run | None = None
    ) -> None:
        self.programs, self.dense, self.late = programs, dense, late
        self.at = [0] * len(programs)
        self.memory: list[dict[str, Fields]] = []
        for program in programs:
            held: dict[str, Fields] = {}
            for b in program.buffers:
                if b.role == "input":
                    held[b.name] = {name: x.copy() for name, x in dense.of(b.kind, program.rank).items()}
                    if (
                        b.name == "dout" and "dout" in program.without_lse
                    ):  # the engine does not compute a delta that no step reads
                        held[b.name]["delta"][:] = np.nan
                elif b.role == "saved" and program.direction == "backward":
                    held[b.name] = self._saved(after, program.rank, b)
                else:
                    shape = (dense.batch, b.rows, b.heads)
                    held[b.name] = {f.name: np.full((*shape, *WIDTHS[f.width]), np.nan) for f in KINDS[b.kind]}
            for b in program.buffers:
                if b.becomes and shared:
                    held[b.name] = held[b.becomes]
            self.memory.append(held)
        self.posts: list[dict[str, PostInFlight]] = [{} for _ in programs]
        self.queues: dict[tuple[str, int], list[PostInFlight]] = defaultdict(list)
        self.channels: dict[Any, int] = defaultdict(int)
        self.ends: dict[Any, PostInFlight] = {}

    def check(self) -> None:
        """Run to the end; raise BrokenError unless all results are right."""
        for _ in self._run_steps():
            pass
        for rank, program in enumerate(self.programs):
            for name, post in self.posts[rank].items():
                if not post.waited:
                    raise BrokenError(f"post {name} is never waited for")
            for b in program.buffers:
                if b.role in ("scratch", "saved"):
                    continue
                without_lse = b.name in program.without_lse and not self.dense.problem.lse
                for name, want in list(self.dense.of(b.kind, rank).items())[: 1 if without_lse else 2]:
                    got = self.memory[rank][b.name][name]
                    if got.shape != want.shape or not np.allclose(got, want, rtol=1e-9, atol=1e-9):
                        raise BrokenError(f"{b.role} {name} of rank {rank} is wrong")
            own = {b.name for b in program.buffers if b.role == "saved"}
            needed = {"out", *own}
            if program.direction == "forward" and not needed <= set(program.saves):
                raise BrokenError("the forward does not save all buffers that the backward reads")

    @staticmethod
    def _saved(after: Run | None, rank: int, b: Buffer) -> Fields:
        """Return the buffer that the forward saved under this name."""
        if after is None or b.name not in after.programs[rank].saves:
            raise BrokenError(f"no forward saved {b.name}")
        found = after.memory[rank][b.name]
        shapes = {x.shape[1:3] for x in found.values()}
        if [f.name for f in KINDS[b.kind]] != list(found) or shapes != {(b.rows, b.heads)}:
            raise BrokenError(f"the forward saved another {b.name}")
        return {name: x.copy() for name, x in found.items()}

    def _run_steps(self) -> Iterator[None]:
        """Run steps until all ranks have finished.

        If late, every rank runs to its next wait, then one of the waits ends. If early, a rank that has posted lets
        all others post first.
        """
        while any(self._step(rank) is not None for rank in range(len(self.programs))):
            moved = False
            for rank in range(len(self.programs)):
                while (step := self._step(rank)) is not None:
                    if isinstance(step, Wait) and (self.late or not self._post_of(rank, step).complete):
                        break
                    self._run_step(rank)
                    moved = True
                    if isinstance(step, Post) and not self.late:
                        break
            ready = [rank for rank in range(len(self.programs)) if self._can_wait(rank)]
            if not moved and ready:
                self._run_step(min(ready, key=self._unread))
            elif not moved:
                raise BrokenError("deadlock")
            yield

    def _step(self, rank: int) -> Any:
        steps = self.programs[rank].steps
        return steps[self.at[rank]] if self.at[rank] < len(steps) else None

    def _post_of(self, rank: int, step: Wait) -> PostInFlight:
        post = self.posts[rank].get(step.post)
        if post is None or post.waited:
            raise BrokenError(f"nothing to wait for: {step}")
        return post

    def _can_wait(self, rank: int) -> bool:
        step = self._step(rank)
        return isinstance(step, Wait) and self._post_of(rank, step).complete

    def _unread(self, rank: int) -> int:
        """Return the number of messages that this wait would read from memory whose owner has not waited yet."""
        post = self._post_of(rank, self._step(rank))
        return sum(key not in self.ends["send", key].left for key, _ in post.recvs)

    def _run_step(self, rank: int) -> None:
        step = self._step(rank)
        match step:
            case Attend():
                self._attend(rank, step)
            case AttendGrad():
                self._attend_grad(rank, step)
            case Post():
                self._post(rank, step)
            case Wait():
                self._wait(rank, step)
            case Copy():
                self._put(rank, step.dst, self._kind(rank, step.src), self._get(rank, step.src))
            case Add():
                src, dst = self._get(rank, step.src), self._get(rank, step.dst)
                if [(name, x.shape) for name, x in src.items()] != [(name, x.shape) for name, x in dst.items()]:
                    raise BrokenError("not the same kind or shape")
                total = {name: dst[name] + src[name] for name in dst}
                if list(dst) == ["out", "lse"]:
                    total["out"], total["lse"] = merge((dst["out"], dst["lse"]), (src["out"], src["lse"]))
                self._put(rank, step.dst, self._kind(rank, step.src), total)
            case Clear():
                for name, x in self._get(rank, step.dst).items():
                    x[:] = -np.inf if name == "lse" else 0
            case Finish():
                src = self._get(rank, step.src)
                if "lse" not in src or len(self.dense.sinks[slice(*step.heads)]) != src["lse"].shape[2]:
                    raise BrokenError("sink logits for other heads")
                src["out"][:], src["lse"][:] = self.dense.finish((src["out"], src["lse"]), step.heads)
                self._put(rank, step.dst, "out", src)
            case Delta():
                out, dout = self._get(rank, step.out), self._get(rank, step.dout)
                if [*out, *dout] != ["out", "lse", "dout", "delta"] or out["out"].shape != dout["dout"].shape:
                    raise BrokenError("no results, or of another shape")
                dout["delta"][:] = (out["out"] * dout["dout"]).sum(axis=-1)
        self.at[rank] += 1

    def _kind(self, rank: int, place: Slice) -> str:
        return self.programs[rank].buffer[place.buffer].kind

    def _get(self, rank: int, place: Slice) -> Fields:
        """Return views of some cells."""
        buffer = self.programs[rank].buffer.get(place.buffer)
        if buffer is None:
            raise BrokenError(f"no buffer {place.buffer}")
        for (begin, end), size in ((place.rows, buffer.rows), (place.heads, buffer.heads)):
            if not 0 <= begin <= end <= size:
                raise BrokenError(f"{place} lies outside")
        held = self.memory[rank][place.buffer]
        fields = fields_of(buffer.kind, place.without_lse)
        return {field.name: held[field.name][:, slice(*place.rows), slice(*place.heads)] for field in fields}

    def _put(self, rank: int, place: Slice, kind: str, new: Fields) -> None:
        old = self._get(rank, replace(place, without_lse=False))
        if self._kind(rank, place) != kind or any(old[name].shape != x.shape for name, x in new.items()):
            raise BrokenError(f"{place} is of another kind or shape")
        for name, x in old.items():
            x[:] = new.get(name, np.nan)

    def _operands(self, rank: int, step: Attend | AttendGrad) -> tuple[Floats, Floats, Floats]:
        q, kv = self._get(rank, step.q), self._get(rank, step.kv)
        if "q" not in q or "k" not in kv:
            raise BrokenError("no queries, or no keys")
        sizes = sum(map(len, step.q_positions)), sum(map(len, step.k_positions))
        heads = len(self.dense.slopes[slice(*step.heads)])
        if (*sizes, heads) != (q["q"].shape[1], kv["k"].shape[1], q["q"].shape[2]) or step.heads[0] < 0:
            raise BrokenError("rows and positions differ")
        return q["q"], kv["k"], kv["v"]

    def _attend(self, rank: int, step: Attend) -> None:
        q, k, v = self._operands(rank, step)
        result = self.dense.attend(q, k, v, step.q_positions, step.k_positions, step.heads)
        if step.carry:
            old = self._get(rank, step.out)
            if "lse" not in old or old["lse"].shape != result[1].shape:
                raise BrokenError("carries on from another shape")
            result = merge((old["out"], old["lse"]), result)
        if step.final:
            result = self.dense.finish(result, step.heads)
        self._put(rank, step.out, "out", {"out": result[0], "lse": result[1]})

    def _attend_grad(self, rank: int, step: AttendGrad) -> None:
        q, k, v = self._operands(rank, step)
        rows = self._get(rank, step.out) | self._get(rank, step.dout)
        if any(name not in rows or rows[name].shape != q.shape[:3] for name in ("lse", "delta")):
            raise BrokenError("other rows")
        dq, dk, dv = self.dense.attend_grad(q, k, v, rows, step.q_positions, step.k_positions, step.heads)
        results: list[tuple[Slice, str, Fields, bool]] = [
            (step.dq, "dq", {"dq": dq}, step.add_dq),
            (step.dkv, "dkv", {"dk": dk, "dv": dv}, step.add_dkv),
        ]
        for place, kind, new, add in results:
            old = self._get(rank, place)
            if add and any(name not in old or old[name].shape != x.shape for name, x in new.items()):
                raise BrokenError("adds to another shape")
            self._put(rank, place, kind, {name: x + old[name] if add else x for name, x in new.items()})

    def _post(self, rank: int, step: Post) -> None:
        members = self.programs[rank].group.get(step.group)
        if step.name in self.posts[rank] or members is None:
            raise BrokenError("a name twice, or an unknown group")
        sent = PostInFlight(step, rank, [], [])
        for side, parts in (("send", step.sends), ("recv", step.recvs)):
            for part in parts:
                if part.peer not in members:
                    raise BrokenError(f"rank {part.peer} is not in {step.group}")
                pair = (rank, part.peer) if side == "send" else (part.peer, rank)
                channel = (step.group, step.collective, *pair)
                key = (*channel, self.channels[side, channel])
                self.channels[side, channel] += 1
                self.ends[side, key] = sent
                (sent.sends if side == "send" else sent.recvs).append((key, part))
                self._get(rank, part.slice)
        if step.collective and any([p.peer for p in parts] != list(members) for parts in (step.sends, step.recvs)):
            raise BrokenError("a collective without some rank")
        self.posts[rank][step.name] = sent
        self.queues[step.group, rank].append(sent)
        if not self.late:
            self._leave(sent)
        self._complete()

    def _complete(self) -> None:
        """Complete posts at the head of their queue whose peers' posts are complete or at the head of theirs."""
        changed = True
        while changed:
            changed = False
            for queue in self.queues.values():
                if queue and self._peers_are_ready(queue[0]):
                    post = queue.pop(0)
                    post.complete = changed = True
                    if not self.late:
                        self._arrive(post)

    def _peers_are_ready(self, post: PostInFlight) -> bool:
        others = [self.ends.get(("recv", key)) for key, _ in post.sends]
        others += [self.ends.get(("send", key)) for key, _ in post.recvs]
        return all(o is not None and (o.complete or self.queues[o.step.group, o.rank][0] is o) for o in others)

    def _leave(self, post: PostInFlight) -> None:
        for key, part in post.sends:
            if key not in post.left:
                post.left[key] = {name: x.copy() for name, x in self._get(post.rank, part.slice).items()}

    def _arrive(self, post: PostInFlight) -> None:
        for key, part in post.recvs:
            other = self.ends["send", key]
            (sent,) = (p for k, p in other.sends if k == key)
            buffers = [self.programs[r].buffer[p.slice.buffer] for r, p in ((other.rank, sent), (post.rank, part))]
            if (buffers[0].kind, buffers[0].dtype) != (buffers[1].kind, buffers[1].dtype):
                raise BrokenError("a message of another kind or dtype")
            if key not in other.left:
                other.left[key] = {name: x.copy() for name, x in self._get(other.rank, sent.slice).items()}
            self._put(post.rank, part.slice, buffers[0].kind, other.left[key])

    def _wait(self, rank: int, step: Wait) -> None:
        post = self._post_of(rank, step)
        post.waited = True
        if self.late:
            self._leave(post)
            self._arrive(post)


def run_forward(programs: Sequence[Program], dense: DenseProblem) -> Run:
    """Run a correct forward and return the run, which holds its saved buffers."""
    run = Run(programs, dense, late=False, shared=False)
    with np.errstate(all="ignore"):
        run.check()
    return run


def find_error(programs: Sequence[Program], dense: DenseProblem, after: Run | None = None) -> str:
    """Run the programs with every timing and memory sharing; return the first error, or ""."""
    with np.errstate(all="ignore"):
        for late, shared in product((True, False), repeat=2):
            try:
                Run(programs, dense, late, shared, after).check()
            except BrokenError as error:
                return f"{'late' if late else 'early'}, {'shared' if shared else 'separate'} memory: {error}"
    return ""
