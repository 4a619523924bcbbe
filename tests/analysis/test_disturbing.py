"""The experiment in two dimensions: the data, the training of many networks at once, and what is reported."""

import json

import pytest
import torch
from torch import nn

from polyfed.analysis.disturbing import disturbing, initial, main, outputs, sample_band, summary, train

pytestmark = pytest.mark.xdist_group("disturbing")  # its networks are trained once


@pytest.fixture(scope="module")
def found():
    return disturbing(12, epochs=300, examples=(3,))


def test_points_lie_in_the_band_and_labels_say_above_or_below():
    x, y = sample_band(2000, -2.0, 0.5, torch.Generator().manual_seed(0))
    assert float(x[:, 0].min()) >= -2 and float(x[:, 0].max()) <= 0.5
    height = x[:, 1] - x[:, 0].abs()
    assert float(height.abs().max()) <= 1
    assert torch.equal(y, (height > 0).long())
    assert 0.45 < float(y.float().mean()) < 0.55


def test_networks_trained_together_are_those_trained_alone():
    rng = torch.Generator().manual_seed(0)
    data = [sample_band(40, -2.0, 0.5, rng) for _ in range(3)]
    starts = [initial(rng) for _ in range(3)]
    together = train(
        torch.stack([x for x, _ in data]),
        torch.stack([y for _, y in data]),
        {name: torch.stack([s[name] for s in starts]) for name in starts[0]},
        30,
        0.5,
        "leaky_relu",
    )
    for place, ((x, y), start) in enumerate(zip(data, starts, strict=True)):
        net = nn.Sequential(nn.Linear(2, 1), nn.LeakyReLU(), nn.Linear(1, 2, bias=False))
        net[0].weight.data, net[0].bias.data = start["w1"].view(1, 2).clone(), start["b"].view(1).clone()
        net[2].weight.data = start["w2"].view(2, 1).clone()
        optimizer = torch.optim.Adam(net.parameters(), lr=0.5)
        for _ in range(30):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
        mine = {name: value[place : place + 1] for name, value in together.items()}
        assert torch.allclose(outputs(mine, x.unsqueeze(0))[0], net(x), atol=1e-3)


def test_fusing_often_fails_and_often_works(found):
    # Each network alone knows its own half; the sum is near perfect for some seeds and no gain for the others.
    totals = found["summary"]
    assert 0.7 < totals["left"] < 0.87 and 0.7 < totals["right"] < 0.87
    assert 0.25 <= totals["failed"] <= 0.85
    assert totals["fused_highest"] > 0.92
    assert totals["fused_lowest"] < 0.8


def test_a_seed_gives_the_same_run_whoever_else_runs(found):
    alone = disturbing([5], epochs=300)["runs"][0]
    assert alone == pytest.approx(found["runs"][5], abs=0.01)
    assert alone["seed"] == 5


def test_examples_hold_points_labels_and_probabilities(found):
    example = found["examples"]["3"]
    assert len(example["points"]) == len(example["labels"]) == len(example["above"]["fused"]) == 300
    right = [(p > 0.5) == bool(y) for p, y in zip(example["above"]["fused"], example["labels"], strict=True)]
    assert sum(right) / 300 == pytest.approx(found["runs"][3]["fused"], abs=0.01)
    json.dumps(found)


def test_the_summary_by_hand():
    rows = [
        {"left": 0.8, "right": 0.7, "fused": 0.97, "ams_top1": 0.9, "ensemble": 0.9},
        {"left": 0.8, "right": 0.7, "fused": 0.8, "ams_top1": 0.7, "ensemble": 0.8},
        {"left": 0.6, "right": 0.8, "fused": 0.7, "ams_top1": 0.8, "ensemble": 0.7},
    ]
    totals = summary(rows)
    assert totals["failed"] == pytest.approx(2 / 3)
    assert totals["above_95"] == pytest.approx(1 / 3)
    assert totals["ensemble"] == pytest.approx(0.8)


def test_it_runs_from_the_command_line(capsys):
    main(["--seeds", "2", "--epochs", "5", "--runs"])
    printed = json.loads(capsys.readouterr().out)
    assert printed["summary"]["seeds"] == 2 and len(printed["runs"]) == 2
