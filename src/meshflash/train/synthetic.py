"""Synthetic tasks of token models with distant answers: solving them needs attention across ranks.

A sample depends on the seed and its index only, so any rank can make any of them. Each sample is one document.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from meshflash.parallel.loss import IGNORE_INDEX
from meshflash.train.order import random_words
from meshflash.train.tokens import Sample, check_sample_index, check_task


class Copy:
    """Random tokens, then the same again. Labels are on the second half, half a sequence behind their answers.

    Args:
        tokens: The tokens of a sample.
        vocabulary: The number of token ids.
        seed: The seed of all samples.
        samples: The number of samples.

    >>> sample = Copy(6, 32, seed=0, samples=4)[0]
    >>> bool((sample.tokens[:3] == sample.tokens[3:]).all())
    True
    >>> sample.labels.tolist() == [-100, -100, -100, *sample.tokens[4:].tolist(), -100]
    True
    """

    def __init__(self, tokens: int, vocabulary: int, seed: int = 0, samples: int = 65536) -> None:
        check_task("Copy", tokens=(tokens, 3), vocabulary=(vocabulary, 2), samples=(samples, 1))
        self.tokens, self.vocabulary, self.seed, self.samples = tokens, vocabulary, seed, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, number: int) -> Sample:
        check_sample_index(number, self.samples)
        half = -(-self.tokens // 2)
        once = random_words(self.seed, number, half) % np.uint64(self.vocabulary)
        both = torch.from_numpy(np.tile(once.astype(np.int64), 2))
        labels = torch.full((self.tokens,), IGNORE_INDEX)
        answers = both[half + 1 : self.tokens + 1]
        labels[half : half + len(answers)] = answers
        return Sample(both[: self.tokens].clone(), labels, (self.tokens,))


class Needle:
    """Key-value pairs hidden in the first half of filler; the last token is one of the keys, and its label the value.

    The first quarter of the vocabulary are keys, the second quarter values, the rest is filler. A layout that gives a
    rank tokens of both ends, as zigzag does, can answer about 1/R of the samples on R ranks without communication.

    Args:
        tokens: The tokens of a sample.
        vocabulary: The number of token ids.
        seed: The seed of all samples.
        samples: The number of samples.
        pairs: The number of pairs; one of them is the answer.
    """

    def __init__(self, tokens: int, vocabulary: int, seed: int = 0, samples: int = 65536, pairs: int = 1) -> None:
        least = {"pairs": (pairs, 1), "tokens": (tokens, 4 * pairs + 1), "vocabulary": (vocabulary, 8)}
        check_task("Needle", **least, samples=(samples, 1))
        self.tokens, self.vocabulary, self.seed, self.samples, self.pairs = tokens, vocabulary, seed, samples, pairs
        self.keys = vocabulary // 4
        if pairs > self.keys:
            raise ValueError(f"pairs={pairs}: a vocabulary of {vocabulary} has {self.keys} keys")

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, number: int) -> Sample:
        check_sample_index(number, self.samples)
        slots = self.tokens // 4
        words = random_words(self.seed, number, self.tokens + slots + self.keys + self.pairs)
        filler, where, which, what = np.split(words, np.cumsum([self.tokens, slots, self.keys]))
        ids = (filler % np.uint64(self.vocabulary - 2 * self.keys)).astype(np.int64) + 2 * self.keys
        places = 2 * np.argsort(where, kind="stable")[: self.pairs]
        keys = np.argsort(which, kind="stable")[: self.pairs]
        values = (what % np.uint64(self.keys)).astype(np.int64) + self.keys
        ids[places], ids[places + 1], ids[-1] = keys, values, keys[0]
        labels = torch.full((self.tokens,), IGNORE_INDEX)
        labels[-1] = int(values[0])
        return Sample(torch.from_numpy(ids), labels, (self.tokens,))


def accuracy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return (number of right answers, number of labels), which can be summed over ranks.

    Args:
        logits: The logits, `[..., classes]`.
        labels: The labels, `[...]`; IGNORE_INDEX marks tokens without an answer.

    >>> accuracy(torch.eye(3), torch.tensor([0, 2, -100]))
    (tensor(1), tensor(2))
    """
    counts = labels != IGNORE_INDEX
    return ((logits.argmax(-1) == labels) & counts).sum(), counts.sum()
