"""How well the mean of the clients' decoders decodes, when it is taken once at the end and when in every round.

python experiments/papers/fedvtc/decoders.py results/papers/fedvtc-decoders.json [--seeds 3] [--rounds 30]

Squared error of decoded against real training images (pixels in [0, 1], mean over clients): with each client's own
decoder, with the mean of all decoders, with that mean after its BatchNorm statistics were taken anew
(`norm_statistics="recalibrated"`), and of the mean training image, which needs no decoder.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from polyfed.api import prepare
from polyfed.core.federation import Federation
from polyfed.core.settings import Evaluation, Settings
from polyfed.experiment import read_experiment
from polyfed.methods.fedvtc import FedVTC
from polyfed.models.vtc import decode, recalibrated
from polyfed.ops.aggregate import plain_mean
from polyfed.ops.estimate import estimate

EXPERIMENT = Path(__file__).with_name("table1.toml")
IMAGES = 300  # of each client


def trained(upload: str, seed: int, rounds: int) -> Federation:
    """Return a federation after its rounds, without fine-tuning."""
    told = read_experiment(EXPERIMENT).base
    settings = Settings(rounds, seed, told.training, evaluation=Evaluation(rounds))
    method = FedVTC(vtc_upload=upload, finetune=False)
    federation, _ = prepare(method, told.data.load(seed), told.models.names, settings, told.models)
    federation.run(False)
    return federation


@torch.no_grad()
def errors(federation: Federation) -> dict[str, float]:
    """Return the mean squared errors, averaged over the clients."""
    backend: Any = federation.backend
    states = [record.states["vtc"] for record in backend.records.values()]
    shared = {name: plain_mean(s[name] for s in states) for name, t in states[0].items() if t.is_floating_point()}
    memory = federation.server.memory
    found: dict[str, list[float]] = {}
    for client in sorted(backend.records):
        party = backend.open(client, federation.ctx, scratch=True)
        own = party.models["vtc"]
        mean = copy.deepcopy(own)
        mean.load_state_dict(shared, strict=False)  # all but the integer counters of BatchNorm
        fresh = recalibrated(mean, memory["prototypes"], memory["sigma"], torch.Generator().manual_seed(0))
        x = party.train.inputs()[:IMAGES]
        scale = party.train.scaling.channels()
        real = x * scale["std"] + scale["mean"]
        latents = party.main.eval().features(x)
        for name, decoder in {"own": own, "mean": mean, "mean, recalibrated": fresh}.items():
            found.setdefault(name, []).append(float((decode(decoder, latents) - real).square().mean()))
        found.setdefault("mean image", []).append(float((real.mean(0) - real).square().mean()))
    return {name: fmean(values) for name, values in found.items()}


def main() -> None:
    """Run, print a Markdown table, write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=30)
    told = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {}
    for upload in ("final", "round"):
        found[upload] = [errors(trained(upload, seed, told.rounds)) for seed in range(told.seeds)]
    names = list(found["final"][0])
    print(f"| decoders averaged | {' | '.join(names)} |\n|{' --- |' * (len(names) + 1)}")
    for upload, runs in found.items():
        cells = []
        for name in names:
            error = estimate([run[name] for run in runs])
            assert error is not None
            cells.append(f"{error.mean:.4f} ± {error.half or 0.0:.4f}")
        print(f"| {upload} | {' | '.join(cells)} |")
    told.out.write_text(json.dumps({"rounds": told.rounds, "errors": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
