"""The job's token: it keeps ranks of other jobs and stray clients out of the store of a rendezvous.

torch's store authenticates no client. All keys of a job therefore lie below a prefix derived from the job's token.
Rank 0 also publishes a salted digest of the token, so that a rank with another token is refused before it joins.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from typing import Any

from meshflash.runtime.launchers import LaunchError

#: The variable that holds a job's token: `meshflash launch` and `--nproc` make one; elsewhere the user may set one.
TOKEN = "MESHFLASH_TOKEN"
#: Characters that a token must have: anyone can read its digest in the store, and must not be able to guess it.
MIN_CHARACTERS = 16
#: The key of rank 0's token digest; it is the only key outside of the prefix.
DIGEST_KEY = "meshflash/guard"
#: The digest of a job without a token.
NO_TOKEN = "open"


class TokenError(LaunchError):
    """This rank's token differs from that of rank 0."""


def new_token() -> str:
    """Return a fresh random token."""
    return secrets.token_hex(16)


def given_token() -> str:
    """Return the token of the environment, empty if none is set; LaunchError if it is too short."""
    token = os.environ.get(TOKEN, "")
    if token and len(token) < MIN_CHARACTERS:
        raise LaunchError(
            f"{TOKEN} has {len(token)} characters: expected {MIN_CHARACTERS} or more, the same on all ranks; "
            "python -c 'import secrets; print(secrets.token_hex(16))' makes one"
        )
    return token


def guarded(store: Any, token: str) -> Any:
    """Return a view of a store whose keys lie below a prefix derived from the token.

    Args:
        store: A store of torch.
        token: The job's token. Without one the store itself is returned.
    """
    if not token:
        return store
    from torch import distributed as dist  # not above: the command line makes tokens, and starts faster without torch

    return dist.PrefixStore(f"meshflash-{_digest('prefix', token)}", store)


def token_digest(token: str) -> str:
    """Return what rank 0 publishes of its token: a fresh salt, and a digest of salt and token.

    Args:
        token: The job's token, or an empty text.
    """
    salt = secrets.token_hex(8)
    return f"{salt} {_digest(salt, token)}" if token else NO_TOKEN


def check_token(digest: str, token: str, rank: int, where: str) -> None:
    """Raise TokenError unless this rank has the token of rank 0.

    Args:
        digest: What rank 0 has published, by `token_digest`.
        token: The token of this rank; empty if it has none.
        rank: This rank, for the message.
        where: The address of the store, for the message.

    >>> check_token(token_digest("0123456789abcdef"), "0123456789abcdef", 1, "node1:29500")
    >>> check_token(token_digest("0123456789abcdef"), "", 1, "node1:29500")
    Traceback (most recent call last):
    meshflash.runtime.guard.TokenError: rank 1 has no MESHFLASH_TOKEN, and rank 0 at node1:29500 has one: ...
    """
    salt, _, salted = digest.partition(" ")
    rank_0_has_one = digest != NO_TOKEN
    if rank_0_has_one and token and hmac.compare_digest(salted.encode(), _digest(salt, token).encode()):
        return
    if not rank_0_has_one and not token:
        return
    have = f"has another {TOKEN} than" if rank_0_has_one and token else f"has {'a' if token else 'no'} {TOKEN}, and"
    rest = "" if rank_0_has_one and token else f" has {'one' if rank_0_has_one else 'none'}"
    raise TokenError(
        f"rank {rank} {have} rank 0 at {where}{rest}: set the same one on all ranks of a job; where rank 0 is of "
        "another job, set MASTER_PORT to a free port"
    )


def _digest(salt: str, token: str) -> str:
    return hashlib.sha256(f"{salt} {token}".encode()).hexdigest()
