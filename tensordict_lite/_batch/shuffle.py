"""Random orders without an array: the row at a position is computed from a key when it is asked for."""

from __future__ import annotations

from hashlib import shake_128
from math import isqrt
from typing import Any

import numpy as np

Numbers = np.ndarray[Any, np.dtype[np.int64]]

_ROUNDS = 12
"""The rounds of the network. With 8, the 120 orders of 5 rows are not equally frequent over the seeds. With 12, a test
of 3,000 seeds sees no difference. A round takes about 3 ns per row."""
_WINDOW = 8
"""The blocks that a block shuffle mixes."""
_HALF = np.uint64(32)
_ODD = np.uint64(0x9E3779B97F4A7C15)


def random_words(key: tuple[int, ...], count: int) -> Any:
    """Random uint64[count] that depend on ``key`` only, the same in every version and on every platform."""
    return np.frombuffer(shake_128(repr(key).encode()).digest(8 * count), "<u8").astype(np.uint64)


def permuted(at: Numbers, count: int, *keys: tuple[int, ...], whose: Any = ...) -> Numbers:
    """The numbers at the positions ``at`` of a random order of ``range(count)``. Each key has an order of its own.

    ``whose``: for several keys, the number of the key for each position.

    A Feistel network over two digits: a position is ``high * low_base + low``, and each round adds a random function of
    one digit to the other. That is a bijection of ``high_base * low_base`` numbers, slightly more than ``count``. A
    result that is too large goes through the network again until it is not ("cycle walking": Black and Rogaway, 2002).
    """
    # Digits in bits would need no division, but up to twice as many numbers as rows: then half of the rows walk.
    bases = [base := max(1, isqrt(max(count, 1) - 1) + 1), -(-count // base)]
    high_base, low_base = (np.uint64(base) for base in bases)
    words = np.stack([random_words(key, 2 * _ROUNDS) for key in keys], 1)

    def through(x: Any, whose: Any) -> Any:
        high = x // low_base
        low = x - high * low_base
        added, other = np.empty_like(x), np.empty_like(x)  # new arrays in each round would take longer than the numbers
        for number in range(_ROUNDS):
            base = (high_base, low_base)[number % 2]
            np.multiply((low, high)[number % 2], words[2 * number][whose], out=added)
            added += words[2 * number + 1][whose]
            added ^= np.right_shift(added, _HALF, out=other)  # without it and the next line, neighbours are correlated
            added *= _ODD
            added >>= _HALF
            added *= base
            added >>= _HALF  # from 0 to base - 1
            added += (high, low)[number % 2]
            np.subtract(added, base, out=other)  # less than 0 is a large number
            np.minimum(added, other, out=(high, low)[number % 2])
        high *= low_base
        high += low
        return high

    found = through(at.astype(np.uint64), whose)
    while len(outside := np.flatnonzero(found >= np.uint64(count))):
        found[outside] = through(found[outside], whose if whose is ... else whose[outside])
    return found.astype(np.int64)


def shuffled(at: Numbers, count: int, block: int | None, key: tuple[int, ...]) -> Numbers:
    """The rows at the positions ``at``, ascending, of a random order of ``count`` rows.

    With ``block``, blocks of so many rows are in random order, and the rows of each `_WINDOW` of them. The rows after
    the last whole block belong to a window that the key chooses.
    """
    if block is None:
        return permuted(at, count, key)
    blocks, extra = divmod(count, block)
    windows, width = max(1, -(-blocks // _WINDOW)), _WINDOW * block
    longer = int(random_words((*key, 0), 1)[0]) % windows  # the window with the extra rows
    end = min((longer + 1) * width, blocks * block) + extra
    number = np.where(at < end, np.minimum(at // width, longer), (at - extra) // width)
    found = np.empty_like(at)
    for window in np.unique(number).tolist():
        begin, first = window * width + extra * (window > longer), window * _WINDOW
        whole = min(_WINDOW, blocks - first)
        mine = slice(*number.searchsorted([window, window + 1]).tolist())
        rows = permuted(at[mine] - begin, whole * block + extra * (window == longer), (*key, 2, window))
        # The extra rows come last: they are the block after all whole blocks.
        order = np.append(permuted(np.arange(first, first + whole), blocks, (*key, 1)), blocks)
        found[mine] = order[rows // block] * block + rows % block
    return found
