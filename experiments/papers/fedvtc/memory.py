"""What one update of FedVTC keeps in memory, against local training, for the five ResNets of the paper (its Fig. 3).

python experiments/papers/fedvtc/memory.py results/papers/fedvtc-memory.json [--batch 16]

Parameters, gradients and the activations that autograd keeps, counted (`polyfed.analysis.memory.update_memory`): local
training, the two alternating updates, the joint one, and the alternating ones without distribution matching.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from polyfed.analysis.memory import update_memory
from polyfed.build import make_blueprint
from polyfed.core.party import Context, Party, PartyData
from polyfed.core.samples import Samples
from polyfed.core.settings import Training
from polyfed.core.stage import Batch, Update
from polyfed.methods.fedvtc import FedVTC
from polyfed.methods.local import Local

NETWORKS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
SHAPE, CLASSES, LATENTS = (3, 32, 32), 10, 4096
METHODS = {
    "alternating": FedVTC(),
    "alternating, λ = 0": FedVTC(lambda_dm=0.0),
    "joint": FedVTC(joint_training=True),
}


def sizes_of(network: str, batch_size: int) -> dict[str, int]:
    """Return the bytes of every kind of update of a network."""
    blueprint = make_blueprint(network, network, SHAPE, CLASSES, 0, LATENTS, "linear")
    ctx = Context(0, 1, 1, Training(), CLASSES, SHAPE, 1, blueprints={network: blueprint})
    rng = torch.Generator().manual_seed(0)
    x, y = torch.rand(batch_size, *SHAPE, generator=rng), torch.arange(batch_size) % CLASSES
    found: dict[str, int] = {}
    for name, method in METHODS.items():
        assert blueprint.build is not None
        client = Party(0, None, PartyData(Samples(x, y)))
        client.models["main"] = blueprint.build()
        method.setup_client(client, ctx)
        sigma, prototypes = torch.ones(LATENTS), torch.zeros(CLASSES, LATENTS)
        client.inbox.data = {"sigma": sigma, "prototypes": prototypes, "classes": torch.arange(CLASSES)}
        noise = {key: torch.randn(batch_size, LATENTS, generator=rng) for key in method.draws(client)}
        stage = next(method.stages(client, ctx))
        for place, update in enumerate(stage.all_updates()):
            label = name if method.joint_training else f"{name}, step {place + 1}"
            found[label] = update_memory(update, client.models, Batch(x, y, noise), stage.aux)["total"]
        if "local" not in found:
            alone = {"main": client.main}
            found["local"] = update_memory(Update((Local().loss,), {"main": None}), alone, Batch(x, y, {}), {})["total"]
    return found


def main() -> None:
    """Count, print a Markdown table, write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--batch", type=int, default=16)
    told = parser.parse_args()
    found = {network: sizes_of(network, told.batch) for network in NETWORKS}
    names = sorted(found[NETWORKS[0]], key=lambda name: name != "local")
    print(f"| | {' | '.join(names)} |\n|{' --- |' * (len(names) + 1)}")
    for network, sizes in found.items():
        print(f"| {network} | {' | '.join(f'{sizes[name] / 1e6:.0f}' for name in names)} |")
    told.out.write_text(json.dumps({"batch": told.batch, "bytes": found}, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
