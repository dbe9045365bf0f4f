import numpy as np
import pytest

from calyrex_jax.core.types import bucket, slots


def test_buckets_grow_by_a_third_at_least_and_a_half_at_most():
    sizes = sorted({bucket(n) for n in range(1, 5000)})
    assert sizes == [32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144]


def test_a_bucket_holds_its_length_and_no_smaller_one_would():
    sizes = [32, 64, 96, 128, 192, 256, 384, 512]
    for length in range(1, 513):
        assert bucket(length) == next(size for size in sizes if size >= length)


def test_bucket_starts_where_it_is_told():
    assert [bucket(n, 16) for n in (1, 16, 17, 33, 48, 49)] == [16, 16, 32, 48, 48, 64]


def test_slots_are_the_true_positions_in_order():
    mask = np.array([[False, True, False, True], [False] * 4, [True] * 4])
    np.testing.assert_array_equal(slots(mask, 4), [[1, 3, -1, -1], [-1] * 4, [0, 1, 2, 3]])
    assert slots(mask, 4).dtype == np.int32
    assert slots(np.zeros((2, 5), bool), 0).shape == (2, 0)


def test_slots_cut_nothing():
    with pytest.raises(ValueError, match="row 1 has 3 marked positions but only 2 slots"):
        slots(np.array([[True, False, False], [True, True, True]]), 2)
