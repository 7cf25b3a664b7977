"""The samples of each step: a function of the seed and the step only, so that a run can resume at any step.

All random numbers of the data come from `random_words`, whose values no version of numpy changes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_WORD = 2**64


def random_words(seed: int, number: int, count: int) -> npt.NDArray[np.uint64]:
    """Return random 64-bit words: Philox with the seed and a number as its key.

    Args:
        seed: The first half of the key.
        number: The second half of the key, as the index of a sample or an epoch.
        count: The number of words; a longer result begins with a shorter one.

    >>> [int(x) % 100 for x in random_words(0, 5, 3)] == [int(x) % 100 for x in random_words(0, 5, 4)[:3]]
    True
    """
    for name, value in (("seed", seed), ("number", number)):
        if not 0 <= value < _WORD:
            raise ValueError(f"{name}={value}: expected 0 or more, below 2**64")
    return np.random.Philox(key=np.array([seed, number], dtype=np.uint64)).random_raw(count)


class Order:
    """The samples of each step, the same on any mesh.

    Every epoch has each sample once, in its own order. Every step has `batch` samples: the last step of an epoch
    continues with samples of the next.

    Args:
        samples: The number of samples of the source.
        batch: The samples of a step on all ranks.
        seed: The seed of the order.
        shuffle: Whether each epoch has a random order.

    >>> order = Order(5, batch=3, shuffle=False)
    >>> [order.step_samples(step) for step in range(3)]
    [[0, 1, 2], [3, 4, 0], [1, 2, 3]]
    >>> order.rank_samples(1, data_rank=0, ranks=2, micro=1), order.rank_samples(1, data_rank=1, ranks=2, micro=1)
    ([[3], [4]], [[0]])
    """

    def __init__(self, samples: int, batch: int, seed: int = 0, shuffle: bool = True) -> None:
        if samples < 1:
            raise ValueError(f"samples={samples}: expected at least 1; the source is empty")
        if batch < 1:
            raise ValueError(f"batch={batch}: expected at least 1")
        random_words(seed, 0, 0)  # an invalid seed raises here, not at the first step
        self.samples, self.batch, self.seed, self.shuffle = samples, batch, seed, shuffle
        self._epochs: dict[int, npt.NDArray[np.uint64]] = {}

    def step_samples(self, step: int) -> list[int]:
        """Return the samples of a step on all ranks.

        Args:
            step: The step, counted from 0.
        """
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

    def rank_samples(self, step: int, data_rank: int, ranks: int, micro: int) -> list[list[int]]:
        """Return the micro-batches of a data rank: its contiguous share of `step_samples(step)`.

        If the ranks do not divide the batch, the first ranks have one sample more, and maybe one micro-batch more;
        `meshflash.parallel.accumulate` pads with blank ones. A rank without samples gets []; it takes part with
        `meshflash.parallel.blank_batch` of any batch.

        Args:
            step: The step, counted from 0.
            data_rank: The index of the data rank.
            ranks: The number of data ranks.
            micro: The most samples of a micro-batch.
        """
        return divide(self.step_samples(step), data_rank, ranks, micro)

    def _epoch(self, epoch: int) -> npt.NDArray[np.uint64]:
        """Return the permutation of an epoch: sort random words that carry the sample index in their low bits.

        No two words are equal, so every sorting algorithm gives the same order. An argsort takes four times as long.
        """
        if epoch not in self._epochs:
            low = np.uint64((1 << (self.samples - 1).bit_length()) - 1)
            words = random_words(self.seed, epoch, self.samples) & ~low
            words |= np.arange(self.samples, dtype=np.uint64)
            words.sort()
            before = {e: kept for e, kept in self._epochs.items() if e == epoch - 1}  # a batch may span two epochs
            self._epochs = before | {epoch: words & low}
        return self._epochs[epoch]


def divide(samples: list[int], data_rank: int, ranks: int, micro: int) -> list[list[int]]:
    """Return a rank's contiguous share of samples in micro-batches; the first ranks take the remainder.

    Args:
        samples: The samples of a step on all ranks.
        data_rank: The index of the data rank.
        ranks: The number of data ranks.
        micro: The most samples of a micro-batch.

    >>> divide([3, 4, 0], data_rank=0, ranks=2, micro=1)
    [[3], [4]]
    """
    if not 0 <= data_rank < ranks:
        raise ValueError(f"data_rank={data_rank}: expected a data rank below ranks={ranks}")
    if micro < 1:
        raise ValueError(f"micro={micro}: expected at least 1")
    each, more = divmod(len(samples), ranks)
    begin = data_rank * each + min(data_rank, more)
    own = samples[begin : begin + each + (data_rank < more)]
    return [own[at : at + micro] for at in range(0, len(own), micro)]
