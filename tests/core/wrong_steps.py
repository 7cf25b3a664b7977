"""Programs that compute or send the wrong rows, or end in a wrong state.

Each row is a `Wrong`. Wrong buffers and slices are in `wrong_buffers.py`.
"""

from __future__ import annotations

from core.edits import (
    EXTRA_OUT,
    GATHER_B,
    GATHER_F,
    OTHER,
    OWN,
    RING_B,
    RING_F,
    STRIDE_F,
    Wrong,
    both,
    buffer,
    change,
    extra_buffers,
    insert,
    k,
    put,
    s,
)
from meshflash.core.program import Add, Attend, AttendGrad, Buffer, Clear, Copy, Finish, Part, Post, Wait

BOTH = (0, 1)
WRONG: list[Wrong] = [
    Wrong(*row)
    for row in (
        # copies and sums
        ("copied to another kind", RING_B, put(4, Copy(k("dkv.part"), k("kv+1.1"))), "differ in kind or shape"),
        ("copied to another shape", RING_B, put(4, Copy(k("dkv.part", (0, 2)), k("dkv.1"))), "differ in kind or shape"),
        ("keys added", RING_B, insert(3, Add(k("kv"), k("kv+1.1"))), "only gradients and partial results are added"),
        (
            "a finished result added",
            RING_F,
            both(extra_buffers(EXTRA_OUT), insert(6, Copy(s("out"), s("more")), Add(s("out"), s("more")))),
            "only gradients and partial results are added",
        ),
        (
            "sums in the input's dtype",
            RING_B,
            both(extra_buffers(Buffer("x", "dkv", 3, 2)), insert(4, Clear(k("x")), Add(k("dkv.part"), k("x")))),
            "only gradients and partial results are added, in the partial or the reduce dtype",
        ),
        (
            "other rows added",
            RING_B,
            insert(4, Add(k("dkv.part"), k("dkv.sum"))),
            "adds rows of other positions or heads",
        ),
        ("finished twice", RING_F, insert(5, Finish(s("out.sum"), s("out"), (0, 4))), "is written after it became out"),
        (
            "finished from the output's dtype",
            RING_F,
            buffer("out.sum", dtype="input"),
            "any other in the dtype of partial results",
        ),
        (
            "finished to a partial result",
            RING_F,
            both(extra_buffers(EXTRA_OUT), put(4, Finish(s("out.sum"), s("more"), (0, 4)))),
            "finish must turn a partial result into one in the input's dtype",
        ),
        (
            "gradients finished",
            RING_B,
            put(8, Finish(s("dq.sum"), s("dq"), (0, 4))),
            "finish must turn a partial result",
        ),
        ("finished under other heads", RING_F, change(4, heads=(1, 5)), "its rows hold other heads than it names"),
        ("finished under fewer heads", RING_F, change(4, heads=(0, 2)), "its rows hold other heads than it names"),
        # attention
        ("a final result in a partial buffer", RING_F, change(1, final=True), "a final result is in the input's dtype"),
        (
            "a partial result in the output",
            GATHER_F,
            change(2, final=False),
            "any other in the dtype of partial results",
        ),
        (
            "a result among gradients",
            RING_B,
            put(3, Attend(s("q"), k("kv"), s("dq.sum"), OWN, OWN, (0, 4))),
            "final result is",
        ),
        (
            "final and carried",
            RING_F,
            put(4, Attend(s("q"), k("kv"), s("out"), OWN, OWN, (0, 4), True, True)),
            "is an output and cannot be added to",
        ),
        (
            "final and carried in scratch",
            RING_F,
            both(
                extra_buffers(Buffer("x", "out", 3, 4)),
                insert(1, Clear(s("x")), Attend(s("q"), k("kv"), s("x"), OWN, OWN, (0, 4), True, True)),
            ),
            "a final result cannot carry on from a partial one",
        ),
        (
            "carried on from a finished result",
            RING_F,
            both(
                extra_buffers(EXTRA_OUT, Buffer("x", "out", 3, 4)),
                insert(1, Attend(s("q"), k("kv"), s("x"), OWN, OWN, (0, 4), final=True), Copy(s("x"), s("more"))),
                insert(3, Attend(s("q"), k("kv"), s("more"), OWN, OWN, (0, 4), carry=True)),
            ),
            "which is finished",
        ),
        (
            "rows of other queries",
            RING_B,
            change(1, dout=s("dout", (0, 2))),
            "q, out and dout are not the same",
        ),
        (
            "q in place of out",
            RING_B,
            change(1, out=s("q")),
            "q, out and dout are not the same rows",
        ),
        ("gradients among others", RING_B, change(1, dq=k("dkv.part")), "cannot take these gradients"),
        (
            "a sum in the dtype of reductions",
            RING_B,
            both(put(4), change(3, dkv=k("dkv.1"), add_dkv=True)),
            "cannot take",
        ),
        ("keys for queries", RING_F, change(1, q=k("kv")), r"expected q in the input's dtype, got kv \(kv, input\)"),
        (
            "keys of another dtype",
            RING_F,
            both(
                extra_buffers(Buffer("x", "kv", 3, 2, "reduce")), insert(1, Copy(k("kv"), k("x"))), change(2, kv=k("x"))
            ),
            r"expected kv in the input's dtype, got x \(kv, reduce\)",
        ),
        (
            "fewer positions than rows",
            RING_F,
            change(1, k_positions=(range(2),)),
            "names another number of positions or heads than its slices have",
        ),
        (
            "fewer heads than it has",
            RING_F,
            change(1, heads=(0, 2)),
            "names another number of positions or heads than its slices have",
        ),
        (
            "a key twice",
            GATHER_F,
            both(
                insert(2, Copy(k("kv2.0", (0, 1)), k("kv2.0", (1, 2)))),
                change(3, k_positions=(range(1), range(1), range(2, 6))),
            ),
            "names a position twice",
        ),
        ("queries elsewhere", RING_F, change(1, q_positions=OTHER), "its queries are not at the positions and heads"),
        (
            "other heads",
            RING_F,
            change(1, heads=(1, 5)),
            "its queries are not at the positions and heads that it names",
        ),
        (
            "three query heads over two KV heads",
            RING_F,
            change(1, q=s("q", heads=(0, 3)), heads=(0, 3)),
            "key heads do not divide its query",
        ),
        ("no key heads", RING_F, change(1, kv=k("kv", (0, 3), (0, 0))), "its key heads do not divide its query heads"),
        (
            "one KV head for two GQA groups",
            RING_F,
            change(1, kv=k("kv", (0, 3), (0, 1))),
            "are in different GQA groups",
        ),
        (
            "other key heads",
            STRIDE_F,
            change(3, kv=k("kv1.1", (0, 6), (0, 1))),
            "is touched while post kv 1 still receives",
        ),
        (
            "key heads of other queries",
            STRIDE_F,
            both(change(3, q=s("q", heads=(2, 4)), out=s("out", heads=(2, 4)), heads=(2, 4))),
            "its keys are not at the positions that it names, or their heads do not serve its queries",
        ),
        (
            "key heads without rows",
            RING_F,
            change(1, kv=k("kv", (0, 0), (0, 1)), k_positions=()),
            "the query heads of one key head are in different GQA groups",
        ),
        ("keys elsewhere", RING_F, change(1, k_positions=OTHER), "its keys are not at the positions that it names"),
        (
            "keys in another order",
            RING_F,
            change(1, k_positions=(range(1, 3), range(1))),
            "keys are not at the positions",
        ),
        (
            "a result of another shape",
            RING_F,
            change(1, out=s("out.sum", (0, 2))),
            "does not have the shape of its source",
        ),
        (
            "carried on from other rows",
            RING_F,
            change(3, q=s("q", (0, 2)), q_positions=(range(2),), out=s("out.sum", (1, 3))),
            "adds to out.sum.*, which holds other rows",
        ),
        # posts
        ("a name twice", RING_B, change(5, name="kv+1 1"), r"two posts have the name kv\+1 1"),
        ("an unknown group", RING_F, change(0, group="row"), "there is no group row"),
        ("a rank of no group", RING_F, change(0, sends=(Part(2, k("kv")),)), "rank 2 is not in group mesh"),
        ("an empty post", RING_F, change(0, sends=(), recvs=()), "has no parts, or empty parts"),
        (
            "an empty part",
            RING_F,
            change(0, sends=(Part(1, k("kv", (1, 1))),)),
            "has no parts, or empty parts",
        ),
        (
            "waiting for nothing",
            RING_F,
            insert(0, Wait("x")),
            "waits for a post that was not made, or that it has waited for already",
        ),
        (
            "waiting twice",
            RING_F,
            insert(3, Wait("kv+1 1")),
            "waits for a post that was not made, or that it has waited for already",
        ),
        (
            "other rows than are sent",
            RING_F,
            change(0, recvs=(Part(1, k("kv+1.1", (0, 2))),)),
            "shape, kind or dtype differ",
        ),
        ("another dtype than is sent", RING_F, buffer("kv+1.1", dtype="reduce"), "shape, kind or dtype differ"),
        (
            "many parts that overlap",
            RING_F,
            change(0, recvs=tuple(Part(1, k("kv+1.1", (0, 1))) for _ in range(16))),
            r"kv\+1.1\[0:1, 0:2\] is written and also used by the same step",
        ),
        ("nothing to send", RING_F, change(0, sends=()), "deadlock: rank 1 at step 2"),
        (
            "a message to its own rank that a peer expects",
            RING_F,
            change(0, sends=(Part(0, k("kv")),)),
            "deadlock: rank 0 at step 2.*rank 1 at",
        ),
        (
            "waited for before it is posted",
            RING_B,
            lambda p: put(5)(insert(7, p.steps[5])(p)),
            "waits for a post that was not made, or that it has waited for already",
        ),
        # collectives
        (
            "an all_gather that others do not make",
            GATHER_F,
            change(0, collective="all_to_all"),
            "must send rows with all heads|cannot be one",
        ),
        (
            "messages that others gather",
            GATHER_F,
            change(0, collective=""),
            "post kv 0 cannot be one all_gather: the ranks or their",
        ),
        (
            "a collective in another order",
            GATHER_F,
            lambda p: change(0, sends=p.steps[0].sends[::-1])(p),
            "post kv 0 cannot be one all_gather: the ranks or their parts differ",
        ),
        # the state at the end
        ("an output without rows", RING_B, put(9), "output dkv: 6 cells do not hold the rows of this rank"),
        (
            "an output that is not finished",
            RING_F,
            put(4, Copy(s("out.sum"), s("out"))),
            "output out is not the finished result",
        ),
        ("a missing hop", RING_F, put(3), "output out: 36 pairs are missing, 0 are repeated or not visible"),
        (
            "a hop twice",
            RING_F,
            lambda p: insert(3, p.steps[3])(p),
            "output out: 0 pairs are missing, 36 are repeated or not visible",
        ),
        (
            "gradients that are not added",
            RING_B,
            put(7),
            "output dkv: 36 pairs are missing, 0 are repeated or not visible",
        ),
        # on both ranks at once
        (
            "an all_gather of several slices",
            GATHER_F,
            change(
                0,
                sends=(Part(0, k("kv", (0, 2))), Part(1, k("kv", (1, 3)))),
                recvs=(Part(0, k("kv2.0", (0, 2))), Part(1, k("kv2.0", (2, 4)))),
            ),
            "an all_gather must send the same slice to all",
            BOTH,
        ),
        (
            "an all_gather of unequal parts",
            GATHER_F,
            lambda p: change(
                0,
                sends=tuple(Part(n, k("kv", (0, 3 - p.rank))) for n in range(2)),
                recvs=(Part(0, k("kv2.0", (0, 3))), Part(1, k("kv2.0", (3, 5)))),
            )(p),
            "post kv 0 cannot be one all_gather: the ranks or their parts differ",
            BOTH,
        ),
        (
            "gathered in another order",
            GATHER_F,
            change(0, recvs=(Part(0, k("kv2.0", (3, 6))), Part(1, k("kv2.0", (0, 3))))),
            "an all_gather are not contiguous",
            BOTH,
        ),
        (
            "scattered in another order",
            GATHER_B,
            change(3, sends=(Part(0, k("dkv2.0", (3, 6))), Part(1, k("dkv2.0", (0, 3))))),
            "an all_to_all are not contiguous",
            BOTH,
        ),
        (
            "an all_to_all of some heads",
            GATHER_B,
            both(
                extra_buffers(Buffer("wide", "dkv", 6, 3, "reduce")),
                insert(3, Clear(k("wide", (0, 6), (0, 3)))),
                change(4, sends=tuple(Part(n, k("wide", (3 * n, 3 * n + 3))) for n in range(2))),
            ),
            "an all_to_all must send rows with all heads of a scratch buffer",
            BOTH,
        ),
        (
            "an all_to_all of the caller's rows",
            GATHER_F,
            change(
                0,
                sends=tuple(Part(n, k("kv", (n, n + 1))) for n in range(2)),
                recvs=tuple(Part(n, k("kv2.0", (n, n + 1))) for n in range(2)),
                collective="all_to_all",
            ),
            "an all_to_all must send rows with all heads of a scratch buffer",
            BOTH,
        ),
        (
            "a post without a wait",
            RING_F,
            lambda p: insert(5, Post("x", (Part(1 - p.rank, k("kv")),), (Part(1 - p.rank, k("kv+1.1")),)))(p),
            "forward of rank 0: post x is never waited for",
            BOTH,
        ),
        (
            "queries twice in a buffer, so that keys get twice the gradient",
            RING_B,
            both(
                extra_buffers(*(Buffer(f"{kind}2", kind, 6, 4) for kind in ("q", "out", "dout"))),
                extra_buffers(Buffer("dq2", "dq", 6, 4, "partial")),
                insert(
                    1,
                    *(Copy(s(name), s(f"{name}2", (n, n + 3))) for name in ("q", "out", "dout") for n in (0, 3)),
                    AttendGrad(
                        s("q2", (0, 6)),
                        s("out2", (0, 6)),
                        s("dout2", (0, 6)),
                        k("kv"),
                        s("dq2", (0, 6)),
                        k("dkv.part"),
                        OWN * 2,
                        OWN,
                        (0, 4),
                    ),
                ),
            ),
            "names a position twice",
        ),
    )
]
