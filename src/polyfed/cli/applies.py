"""`polyfed methods --for FILE`: which methods apply to the networks and data of an experiment, and why others not."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from polyfed.build import make_parties
from polyfed.core.errors import InputError
from polyfed.core.method import Method
from polyfed.core.needs import missing
from polyfed.experiment import Experiment
from polyfed.methods import registry
from polyfed.prepare import Parties, make_federation


def applicable(experiment: Experiment, kinds: Mapping[str, type[Method]] | None = None) -> list[dict[str, Any]]:
    """Return a row for each method, or each of these: family and name, whether it applies, what is missing otherwise.

    Options and settings that the experiment has for a label of a method's name count; nothing is trained.

    Raises
    ------
    InputError
        When no method applies, and all for the same reason: a model that nobody knows.
    """
    clients = experiment.base.data.load(experiment.base.seed)  # what is not there is said once
    made: dict[Any, Any] = {}  # networks are built once for each number of outputs
    rows = []
    for name, kind in sorted((kinds or registry()).items(), key=lambda item: (item[1].family, item[0])):
        row = {"family": kind.family, "method": name}
        try:
            config = experiment.config(name)
            method, networks = config.method, config.models
            outputs = method.outputs(clients.num_classes, clients.own_public_classes())
            key = networks, outputs, "label_counts" in method.requirements()
            if key not in made:
                with warnings.catch_warnings(action="ignore"):  # which weights count is the run's business
                    made[key] = make_parties(
                        method,
                        clients,
                        networks.names,
                        outputs,
                        config.seed,
                        networks.feature_dim,
                        networks.feature_adapter,
                    )
            infos, data, blueprints = made[key]
            lacks = missing(method, infos, blueprints, clients.public, clients.input_shape, clients.task)
            if lacks is None:  # what it says of training and of its own options when a run begins
                with warnings.catch_warnings(action="ignore"):
                    make_federation(method, clients, Parties(infos, data, blueprints, outputs), config.settings())
        except InputError as error:
            lacks = str(error).removeprefix(f"{name}: ")
        rows.append({**row, "applies": lacks is None, "needs": lacks or ""})
    reasons = {row["needs"] for row in rows}
    if len(rows) > 1 and len(reasons) == 1 and (reason := reasons.pop()):  # of the file, not of any method
        raise InputError(reason)
    return rows
