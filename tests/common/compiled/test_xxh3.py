"""The XXH3 kernel against the xxhash package."""

from __future__ import annotations

import itertools
import random

import numpy as np
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from databus.common.compiled.xxh3 import xxh3_64, xxh3_64_of_each


def test_every_length_class_hashes_as_the_xxhash_package_does() -> None:
    data = np.frombuffer(random.Random(5).randbytes(9000), dtype=np.uint8)
    lengths = [*range(1200), 2047, 2048, 2049, 3072, 4096, 8191]
    wrong = [
        length
        for length in lengths
        if int(xxh3_64(data, 7, 7 + length))
        != xxhash.xxh3_64_intdigest(data[7 : 7 + length].tobytes())
    ]
    assert wrong == []


@given(st.binary(max_size=300))
def test_any_bytes_hash_as_the_xxhash_package_does(data: bytes) -> None:
    found = xxh3_64(np.frombuffer(data, dtype=np.uint8), 0, len(data))
    assert int(found) == xxhash.xxh3_64_intdigest(data)


def test_ranges_hash_as_one_by_one() -> None:
    data = np.frombuffer(random.Random(6).randbytes(1000), dtype=np.uint8)
    edges = np.array([0, 0, 3, 20, 300, 1000], dtype=np.int64)
    found = xxh3_64_of_each(data, edges[:-1], edges[1:])
    expected = [xxh3_64(data, a, b) for a, b in itertools.pairwise(edges)]
    assert found.tolist() == [int(one) for one in expected]
