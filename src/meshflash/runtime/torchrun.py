"""torchrun for the ranks of this machine: its store listens on the loopback alone, and a failure is one line.

torchrun's own stores listen on all interfaces. Each rank that fails has said why, and what torchrun adds hides it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import distributed as _distributed
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.run import parse_args, run

from meshflash.runtime.listen import LOOPBACK_RENDEZVOUS, listener

dist: Any = _distributed  # torch does not declare all that it exports here

#: Where its store listens.
ADDRESS = "127.0.0.1"
#: Seconds that the agent waits for its own store.
TIMEOUT = 60.0


class Loopback(RendezvousHandler):
    """The rendezvous of one agent with itself, and the store that its ranks use, on the loopback interface."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self.run_id = str(parameters.run_id)
        bound = listener(ADDRESS, 0, one_node=True)
        assert bound is not None, "every host has a loopback address"
        port = bound.getsockname()[1]
        self.store = dist.TCPStore(
            ADDRESS,
            port,
            is_master=True,
            timeout=timedelta(seconds=TIMEOUT),
            wait_for_workers=False,
            master_listen_fd=bound.detach(),  # the store closes it
            use_libuv=True,
        )
        self.where = RendezvousStoreInfo(ADDRESS, port)

    @property
    def use_agent_store(self) -> bool:
        """Whether ranks use the store of the agent: rank 0 does not start another one."""
        return True

    def get_backend(self) -> str:
        """Return the name of this kind of rendezvous."""
        return LOOPBACK_RENDEZVOUS

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store, and this agent as the only one."""
        return RendezvousInfo(dist.PrefixStore(self.run_id, self.store), 0, 1, self.where)

    def is_closed(self) -> bool:
        """Return False: it ends with the agent."""
        return False

    def set_closed(self) -> None:
        """Do nothing: no other agent would hear of it."""

    def num_nodes_waiting(self) -> int:
        """Return 0: no other agent can join."""
        return 0

    def get_run_id(self) -> str:
        """Return the name of the run."""
        return self.run_id

    def shutdown(self) -> bool:
        """Return True: the store ends with the agent."""
        return True


def main(arguments: Sequence[str]) -> int:
    """Run it, and return the exit code."""
    rendezvous_handler_registry.register(LOOPBACK_RENDEZVOUS, Loopback)
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
