"""As many named arrays as a classic parameter server may have, on a system with the usual limits."""

from ..contract.test_snapshot import keep_many


def test_ten_thousand_arrays_are_saved_and_restored_by_a_process_that_may_open_1024_files(tmp_path):
    keep_many(tmp_path, 10_000, files=900)
