"""What a finished run is worth, in the papers' units: accuracies in percent, traffic in MB, rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from polyfed.core.checkpoint import read_json
from polyfed.core.rundir import RunDirectory

Line = Mapping[str, Any]
Values = dict[str, float]  # quantity -> value of one run


def values_of(folder: Path, last: int = 1, target: float | None = None, of: str = "global") -> Values:
    """Return the quantities of a run.

    `local`, `worst`, `best`: clients' own networks on the common test set; `global`: the server's; `before`: clients
    before what the method does after its rounds; `wobble` and `unrest`: spread of the global accuracy and of the
    clients' over the last rounds; `area`: mean over all rounds;
    `initial`, `distilled`, `personalized`, `gap`: stages; `rounds`: until the target (one more than there are where it
    was not reached); `mb_up`, `mb_down` of a client; `memory` in MB; `seconds` that
    it took, without training that another run of its seed had done already.

    Parameters
    ----------
    folder
        Its directory.
    last
        How many of the last measured rounds a mean is taken over.
    target
        Accuracy in percent for `rounds`.
    of
        Whose accuracy `area` and `rounds` are: `global` of the server's network where there is one, `local` of clients.
    """
    directory = RunDirectory(folder)
    return values_from(directory.history(), read_json(folder / "result.json"), last, target, of)


def values_from(
    history: Sequence[Line], result: Line, last: int = 1, target: float | None = None, of: str = "global"
) -> Values:
    """Return the same from a history and a result."""
    measured = [line for line in history if "mean" in line.get("accuracy", {})]
    rounds = [line for line in measured if line["phase"] == "round"]
    after = [line for line in measured if line["phase"] == "after"]
    tail = after or rounds[-last:] or measured[-1:]
    own = [line["accuracy"].get("own", line["accuracy"]) for line in tail]  # one-shot fusion leaves clients as they are
    found = {
        "local": 100 * fmean(part["mean"] for part in own),
        "worst": 100 * fmean(part["worst"] for part in own),
        "best": 100 * fmean(max(part["per_client"]) for part in own),
    }
    served = [100 * line["accuracy"]["global"] for line in tail if line["accuracy"].get("global") is not None]
    if served:
        found["global"] = fmean(served)
        if len(served) > 1:
            found["wobble"] = pstdev(served)
    if len(own) > 1:
        found["unrest"] = 100 * pstdev(part["mean"] for part in own)
    if rounds:
        found["area"] = fmean(_followed(rounds, of))
    if after and rounds:
        found["before"] = 100 * fmean(line["accuracy"]["mean"] for line in rounds[-last:])
    found |= _stages(history, last)
    if "distilled" in found:
        found["personalized"] = found["local"]
        found["gap"] = found["distilled"] - found["personalized"]
    if target is not None:
        reached = [line["round"] for line, value in zip(rounds, _followed(rounds, of), strict=True) if value >= target]
        found["rounds"] = float(reached[0] if reached else rounds[-1]["round"] + 1)
    cost, clients = result["cost"], len(result["architectures"])
    found["mb_up"] = cost["bytes_up"] / clients / 1e6
    found["mb_down"] = cost["bytes_down"] / clients / 1e6
    found["memory"] = cost["peak_memory"] / 1e6
    saved = sum(line.get("seconds", {}).get("saved", 0.0) for line in history)
    found["seconds"] = cost["seconds"]["total"] - saved  # what it took here
    return {name: round(value, 4) for name, value in found.items()}


def _stages(history: Sequence[Line], last: int) -> Values:
    """Return the mean accuracy at each named stage: of the last rounds, or before them."""
    found: dict[str, list[float]] = {}
    for line in [line for line in history if line["phase"] == "round" and "stages" in line][-last:]:
        for name, part in line["stages"].items():
            found.setdefault(name, []).append(part["mean"])
    for line in history:
        if line["phase"] != "round":
            found |= {name: [part["mean"]] for name, part in line.get("stages", {}).items()}
    return {name: 100 * fmean(values) for name, values in found.items()}


def _followed(rounds: Sequence[Line], of: str) -> list[float]:
    """Return the accuracy in percent by round: of the server's network, if that is meant and there is one."""
    shared = [line["accuracy"].get("global") for line in rounds]
    local = of == "local" or None in shared
    return [100 * value for value in ([line["accuracy"]["mean"] for line in rounds] if local else shared)]


def curve_of(folder: Path, quantity: str) -> list[list[float]]:
    """Return [round, accuracy in percent] of every measured line: `local`, `global` or a stage."""
    found = []
    for line in RunDirectory(folder).history():
        accuracy = line.get("accuracy", {})
        value = {"local": accuracy.get("mean"), "global": accuracy.get("global")}.get(
            quantity, line.get("stages", {}).get(quantity, {}).get("mean")
        )
        if value is not None:
            found.append([line["round"] + (line["phase"] == "after"), round(100 * value, 2)])
    return found


def held_accuracy(folder: Path) -> float:
    """Return the server's accuracy in percent on test samples of labels that somebody holds.

    A label that no client drew cannot be learned; the AMS paper leaves its samples out.
    """
    import torch

    from polyfed.api import prepare
    from polyfed.core.evaluate import measure
    from polyfed.stored import read_config

    config = read_config(folder)
    clients = config.data.load(config.seed)
    federation = prepare(config.method, clients, config.models.names, config.settings(), config.models)
    directory = RunDirectory(folder)
    federation.directory = directory
    federation.restore()
    counts = torch.tensor([part.label_counts(clients.num_classes) for part in clients.train]).sum(0)
    rows = torch.nonzero(counts[clients.test.labels()] > 0).flatten()
    found = measure(federation.method, federation.server, clients.test.select(rows), federation.ctx)
    assert found.accuracy is not None
    return round(100 * found.accuracy, 4)
