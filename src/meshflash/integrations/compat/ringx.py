"""Names of ringX: `ringX1_attn_func` to `ringX4_attn_func`.

The variants with `o` and `b` are the same functions: all schedules overlap communication.
"""

from __future__ import annotations

from meshflash.integrations.compat.calls import dense

ringX1_attn_func, _, _ = dense("ringX1_attn", "ringx1")
ringX1o_attn_func, _, _ = dense("ringX1o_attn", "ringx1")
ringX2_attn_func, _, _ = dense("ringX2_attn", "ringx2")
ringX2o_attn_func, _, _ = dense("ringX2o_attn", "ringx2")
ringX3_attn_func, _, _ = dense("ringX3_attn", "ringx3")
ringX3b_attn_func, _, _ = dense("ringX3b_attn", "ringx3")
ringX4_attn_func, _, _ = dense("ringX4_attn", "ringx4")
ringX4o_attn_func, _, _ = dense("ringX4o_attn", "ringx4")
