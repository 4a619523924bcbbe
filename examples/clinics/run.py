"""Four clinics, four learners: a forest, boosted trees, a logistic regression and a network learn from each other.

The trial on gum disease and early birth (823 women in four clinics) is built in. No rows leave a clinic: in each round
the clinics say what they think of women whose data is public, hear what all of them think on average, and learn from
that beside their own patients (FedMD).

    python examples/clinics/run.py [seeds] [results.json]
"""

import json
import sys
from pathlib import Path

import polyfed as pf
from polyfed.ops.estimate import estimate

LEARNERS = [
    "sklearn:RandomForestClassifier,n_estimators=100,min_samples_leaf=3",
    "sklearn:HistGradientBoostingClassifier,max_iter=50,max_leaf_nodes=8,early_stopping=false",
    "sklearn:LogisticRegression,C=0.1,max_iter=500",
    "mlp:1x32",
]
METHOD = pf.FedMD(subset=200, digest_loss="ce", public_epochs=0, private_epochs=3)
TRAINING = pf.Training(epochs=3, batch_size=16, lr=0.01)


def figures(method: pf.Method | str, seed: int) -> list[dict[str, float]]:
    """Return what each clinic's model reaches on the women of all clinics that nobody trained on."""
    clients = pf.split("opt", by=pf.ByColumn("clinic"), public=0.3, seed=seed)
    metrics = ["auroc", "log_loss"]
    result = pf.run(method, clients, LEARNERS, rounds=5, training=TRAINING, seed=seed, evaluate="end", metrics=metrics)
    found = result.accuracy()["metrics"]
    return [{name: found[name]["per_client"][clinic] for name in metrics} for clinic in range(len(clients))]


def main(seeds: int, out: Path | None) -> None:
    """Run every seed alone and together, and print means with 95 % intervals."""
    names = pf.split("opt", by=pf.ByColumn("clinic")).names
    alone = [figures("local", seed) for seed in range(seeds)]
    together = [figures(METHOD, seed) for seed in range(seeds)]
    rows = []
    for metric in ("auroc", "log_loss"):
        for clinic, name in [*enumerate(names), (None, "mean")]:
            before, after = (
                [sum(one[c][metric] for c in _of(clinic, names)) / len(_of(clinic, names)) for one in runs]
                for runs in (alone, together)
            )
            gained = [b - a for a, b in zip(before, after, strict=True)]
            learner = LEARNERS[clinic].split(",")[0] if clinic is not None else ""
            told = {
                kind: _told(values) for kind, values in (("alone", before), ("together", after), ("gained", gained))
            }
            rows.append({"clinic": name, "learner": learner, "metric": metric, **told})
            print(f"{metric:9} {name:5} {learner:40}", "  ".join(f"{kind} {in_words(v)}" for kind, v in told.items()))
    if out is not None:
        setting = {"learners": LEARNERS, "method": "fedmd", "seeds": seeds}
        out.write_text(json.dumps({"setting": setting, "rows": rows}, indent=1) + "\n")


def _of(clinic: int | None, names: tuple[str, ...]) -> list[int]:
    return [clinic] if clinic is not None else list(range(len(names)))


def _told(values: list[float]) -> dict[str, object]:
    found = estimate(values)
    return {"mean": found.mean, "low": found.low, "high": found.high, "values": values}


def in_words(told: dict[str, object]) -> str:
    """Return a mean with its interval."""
    return f"{told['mean']:+.3f} [{told['low']:+.3f}, {told['high']:+.3f}]"


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5, Path(sys.argv[2]) if len(sys.argv) > 2 else None)
