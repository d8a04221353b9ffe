"""A short run of the files storm: some positions of every file of every store."""

from __future__ import annotations

import secrets

import pytest

from tests.storm.file_stores import STORES
from tests.storm.files import KINDS, damages, run_store


@pytest.mark.slow
@pytest.mark.parametrize("name", STORES)
def test_flipped_and_cut_files_give_an_error_that_names_them_or_the_right_data(name: str) -> None:
    seed = str(secrets.randbelow(10**9))
    report = run_store(name, seed, 60)
    assert not report.differences, f"--seed {seed} --cases 60 --stores {name}"
    assert report.counts[KINDS[0]] and report.counts[KINDS[2]]
    assert report.counts[KINDS[3]] == 0


def test_a_small_file_is_damaged_at_each_of_its_bytes() -> None:
    found = damages({"small": 90, "large": 5000}, "7", 100)
    small = [one for one in found if one.file == "small"]
    assert sorted(one.position for one in small if one.bit < 0) == list(range(90))
    assert sorted(one.position for one in small if one.bit >= 0) == list(range(90))
    assert 100 <= len([one for one in found if one.file == "large"]) <= 150
    assert found == damages({"small": 90, "large": 5000}, "7", 100)
