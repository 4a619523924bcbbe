"""Finished runs for analyses: their clients' data and models, built again from what the run directory says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.config import Config
from polyfed.core.checkpoint import read_tree
from polyfed.core.errors import InputError, RunDirectoryError
from polyfed.core.learner import Learner
from polyfed.core.weights import read_state
from polyfed.data import Clients
from polyfed.engines.inprocess import InProcess
from polyfed.models.contract import evaluating
from polyfed.trained import no_file


@dataclass(frozen=True)
class OpenedRun:
    """What an analysis looks at."""

    path: Path
    label: str
    seed: int
    config: Config
    clients: Clients
    models: dict[int, nn.Module]  # by client, as they were after the last round
    architectures: dict[int, str]


def open_run(path: str | Path) -> OpenedRun:
    """Read a finished run that was started from names (data, models and method).

    Raises
    ------
    RunDirectoryError
        When the run is not finished, or used objects that only its own script can make.
    """
    from polyfed.api import prepare
    from polyfed.stored import read_config

    path = Path(path)
    config = read_config(path)
    if not (path / "result.json").is_file():
        raise RunDirectoryError(f"The run in {path} is not finished: continue it with 'polyfed resume {path}'.")
    if config.script:
        raise RunDirectoryError(
            f"The run in {path} used {' and '.join(config.script)} from a script: call the functions of "
            "polyfed.analysis there, with result.models."
        )
    clients = config.data.load(config.seed)
    backend = prepare(config.method, clients, config.models.names, config.settings(), config.models).backend
    infos, blueprints = backend.infos, backend.blueprints
    models = {}
    for client, info in sorted(infos.items()):
        file = path / "models" / f"client-{client}.safetensors"
        if not file.is_file():
            raise RunDirectoryError(f"There is no {file}: {no_file(client, len(infos))}")
        build = blueprints[info.architecture].build
        assert build is not None  # the models were named, so they can be built here
        model = models[client] = build().eval()
        if isinstance(model, Learner):
            assert isinstance(backend, InProcess)
            model.recall(read_tree(file), backend.store.data[client], client)
        else:
            model.load_state_dict(read_state(file))
    names = {client: info.architecture for client, info in infos.items()}
    return OpenedRun(path, config.label, config.seed, config, clients, models, names)


def stage_outputs(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Return what a model makes of inputs, stage by stage: stem, its stages or layers, features, logits.

    Each as `[rows, values]`, in prediction mode.
    """
    found: dict[str, Tensor] = {}
    handles = []
    for name, module in model.named_modules():
        parts = name.removeprefix("model.").split(".")  # a model with projected features holds the real one in `model`
        if len(parts) == 2 and parts[0] in ("stages", "layers") and parts[1].isdigit():
            stage = f"stage {int(parts[1]) + 1}"
            handles.append(
                module.register_forward_hook(
                    lambda _m, _i, output, stage=stage: found.update({stage: output.flatten(1)})
                )
            )
    try:
        with evaluating(model), torch.no_grad():
            if not hasattr(model, "features"):
                raise InputError("This model has no features: wrap it with polyfed.adapt(...).")
            net: Any = model  # torch declares every attribute of a module a tensor or a module
            before = {"stem": net.stem(x).flatten(1)} if hasattr(model, "stem") else {}
            features = net.features(x)
            logits = net.head(features)
    finally:
        for handle in handles:
            handle.remove()
    return {**before, **found, "features": features.flatten(1), "logits": logits.flatten(1)}


def first_samples(run: OpenedRun, number: int, label: int | None = None) -> tuple[Tensor, Tensor]:
    """Return inputs and labels of the first test samples (of one class, if asked)."""
    labels = run.clients.test.labels()
    rows = torch.arange(len(labels)) if label is None else torch.nonzero(labels == label).flatten()
    if not len(rows):
        raise InputError(f"There is no test sample of class {label}.")
    rows = rows[:number]
    return run.clients.test.inputs(rows), labels[rows]
