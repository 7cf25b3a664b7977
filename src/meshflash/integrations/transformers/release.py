"""The releases of Transformers that are tested."""

from __future__ import annotations

from meshflash.integrations._replicas import check_release as check

#: The oldest and the newest tested release, by their first two numbers.
OLDEST, NEWEST = (5, 10), (5, 23)


def check_release(version: str, verify: bool | None = None) -> None:
    """Raise ValueError for a release that is not tested, unless the first call is compared with one device.

    Args:
        version: The version of Transformers.
        verify: Whether the first call is compared with one device. None means that the caller cannot do so.

    >>> check_release("4.57.6", verify=False)
    Traceback (most recent call last):
    ...
    ValueError: Transformers 4.57.6 is not tested; install 5.10 to 5.23, or pass verify=True, which compares ...
    """
    check("Transformers", version, verify, oldest=OLDEST, newest=NEWEST)
