"""The same server and sites in Flower's simulation runtime (Ray), where a cluster can take part.

This checks that a method runs unchanged on Flower; for speed on one machine use the in-process engines.
"""

from __future__ import annotations

import importlib.util
import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from flwr.app import Context as FlowerContext
from flwr.app import Message as Letter
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from polyfed.api import check_settings, own_public_classes
from polyfed.backends.flower.codec import pack, unpack
from polyfed.backends.flower.post import Post
from polyfed.backends.flower.serve import Gathering, Given, convene
from polyfed.backends.flower.site import Site
from polyfed.backends.flower.sitedata import SiteData
from polyfed.build import ModelSpec
from polyfed.core.errors import InputError
from polyfed.core.federation import Line, Settings
from polyfed.core.method import Method
from polyfed.core.party import Party
from polyfed.core.rundir import RunDirectory
from polyfed.data import Clients
from polyfed.result import Result

START = 300.0  # seconds until all nodes must be there
DEADLINE = 24 * 3600.0  # seconds: in a simulation everybody is waited for
ACTIONS = (("train", "work"), ("query", "describe"), ("query", "measure"), ("query", "name"))


def simulate(
    method: Method,
    clients: Clients,
    models: Sequence[ModelSpec],
    settings: Settings,
    *,
    feature_dim: int | None = None,
    feature_adapter: str = "linear",
    directory: RunDirectory | None = None,
    observers: Sequence[Callable[[Line], None]] = (),
    cpus: float = 1.0,
) -> Result:
    """Run a federation in Flower's simulation runtime, `cpus` processors for each client at work.

    Raises
    ------
    InputError
        When Ray is not installed, or the method pools data.
    """
    if importlib.util.find_spec("ray") is None:
        raise InputError("The engine 'flower' needs Ray: pip install 'flwr[simulation]'.")
    if method.pools_data:
        raise InputError(f"{method.name} puts all data in one place: use another engine.")
    check_settings(settings)
    from flwr.simulation import run_simulation

    names = [f"client-{number}" for number in range(len(clients))]
    found: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="polyfed-") as folder:
        run = {
            "federation": secrets.token_hex(8),
            "method": method.name,
            "options": {item.name: getattr(method, item.name) for item in fields(method)},
            "seed": settings.seed,
            "training": asdict(settings.training),
            "feature_dim": feature_dim,
            "feature_adapter": feature_adapter,
            "rounds": method.plan().rounds or settings.rounds,
            "public_classes": None,
        }
        apart = own_public_classes(clients)
        given = Given(method, settings, run, names, directory, clients.public, apart, clients.test)
        run_simulation(
            server_app=server_app(given, observers, found),
            client_app=client_app(clients, models, Path(folder)),
            num_supernodes=len(clients),
            backend_config={"client_resources": {"num_cpus": cpus, "num_gpus": 0.0}},
        )
    if not found:
        raise InputError("Flower's simulation ended without a result; its messages are above.")
    return found[0]


def server_app(given: Given, observers: Sequence[Callable[[Line], None]], found: list[Result]) -> ServerApp:
    """Return the server as a Flower app: the round loop over Flower's grid."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: FlowerContext) -> None:
        nodes = _all_nodes(grid, len(given.sites))
        seats = _ask_names(grid, list(nodes), given.sites)
        names = dict(enumerate(given.sites))
        post = Post(grid, lambda: nodes, seats, names, DEADLINE, len(names), DEADLINE, lambda text: None)
        met = Gathering(post, given.run, given.sites, lambda text: None).wait({})
        federation, infos = convene(post, given, met, observers)
        history = federation.run()
        ordered = [infos[client] for client in sorted(infos)]
        result = Result(
            method=given.method.name,
            seed=given.settings.seed,
            rounds=federation.rounds,
            history=history,
            cost=federation.meter,
            architectures=[info.architecture for info in ordered],
            samples=[info.samples for info in ordered],
            server_model=federation.server.models.get("main"),
        )
        server: Party = federation.server
        result.server = server
        found.append(result)

    return app


def client_app(clients: Clients, models: Sequence[ModelSpec], folder: Path) -> ClientApp:
    """Return all sites as one Flower app; each node has its own number."""
    app = ClientApp()

    def answer(letter: Letter, context: FlowerContext) -> Letter:
        number = int(context.node_config["partition-id"])
        head, blob = unpack(letter.content, "the server")
        if head.get("kind") == "name":
            return Letter(pack({"name": f"client-{number}"}), reply_to=letter)
        train, validation = clients.client(number)
        data = SiteData(
            train,
            clients.test,
            clients.num_classes,
            validation,
            clients.public,
            own_public_classes(clients),
            clients.class_names,
        )
        site = Site(f"client-{number}", models[number % len(models)], data, folder / str(number), say=lambda text: None)
        site.told.add(str(head["run"]["federation"]))  # nobody sits at an imaginary site
        return Letter(pack(*site.answer(head, blob)), reply_to=letter)

    for kind, action in ACTIONS:
        getattr(app, kind)(action)(answer)
    return app


def _all_nodes(grid: Any, count: int) -> dict[int, str]:
    """Wait until Flower has set up all its imaginary nodes."""
    end = time.monotonic() + START
    while len(found := list(grid.get_node_ids())) < count:
        if time.monotonic() > end:
            raise InputError(f"Flower's simulation has {len(found)} of {count} nodes after {START:.0f} s.")
        time.sleep(0.1)
    return dict.fromkeys(found, "here")


def _ask_names(grid: Any, nodes: list[int], names: list[str]) -> dict[int, int]:
    """Find out which node is which client."""
    letters = [Letter(pack({"kind": "name"}), node, "query.name") for node in nodes]
    seats = {}
    for letter in grid.send_and_receive(letters):
        head, _ = unpack(letter.content, "a node")
        seats[names.index(head["name"])] = letter.metadata.src_node_id
    return seats
