"""Measure what rules and privacy do, run by run, into results/trust: `python experiments/trust/measure.py robustness`.

Every finished run is one line of a file; a run that is there already is not done again, so that the same command goes
on where it was stopped. `--seeds 5` asks for all seeds of the page, `--share 0.1` for one share of malicious clients,
`--rule distance` for that rule beside none, `--part 1/2` and `--part 2/2` for the halves that two processes may do at
the same time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from families import FAMILIES, PRIVATE_FAMILIES, TRAINING, private

import polyfed as pf
from polyfed.core.errors import InputError, TrainingError
from polyfed.core.robust import fits
from polyfed.core.trust import RULES, Trust
from polyfed.methods import make

CLIENTS, ROUNDS = 10, 10
ATTACKS = ("signflip", "alie", "scale::-10", "scale::1000", "random")  # the first two at every share
SHARES = (0.1, 0.2, 0.4)
RESULTS = Path(__file__).parents[2] / "results" / "trust"
EPSILONS = (1.0, 2.0, 4.0, 8.0, None)
PRIVATE = pf.Training(epochs=1, lr=0.5, batch_size=96)
PRIVATE_ONCE = pf.Training(epochs=10, lr=0.5, batch_size=96)  # as many steps in one round
PRIVATE_CLIENTS = 5  # of nearly 300 samples: among less, noise drowns everything


@cache
def clients(seed: int, public: int | None, partition: str = "dirichlet:0.5", number: int = CLIENTS) -> pf.Clients:
    """Return digits, dealt to clients."""
    return pf.split(pf.load("digits"), number, partition, seed, public=public)


def robust_runs(seeds: int, shares: tuple[float, ...]) -> Iterator[dict[str, Any]]:
    """Yield what is to be run, the most telling first: a run that is not reached is "not measured" on the page."""
    small, *larger = shares
    wanted = [(0.0, ""), *((small, attack) for attack in ATTACKS)]
    wanted += [(share, attack) for attack in ATTACKS[:2] for share in larger]
    for share, attack in wanted:
        name, _, strength = attack.partition("::")
        text = f"{name}:{share:g}" + (f":{strength}" if strength else "") if share else None
        for seed in range(seeds):
            for method in FAMILIES:
                for rule in (None, *rules(share)):
                    yield {"seed": seed, "method": method, "share": share, "attack": text, "robust": rule}


def rules(share: float) -> list[str]:
    """Return every rule, told the share of malicious clients where it wants one (a fifth where nobody is)."""
    bad = min(share or 0.2, 0.4)
    return [f"{name}:{bad:g}" if name in ("trimmed", "krum", "multikrum") else name for name in RULES]


def robust_run(what: dict[str, Any]) -> dict[str, Any]:
    """Run one of them."""
    family = FAMILIES[what["method"]]
    method = make(what["method"], dict(family.get("options", {})))
    rule = Trust(robust=what["robust"]).rule()
    if rule is not None and not fits(rule, method):
        return {"refused": True}
    start = time.process_time()
    result = pf.run(
        method,
        clients(what["seed"], family.get("public")),
        family["models"],
        rounds=ROUNDS,
        training=family.get("training", TRAINING),
        seed=what["seed"],
        feature_dim=family.get("feature_dim"),
        evaluate="end",
        robust=what["robust"],
        attack=what["attack"],
        engine="sequential",
        workers=1,
        progress=False,
    )
    found = result.accuracy()
    return {
        "mean": found["mean"],
        "worst": found["worst"],
        "per_client": [round(value, 5) for value in found["per_client"]],
        "malicious": result.history[-1].get("malicious", []),
        "seconds": round(time.process_time() - start, 2),
    }


def private_runs(seeds: int, _: Any) -> Iterator[dict[str, Any]]:
    """Yield what is to be run: methods of which noise covers all that leaves (FedIN's features it does not)."""
    for seed in range(seeds):
        for method in PRIVATE_FAMILIES:
            for epsilon in EPSILONS:
                yield {"seed": seed, "method": method, "epsilon": epsilon}


def private_run(what: dict[str, Any]) -> dict[str, Any]:
    """Run one of them."""
    family = FAMILIES[what["method"]]
    result = pf.run(
        private(what["method"]),
        clients(what["seed"], family.get("public"), "iid", PRIVATE_CLIENTS),
        family["models"],
        rounds=ROUNDS,
        training=PRIVATE_ONCE if what["method"] == "ams" else PRIVATE,
        seed=what["seed"],
        feature_dim=family.get("feature_dim"),
        evaluate="end",
        engine="sequential",
        privacy=pf.Privacy(epsilon=what["epsilon"]),
        workers=1,
        progress=False,
    )
    found, spent = result.accuracy(), result.history[-1].get("privacy", {}).get("epsilon", {})
    return {"mean": found["mean"], "worst": found["worst"], "spent": max(spent.values(), default=None)}


KINDS = {"robustness": (robust_runs, robust_run), "privacy": (private_runs, private_run)}


def main() -> None:
    """Do what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=[*KINDS, "membership"])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--share", type=float, action="append")
    parser.add_argument("--method", action="append", choices=[*FAMILIES])
    parser.add_argument("--rule", action="append", choices=[*RULES])
    parser.add_argument("--part", default="1/1", help="which of how many processes: 1/2, 2/2")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after the run at hand")
    given = parser.parse_args()
    torch.set_num_threads(1)  # networks are tiny: a second thread costs more than it brings
    if given.kind == "membership":
        from membership import measure

        measure(RESULTS / "membership.jsonl", given.seeds, given.method or PRIVATE_FAMILIES)
        return
    listed, work = KINDS[given.kind]
    path = RESULTS / f"{given.kind}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    done = {key(json.loads(line)) for line in path.read_text().splitlines()} if path.is_file() else set()
    part, parts = (int(number) for number in given.part.split("/"))
    end = time.monotonic() + 60 * given.minutes
    for number, what in enumerate(listed(given.seeds, tuple(given.share or SHARES))):
        if number % parts != part - 1 or key(what) in done or (given.method and what["method"] not in given.method):
            continue
        if given.rule and (what.get("robust") or given.rule[0]).partition(":")[0] not in given.rule:
            continue
        if time.monotonic() > end:
            print("Stopped: the same command goes on.")
            return
        try:
            found = work(what)
        except (TrainingError, InputError) as error:
            found = {"error": str(error)}
        with path.open("a") as file:  # one short write at the end of the file: two processes do not mix their lines
            file.write(json.dumps(what | found) + "\n")
    print("Everything is measured.")


def key(line: dict[str, Any]) -> str:
    """Return what tells one run from another."""
    return json.dumps([line.get(name) for name in ("seed", "method", "share", "attack", "robust", "epsilon")])


if __name__ == "__main__":
    main()
