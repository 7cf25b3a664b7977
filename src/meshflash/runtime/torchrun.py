"""torchrun for the ranks of this machine: its store listens only on the loopback interface, and a failure is one line.

torchrun's own stores listen on all interfaces. A rank that fails has printed why, and torchrun's long report hides it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta

from torch import distributed as dist
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

#: The address that the store listens on.
ADDRESS = "127.0.0.1"
#: Seconds that the agent waits for its own store.
TIMEOUT = 60.0


class Loopback(RendezvousHandler):
    """The rendezvous of a single torchrun agent, with a store on the loopback interface. torchrun makes it."""

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
        """Whether ranks use the agent's store, so that rank 0 does not start another one."""
        return True

    def get_backend(self) -> str:
        """Return the `--rdzv-backend` name of this rendezvous."""
        return LOOPBACK_RENDEZVOUS

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store, and this agent as the only one."""
        return RendezvousInfo(dist.PrefixStore(self.run_id, self.store), 0, 1, self.where)

    def is_closed(self) -> bool:
        """Return False: the rendezvous ends with the agent."""
        return False

    def set_closed(self) -> None:
        """Do nothing: there is no other agent to tell."""

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
    """Run torchrun, and return its exit code.

    Args:
        arguments: The command line of torchrun.
    """
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
