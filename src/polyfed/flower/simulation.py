"""The same server and sites in Flower's simulation runtime (Ray), where a cluster can take part.

This checks that a method runs unchanged on Flower; for speed on one machine use the in-process engines.
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.app import Context as FlowerContext
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from polyfed.config import Networks
from polyfed.core.errors import InputError, PolyfedError
from polyfed.core.federation import Federation
from polyfed.core.method import Method
from polyfed.core.metrics import Metric
from polyfed.core.party import Blueprint
from polyfed.core.rundir import RunDirectory
from polyfed.core.runstate import Observer
from polyfed.core.settings import Settings
from polyfed.data import Clients
from polyfed.flower.codec import Head, pack, unpack
from polyfed.flower.mailbox import Mailbox
from polyfed.flower.registration import Registration
from polyfed.flower.running import Given, make_federation
from polyfed.flower.serve import run_head
from polyfed.flower.site import Site
from polyfed.flower.sitedata import SiteData
from polyfed.flower.sitefolder import last_state
from polyfed.specs import ModelSpec

START = 300.0  # seconds until all nodes must be there
DEADLINE = 24 * 3600.0  # seconds: in a simulation everybody is waited for
ACTIONS = (("train", "work"), ("query", "describe"), ("query", "measure"), ("query", "name"))


def check_simulation(method: Method, settings: Settings) -> None:
    """Refuse what Flower's simulation cannot do, before anything is written.

    Raises
    ------
    InputError
        When Ray is not installed, the method pools data, or a setting is not possible at sites.
    """
    if importlib.util.find_spec("ray") is None:
        raise InputError("The engine 'flower' needs Ray: pip install 'polyfed[simulation]'.")
    if method.pools_data:
        raise InputError(f"{method.name} puts all data in one place: use another engine.")
    if settings.evaluation.samples is not None:
        raise InputError("evaluate_samples is not for the engine 'flower': its sites measure on all test samples.")


def simulate(
    method: Method,
    settings: Settings,
    clients: Clients,
    models: Sequence[ModelSpec],
    networks: Networks = Networks(),  # noqa: B008 (frozen)
    directory: RunDirectory | None = None,
    observers: Sequence[Observer] = (),
    resume: bool = False,
    metrics: tuple[Metric, ...] = (),
) -> tuple[Federation, dict[int, Any]]:
    """Run a federation in Flower's simulation runtime, one processor for each client at work.

    The sites' states are files, as in a real federation: in the run directory, so that a run can be resumed.

    Returns
    -------
    tuple
        The finished federation, and the states that the sites ended up with, by client.

    Raises
    ------
    InputError
        See `check_simulation`.
    """
    check_simulation(method, settings)
    from flwr.simulation import run_simulation

    # The sites' states follow the checkpoint.
    settings = replace(settings, execution=replace(settings.execution, checkpoint_seconds=0.0))
    keep = nullcontext(str(directory.path / "sites")) if directory else tempfile.TemporaryDirectory(prefix="polyfed-")
    with keep as folder:
        # The folder is this run's alone, so that its seed tells it from others.
        run = run_head(method, settings, networks, f"{settings.seed & 0xFFFFFFFF:016x}")
        names = [f"client-{number}" for number in range(len(clients))]
        apart = clients.own_public_classes()
        given = Given(method, settings, run, names, directory, clients.public, apart, clients.test, metrics=metrics)
        server = SimulatedServer(given, observers, resume)
        run_simulation(
            server_app=server.app(),
            client_app=client_app(method, clients, models, Path(folder), metrics),
            num_supernodes=len(clients),
            backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
        )
        if server.error is not None:
            raise server.error
        if server.federation is None or not server.federation.history:
            raise PolyfedError("Flower's simulation ended without a result; its messages are above.")
        states = {number: last_state(Path(folder) / str(number), run) for number in range(len(clients))}
    return server.federation, {number: state for number, state in states.items() if state is not None}


class SimulatedServer:
    """The server as a Flower app: the round loop over Flower's grid. Flower swallows errors, so they are kept here."""

    def __init__(self, given: Given, observers: Sequence[Observer], resume: bool) -> None:
        self.given = given
        self.observers = observers
        self.resume = resume
        self.federation: Federation | None = None
        self.error: BaseException | None = None

    def app(self) -> ServerApp:
        """Return the app."""
        app = ServerApp()

        @app.main()
        def main(grid: Grid, context: FlowerContext) -> None:
            try:
                self.perform(grid)
            except BaseException as error:
                self.error = error

        return app

    def perform(self, grid: Grid) -> None:
        """Find the sites and run the rounds."""
        given = self.given
        nodes = _all_nodes(grid, len(given.sites))
        node_ids = _ask_names(grid, list(nodes), given.sites)
        names = dict(enumerate(given.sites))
        mailbox = Mailbox(grid, lambda: nodes, node_ids, names, DEADLINE, len(names), DEADLINE, lambda text: None)
        mailbox.budgets = self.given.settings.privacy.epsilon is not None
        introductions = Registration(mailbox, given.run, given.sites, lambda text: None).wait({})
        self.federation, _ = make_federation(mailbox, given, introductions, self.observers)
        self.federation.run(self.resume)


class SimulatedSite(Site):
    """A site at which nobody sits: it has nothing to be told, and the method may be anybody's own class."""

    fixed: Method
    measures: tuple[Metric, ...] = ()

    def metrics(self, run: Mapping[str, Any]) -> tuple[Metric, ...]:
        """Return the metrics that were given to the simulation."""
        return self.measures

    def method(self, head: Head) -> Method:
        """Return the method that was given to the simulation."""
        return self.fixed

    def tell(self, method: Method, blueprint: Blueprint, run: Mapping[str, Any]) -> None:
        """Say nothing."""


def client_app(
    method: Method,
    clients: Clients,
    models: Sequence[ModelSpec],
    folder: Path,
    metrics: tuple[Metric, ...] = (),
) -> ClientApp:
    """Return all sites as one Flower app; each node has its own number."""
    app = ClientApp()

    def answer(message: FlowerMessage, context: FlowerContext) -> FlowerMessage:
        number = int(context.node_config["partition-id"])
        head, blob = unpack(message.content, "the server")
        if head.get("kind") == "name":
            return FlowerMessage(pack({"name": f"client-{number}"}), reply_to=message)
        train, validation = clients.client(number)
        data = SiteData(
            train,
            clients.test,
            clients.num_classes,
            validation,
            clients.public,
            clients.own_public_classes(),
            clients.class_names,
            clients.own_tests(number).get(number),
            clients.task,
            clients.input_shape,
        )
        model = models[number % len(models)]
        site = SimulatedSite(f"client-{number}", model, data, folder / str(number), say=lambda text: None)
        site.secure, site.fixed, site.measures = False, method, metrics
        return FlowerMessage(pack(*site.answer(head, blob)), reply_to=message)

    for kind, action in ACTIONS:
        getattr(app, kind)(action)(answer)
    return app


def _all_nodes(grid: Any, count: int) -> dict[int, str]:
    """Wait until Flower has set up all its simulated nodes."""
    end = time.monotonic() + START
    while len(found := list(grid.get_node_ids())) < count:
        if time.monotonic() > end:
            raise InputError(f"Flower's simulation has {len(found)} of {count} nodes after {START:.0f} s.")
        time.sleep(0.1)
    return dict.fromkeys(found, "here")


def _ask_names(grid: Any, nodes: list[int], names: list[str]) -> dict[int, int]:
    """Find out which node is which client."""
    messages = [FlowerMessage(pack({"kind": "name"}), node, "query.name") for node in nodes]
    node_ids = {}
    for message in grid.send_and_receive(messages):
        head, _ = unpack(message.content, "a node")
        node_ids[names.index(head["name"])] = message.metadata.src_node_id
    return node_ids
