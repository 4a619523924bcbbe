"""One method of each family, with the networks and options that the figures about trust are measured with."""

from __future__ import annotations

from typing import Any

import polyfed as pf
from polyfed.core.method import Method
from polyfed.methods import make

# Whole clients as batches: a run takes about a second, so that all of them take an hour and not a day.
TRAINING = pf.Training(epochs=4, lr=0.3, momentum=0.9, batch_size=256)
FEATURES = pf.Training(epochs=4, lr=0.1, momentum=0.9, batch_size=64)
ONCE = pf.Training(epochs=30, lr=0.3, momentum=0.9, batch_size=256)
# One method of each family: its networks, the size of features, public data, and hyper-parameters.
FAMILIES: dict[str, dict[str, Any]] = {
    "fedavg": {"models": ("mlp:1x64",)},
    "heterofl": {"models": ("mlp:1x64@1", "mlp:1x64@0.5")},
    "fedin": {"models": ("mlp:2x64", "mlp:3x64"), "options": {"lam": 2.0}, "training": FEATURES},
    "fedproto": {"models": ("mlp:1x64", "mlp:2x64"), "feature_dim": 32},
    "fedmd": {"models": ("mlp:1x64", "mlp:2x64"), "public": 200},
    "fml": {"models": ("mlp:1x64", "mlp:2x64")},
    "ams": {"models": ("mlp:1x64", "mlp:2x64"), "training": ONCE},
}
# Those of which noise covers all that leaves: FedIN's features of single samples it does not.
PRIVATE_FAMILIES = ("fedavg", "heterofl", "fedproto", "fedmd", "fml", "ams")


def private(name: str) -> Method:
    """Return a method with the options under which all that leaves can be covered by noise."""
    options = dict(FAMILIES[name].get("options", {}))
    if name == "heterofl":
        options["mask"] = False  # the mask needs label counts, which are told at joining
    if name == "fedmd":
        options |= {"public_epochs": 0, "private_epochs": 0}
    return make(name, options)
