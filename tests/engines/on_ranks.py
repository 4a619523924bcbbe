"""Run cases of the contract table on the ranks of torch's launcher; rank 0 writes their figures as JSON.

`torchrun --nproc-per-node 2 tests/engines/on_ranks.py figures.json fedavg-mlp fedproto-cnnxmlp`

With DEVICE=meta in the environment they compute on the pretended device of `test_device.py`.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.contract.case import Case
from tests.contract.table import CASES, run_case
from tests.engines.test_device import pretended

import polyfed as pf
from polyfed.engines import ranks
from polyfed.engines import shares as shared

SPOILT = Case("tests.engines.spoilt:Spoilt", ("mlp:1x16",))


def figures(name: str) -> Any:
    """Return all that must be equal: the history without times, and the sum of each client's weights."""
    (case,) = [case for case in (*CASES, SPOILT) if case.id == name]
    result = run_case(case, rounds=2, participation=0.6, device=os.environ.get("DEVICE", "cpu"))
    history = [{key: value for key, value in line.items() if key != "seconds"} for line in result.history]
    if os.environ.get("RANK", "0") != "0":
        try:
            result.models[0]
        except pf.InputError as error:
            assert "at rank 0" in str(error)
        return history
    weights = [float(sum(p.detach().double().sum() for p in model.parameters())) for model in result.models.values()]
    return json.loads(json.dumps([history, weights, result.summary()["cost"]["bytes_up"]]))


def figures_and_shares(name: str) -> Any:
    """Return the figures, and in how many exchanges this rank fused a share."""
    shares: list[None] = []
    fuse = ranks.fuse_share

    def counting(*given: Any) -> None:
        shares.append(None)
        fuse(*given)

    # In networks as small as these one tensor has most of the numbers: fusing is divided all the same.
    with patch.object(ranks, "fuse_share", counting), patch.object(shared, "MOST", 1.0):
        return figures(name), len(shares)


if __name__ == "__main__":
    with pretended() if os.environ.get("DEVICE") == "meta" else nullcontext():
        found = {name: figures_and_shares(name) for name in sys.argv[2:]}
    if os.environ.get("RANK", "0") == "0":
        Path(sys.argv[1]).write_text(json.dumps(found))
