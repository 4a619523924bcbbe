"""A folder with one small entry, `ams/table9`."""

import pytest

ENTRY = """
data = "digits"
limit = [120, 60]
clients = 3
partition = "labels:3-4"
models = ["mlp:1x8"]
rounds = 2
epochs = 2
lr = 0.1
seeds = 5
compare = ["ams", "ensemble", "wild"]
[methods.wild]
method = "fedavg"
settings = {lr = 1e30}
[scales.paper]
rounds = 1
[paper]
title = "Table 9: a test"
quantity = "global"
held = true
claims = ["ams - ensemble", "wild - ensemble"]
fixes = {wild = "a wild rate"}
[paper.mini]
swapped = true
[paper.paper]
[paper.cases.two]
title = "two"
numbers.global = {ams = 80.0, ensemble = 70.0, wild = 1.0}
"""


@pytest.fixture
def place(tmp_path):
    folder = tmp_path / "experiments" / "papers" / "ams"
    folder.mkdir(parents=True)
    (folder / "table9.toml").write_text(ENTRY)
    return tmp_path
