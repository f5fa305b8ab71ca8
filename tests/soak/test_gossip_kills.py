"""Gossip through 200 kills by SIGKILL, with as many restarts."""

import pytest

from ..process.test_gossip import check_sums, kills


@pytest.mark.parametrize("rule", ["gossip:q=0.5", "gossip:q=0.5,elastic=false", "gossip:q=0.05"])
def test_two_hundred_kills_and_joins_change_no_sum(rule, tmp_path):
    check_sums(kills(rule, 200, tmp_path))
