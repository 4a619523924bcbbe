"""Run cases of the contract table on the ranks of torch's launcher; rank 0 writes their figures as JSON.

`torchrun --nproc-per-node 2 tests/engines/on_ranks.py figures.json fedavg-mlp fedproto-cnnxmlp`
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.contract.table import CASES, run_case

import polyfed as pf


def figures(name: str) -> Any:
    """Return all that must be equal: the history without times, and the sum of each client's weights."""
    (case,) = [case for case in CASES if case.id == name]
    result = run_case(case, rounds=2, participation=0.6)
    history = [{key: value for key, value in line.items() if key != "seconds"} for line in result.history]
    if os.environ.get("RANK", "0") != "0":
        try:
            result.models[0]
        except pf.InputError as error:
            assert "at rank 0" in str(error)
        return history
    weights = [float(sum(p.detach().double().sum() for p in model.parameters())) for model in result.models.values()]
    return json.loads(json.dumps([history, weights, result.summary()["cost"]["bytes_up"]]))


if __name__ == "__main__":
    found = {name: figures(name) for name in sys.argv[2:]}
    if os.environ.get("RANK", "0") == "0":
        Path(sys.argv[1]).write_text(json.dumps(found))
