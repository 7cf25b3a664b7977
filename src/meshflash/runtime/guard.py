"""The job's token: what keeps processes of other jobs, and stray clients, out of the store that ranks meet in.

torch's store authenticates nobody. All keys of a job therefore lie below a prefix that is derived from the job's token,
and rank 0 publishes a salted digest of it, so that a rank with another token is refused before it joins.
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
#: Characters that a token must have: rank 0 publishes a digest of it, which must not be worth guessing at.
SHORTEST = 16
#: The key by which ranks compare tokens; it is the only one that lies beside the prefix.
PUBLISHED = "meshflash/guard"
#: What rank 0 publishes where it has no token.
OPEN = "open"


class TokenError(LaunchError):
    """This rank's token is not the one of rank 0."""


def new_token() -> str:
    """Return a token that nobody guesses."""
    return secrets.token_hex(16)


def given_token() -> str:
    """Return the token of the environment, empty where none is set; LaunchError where it is too short to guard."""
    token = os.environ.get(TOKEN, "")
    if token and len(token) < SHORTEST:
        raise LaunchError(
            f"{TOKEN} has {len(token)} characters: expected {SHORTEST} or more, the same on all ranks; "
            "python -c 'import secrets; print(secrets.token_hex(16))' makes one"
        )
    return token


def guarded(store: Any, token: str) -> Any:
    """Return a view of a store whose keys lie below a prefix derived from the token; the store itself without one."""
    if not token:
        return store
    from torch import distributed  # not above: the command line makes tokens, and has no other use for torch

    dist: Any = distributed  # torch does not declare all that it exports here
    return dist.PrefixStore(f"meshflash-{_digest('prefix', token)}", store)


def published(token: str) -> str:
    """Return what rank 0 publishes of its token: a fresh salt, and a digest of both."""
    salt = secrets.token_hex(8)
    return f"{salt} {_digest(salt, token)}" if token else OPEN


def check_token(said: str, token: str, rank: int, where: str) -> None:
    """Raise TokenError unless this rank has the token that rank 0 published a digest of.

    >>> check_token(published("0123456789abcdef"), "0123456789abcdef", 1, "node1:29500")
    >>> check_token(published("0123456789abcdef"), "", 1, "node1:29500")
    Traceback (most recent call last):
    meshflash.runtime.guard.TokenError: rank 1 has no MESHFLASH_TOKEN, and rank 0 at node1:29500 has one: ...
    """
    salt, _, digest = said.partition(" ")
    theirs = said != OPEN
    if theirs and token and hmac.compare_digest(digest.encode(), _digest(salt, token).encode()):
        return
    if not theirs and not token:
        return
    have = f"has another {TOKEN} than" if theirs and token else f"has {'a' if token else 'no'} {TOKEN}, and"
    rest = "" if theirs and token else f" has {'one' if theirs else 'none'}"
    raise TokenError(
        f"rank {rank} {have} rank 0 at {where}{rest}: set the same one on all ranks of a job; where rank 0 is of "
        "another job, set MASTER_PORT to a free port"
    )


def _digest(salt: str, token: str) -> str:
    return hashlib.sha256(f"{salt} {token}".encode()).hexdigest()
