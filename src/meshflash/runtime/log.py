"""The project's logger. MESHFLASH_LOG sets its level, and with "debug" that of NCCL and CCL as well."""

from __future__ import annotations

import logging
import os

log = logging.getLogger("meshflash")
LEVELS = ("debug", "info", "warning", "error")


def set_up_logging(rank: int) -> None:
    """Set the level from MESHFLASH_LOG, and begin each line with the rank; ValueError for an unknown level.

    Args:
        rank: This rank.
    """
    text = (os.environ.get("MESHFLASH_LOG") or "warning").lower()
    if text not in LEVELS:
        raise ValueError(f"MESHFLASH_LOG={text!r}: expected one of {', '.join(LEVELS)}")
    log.setLevel(text.upper())
    if text == "debug":
        os.environ.setdefault("NCCL_DEBUG", "INFO")
        os.environ.setdefault("CCL_LOG_LEVEL", "info")
    if not log.handlers:
        log.addHandler(logging.StreamHandler())
        log.propagate = False
    for handler in log.handlers:
        handler.setFormatter(logging.Formatter(f"[rank {rank}] meshflash %(levelname)s: %(message)s"))
