"""Golden histories: three workers in a fixed order on a small problem, one center's path per rule.

A change that claims no effect on the numbers leaves these as they are. To change them on purpose, delete
histories.json, run this test, and say why in the commit.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from maniple.contracts import ExchangeInfo
from maniple.rules import ASGD, EASGD, Downpour, Rule

GOLDEN = Path(__file__).with_name("histories.json")
RULES: dict[str, Rule] = {
    "easgd auto": EASGD(),
    "easgd 0.5": EASGD(0.5),
    "easgd center 0.1": EASGD(0.3, center_alpha=0.1),
    "asgd 0.8 0.2": ASGD(0.8, 0.2),
    "downpour": Downpour(),
    "downpour compensated": Downpour(compensate=True),
}


def history(rule: Rule) -> list[list[float]]:
    """The center after each of 12 exchanges; worker w makes two steps towards its own target in between."""
    c = np.array([0.5, -1.0, 2.0])
    replicas = [c.copy() for _ in range(3)]
    states = [{name: c.copy() for name in rule.worker_vectors} for _ in range(3)]
    targets = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    path = []
    for turn in range(12):
        w = (0, 1, 2, 1)[turn % 4]
        for _ in range(2):
            replicas[w] -= 0.2 * (replicas[w] - targets[w])
        rule.exchange(replicas[w], c, states[w], ExchangeInfo(step=2 * turn, live=3, staleness=turn % 3))
        path.append([float(value) for value in c])
    return path


@pytest.mark.parametrize("name", RULES)
def test_the_center_takes_the_known_path(name):
    known = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    path = history(RULES[name])
    if name not in known:
        GOLDEN.write_text(json.dumps(known | {name: path}, indent=1))
        pytest.fail(f"there was no history of {name}; it has been written: look at it and commit it")
    assert np.allclose(path, known[name], rtol=1e-12, atol=0)
