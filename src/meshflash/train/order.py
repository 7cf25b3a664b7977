"""Which samples a step takes: a function of the seed and the step alone, so that any run can go on at any step.

All random numbers of the data come from `draws`, whose values no version of numpy changes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_WORD = 2**64


def random_words(seed: int, number: int, count: int) -> npt.NDArray[np.uint64]:
    """`count` random words of 64 bits that depend on the seed and a number: Philox with both as its key.

    >>> [int(x) % 100 for x in draws(0, 5, 3)] == [int(x) % 100 for x in draws(0, 5, 4)[:3]]
    True
    """
    for name, value in (("seed", seed), ("number", number)):
        if not 0 <= value < _WORD:
            raise ValueError(f"{name}={value}: expected 0 or more, below 2**64")
    found: npt.NDArray[np.uint64] = np.random.Philox(key=np.array([seed, number], dtype=np.uint64)).random_raw(count)
    return found


class Order:
    """The samples of each step, epoch after epoch, the same on any mesh.

    Every epoch has each sample once, in an order of its own. Every step has `batch` samples: one at the end of an epoch
    goes on with the next.

    >>> order = Order(5, batch=3, shuffle=False)
    >>> [order.of(step) for step in range(3)]
    [[0, 1, 2], [3, 4, 0], [1, 2, 3]]
    >>> order.mine(1, place=0, ranks=2, micro=1), order.mine(1, place=1, ranks=2, micro=1)
    ([[3], [4]], [[0]])
    """

    def __init__(self, samples: int, batch: int, seed: int = 0, shuffle: bool = True) -> None:
        if samples < 1:
            raise ValueError(f"samples={samples}: expected at least 1; the source is empty")
        if batch < 1:
            raise ValueError(f"batch={batch}: expected at least 1")
        random_words(seed, 0, 0)  # a seed that cannot be is told here, not at the first step
        self.samples, self.batch, self.seed, self.shuffle = samples, batch, seed, shuffle
        self._epochs: dict[int, npt.NDArray[np.uint64]] = {}

    def of(self, step: int) -> list[int]:
        """The samples of a step, on all ranks together; steps count from 0."""
        if step < 0:
            raise ValueError(f"step={step}: expected 0 or more")
        at, end = step * self.batch, (step + 1) * self.batch
        found: list[int] = []
        while at < end:
            epoch, first = divmod(at, self.samples)
            stop = min(self.samples, first + end - at)
            if self.shuffle:
                found += self._epoch(epoch)[first:stop].tolist()
            else:
                found += range(first, stop)
            at += stop - first
        return found

    def mine(self, step: int, place: int, ranks: int, micro: int) -> list[list[int]]:
        """A data rank's samples of a step in micro-batches of at most `micro`: runs of `of(step)`, rank after rank.

        Where ranks do not divide the batch the first ones have one sample more, and so maybe one micro-batch more;
        `meshflash.parallel.accumulate` fills up with blanks. A rank without any sample gets []: it takes part with
        `meshflash.parallel.blank` of a batch of any sample.
        """
        return divide(self.of(step), place, ranks, micro)

    def _epoch(self, epoch: int) -> npt.NDArray[np.uint64]:
        """An epoch's permutation: the samples' numbers in the low bits of random words, which are sorted.

        So no two words are equal, and every way of sorting gives the same; sorting indices takes four times as long.
        """
        if epoch not in self._epochs:
            low = np.uint64((1 << (self.samples - 1).bit_length()) - 1)
            words = random_words(self.seed, epoch, self.samples) & ~low
            words |= np.arange(self.samples, dtype=np.uint64)
            words.sort()
            before = {e: kept for e, kept in self._epochs.items() if e == epoch - 1}  # a batch may need two
            self._epochs = before | {epoch: words & low}
        return self._epochs[epoch]


def divide(samples: list[int], place: int, ranks: int, micro: int) -> list[list[int]]:
    """A rank's run of samples in micro-batches; the first ranks have one more where they do not divide.

    >>> divide([3, 4, 0], place=0, ranks=2, micro=1)
    [[3], [4]]
    """
    if not 0 <= place < ranks:
        raise ValueError(f"place={place}: expected a data rank below ranks={ranks}")
    if micro < 1:
        raise ValueError(f"micro={micro}: expected at least 1")
    each, more = divmod(len(samples), ranks)
    begin = place * each + min(place, more)
    own = samples[begin : begin + each + (place < more)]
    return [own[at : at + micro] for at in range(0, len(own), micro)]
