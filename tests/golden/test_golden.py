"""A few rounds of every method on digits give the stored results.

A change here means that a method computes something else than before. If that is meant, write the new figures with
`python -m tests.golden.test_golden all` and say why in the commit. Without `all`, only new lines are added.
"""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))
from table import CASES, everyday, run_case

FILE = Path(__file__).with_name("golden.json")
TOLERANCE = 0.018  # one of the sixty test samples


def figures(case):
    """Run in float64, deep networks for one round: they turn the rounding of a processor into other results."""
    torch.set_default_dtype(torch.float64)
    try:
        result = run_case(case, rounds=1 if "resnet" in case.id else 3, digits=True)
    finally:
        torch.set_default_dtype(torch.float32)
    accuracy = result.accuracy()
    return {
        "mean": round(accuracy["mean"], 4),
        "global": accuracy["global"] and round(accuracy["global"], 4),
        "loss": round([line["loss"] for line in result.history if "loss" in line][-1], 4),
        "bytes_up": result.cost.total("up"),
        "bytes_down": result.cost.total("down"),
    }


@everyday()
def test_a_few_rounds_give_the_stored_result(case):
    expected = json.loads(FILE.read_text())[case.id]
    found = figures(case)
    assert (found["bytes_up"], found["bytes_down"]) == (expected["bytes_up"], expected["bytes_down"])
    assert found["mean"] == pytest.approx(expected["mean"], abs=TOLERANCE)
    assert found["loss"] == pytest.approx(expected["loss"], rel=0.001, abs=0.001)
    if expected["global"] is None:
        assert found["global"] is None
    else:
        assert found["global"] == pytest.approx(expected["global"], abs=TOLERANCE)


if __name__ == "__main__":
    stored = {} if "all" in sys.argv else json.loads(FILE.read_text())
    stored = {case.id: stored.get(case.id) or figures(case) for case in CASES}
    FILE.write_text(json.dumps(stored, indent=2, sort_keys=True) + "\n")
