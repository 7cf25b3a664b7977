"""The dropout mask: published Philox vectors, the rate, and dependence on nothing but seed and positions."""

import pytest
import torch

from meshflash import Mask, flash_attention
from meshflash.kernels.dropout import keep, philox

WORD = 0xFFFFFFFF


def _philox_in_python(seed, counter):
    """Return the first word of Philox 4x32-10, computed with Python ints."""
    c = list(counter)
    k = [seed & WORD, seed >> 32]
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & WORD, (p0 >> 32) ^ c[3] ^ k[1], p0 & WORD]
        k = [(k[0] + 0x9E3779B9) & WORD, (k[1] + 0xBB67AE85) & WORD]
    return c[0]


@pytest.mark.parametrize(
    ("seed", "counter", "word"),
    [
        (0, (0, 0, 0, 0), 0x6627E8D5),
        (2**64 - 1, (WORD, WORD, WORD, WORD), 0x408F276D),
        (0x299F31D0_A4093822, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), 0xD16CFE09),
    ],
)
def test_philox_matches_the_published_vectors(seed, counter, word):
    assert philox(seed, *(torch.tensor(c) for c in counter)).item() == word


def test_philox_matches_an_implementation_in_python_ints():
    generator = torch.Generator().manual_seed(0)
    counters = torch.randint(2**32, (50, 4), generator=generator)
    got = philox(123456789012345, *counters.unbind(1)).tolist()
    assert got == [_philox_in_python(123456789012345, c) for c in counters.tolist()]


def test_dropout_has_the_given_rate_in_every_row_and_column():
    index = torch.arange(512)
    kept = keep(3, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), index[:, None], index, 0.3)
    assert abs(kept.float().mean().item() - 0.7) < 0.005
    assert kept.float().mean(0).std() < 0.03
    assert kept.float().mean(1).std() < 0.03


def test_dropout_of_a_head_does_not_depend_on_which_call_computes_it():
    q, k, v = (torch.randn(2, 9, 4, 8) for _ in range(3))
    whole = flash_attention(q, k, v, dropout=0.5, seed=11)
    part = flash_attention(q[:, :, 2:], k[:, :, 2:], v[:, :, 2:], dropout=0.5, seed=11, head_offset=2)
    assert torch.allclose(whole[:, :, 2:], part, atol=1e-6)


def test_dropout_of_a_batch_row_does_not_depend_on_which_call_computes_it():
    q, k, v = (torch.randn(3, 9, 2, 8) for _ in range(3))
    whole = flash_attention(q, k, v, dropout=0.5, seed=11)
    part = flash_attention(q[1:], k[1:], v[1:], dropout=0.5, seed=11, batch_offset=1)
    assert torch.allclose(whole[1:], part, atol=1e-6)


def test_dropout_of_a_query_does_not_depend_on_how_queries_are_split():
    q, k, v = (torch.randn(1, 9, 1, 8) for _ in range(3))
    whole = flash_attention(q, k, v, dropout=0.5, seed=11, mask=Mask.causal())
    part = flash_attention(q[:, 5:], k, v, dropout=0.5, seed=11, mask=Mask.causal(), q_offset=5)
    assert torch.allclose(whole[:, 5:], part, atol=1e-6)


def test_dropout_follows_the_given_seed_or_the_torch_generator():
    q = k = v = torch.randn(1, 32, 1, 8)
    torch.manual_seed(0)
    first = flash_attention(q, k, v, dropout=0.5)
    second = flash_attention(q, k, v, dropout=0.5)
    torch.manual_seed(0)
    assert torch.equal(first, flash_attention(q, k, v, dropout=0.5))
    assert not torch.equal(first, second)
    with_int, with_tensor = (flash_attention(q, k, v, dropout=0.5, seed=s) for s in (2**40, torch.tensor(2**40)))
    assert torch.equal(with_int, with_tensor)
    assert not torch.equal(with_int, flash_attention(q, k, v, dropout=0.5, seed=2**41))
