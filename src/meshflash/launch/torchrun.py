"""torchrun, with one line where a rank fails: each rank has said why, and what torchrun adds hides it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run


def main(arguments: Sequence[str]) -> int:
    """Run it, and return the exit code."""
    try:
        run(parse_args(list(arguments)))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        how = f"by {failure.signal_name()}" if code < 0 else f"with exit code {code}"
        print(f"meshflash: rank {rank} ended first, {how}: look at what it wrote above", file=sys.stderr)
        return 1
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
