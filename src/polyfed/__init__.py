"""polyfed: federated learning for parties with different neural networks.

The names below are the public API; they are imported on first use, so `import polyfed` is instant.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "run": "polyfed.api",
    "resume": "polyfed.api",
    "fuse": "polyfed.fusion",
    "Result": "polyfed.result",
    "load": "polyfed.data",
    "split": "polyfed.data",
    "Clients": "polyfed.data",
    "Dataset": "polyfed.data",
    "IID": "polyfed.data",
    "Dirichlet": "polyfed.data",
    "LabelSets": "polyfed.data",
    "Shards": "polyfed.data",
    "Quantity": "polyfed.data",
    "ByColumn": "polyfed.data",
    "adapt": "polyfed.models",
    "with_feature_dim": "polyfed.models",
    "Training": "polyfed.core.party",
    "Party": "polyfed.core.party",
    "ClientInfo": "polyfed.core.party",
    "Context": "polyfed.core.party",
    "Participation": "polyfed.core.method",
    "Method": "polyfed.core.method",
    "Step": "polyfed.core.method",
    "Plan": "polyfed.core.method",
    "Message": "polyfed.core.message",
    "Stage": "polyfed.core.stage",
    "Update": "polyfed.core.stage",
    "Draw": "polyfed.core.stage",
    "Batch": "polyfed.core.stage",
    "PolyfedError": "polyfed.core.errors",
    "InputError": "polyfed.core.errors",
    "Local": "polyfed.methods.local",
    "Centralized": "polyfed.methods.centralized",
    "FedAvg": "polyfed.methods.fedavg",
    "FedProx": "polyfed.methods.fedprox",
    "FedIN": "polyfed.methods.fedin",
    "HeteroFL": "polyfed.methods.heterofl",
    "FedFD": "polyfed.methods.fedfd",
    "FedProto": "polyfed.methods.fedproto",
    "FedVTC": "polyfed.methods.fedvtc",
    "FedMD": "polyfed.methods.fedmd",
    "FedMDGlobal": "polyfed.methods.fedmd_global",
    "AMS": "polyfed.methods.ams",
    "Ensemble": "polyfed.methods.ensemble",
    "OneShotFedAvg": "polyfed.methods.oneshot_fedavg",
    "PFNM": "polyfed.methods.pfnm",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'polyfed' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
