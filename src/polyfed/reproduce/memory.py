"""What one update keeps in memory, by method, for the five ResNets of FedVTC's Fig. 3.

Parameters, gradients and the activations that autograd keeps, counted (`polyfed.analysis.memory.update_memory`), of the
step that needs most. Optimizer state is left out. Shapes alone are counted, on the device `meta`: the
largest network takes seconds and no memory.
"""

from __future__ import annotations

import torch

from polyfed.analysis.memory import update_memory
from polyfed.build import make_blueprint
from polyfed.core.method import Method, Step
from polyfed.core.party import Context, Party, PartyData
from polyfed.core.samples import Samples
from polyfed.core.settings import Training
from polyfed.core.stage import Batch, Stage
from polyfed.methods.fedgen import FedGen
from polyfed.methods.fedvtc import FedVTC
from polyfed.methods.local import Local
from polyfed.methods.pfedafm import PFedAFM
from polyfed.models import build

NETWORKS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
PROXY = "cnn:16-32-64"  # of FedType
SHAPE, CLASSES, LATENTS = (3, 32, 32), 10, 4096
META = torch.device("meta")
METHODS: dict[str, Method] = {
    "fedproto": Local(),  # FedTGP and CCVR too: prototypes and statistics keep next to nothing
    "fedgen": FedGen(share="head"),  # with its generator, which makes features and stands still
    "pfedafm": PFedAFM(proxy=PROXY),
    "fedvtc": FedVTC(),
    "fedvtc-no-dm": FedVTC(lambda_dm=0.0),
    "fedvtc-joint": FedVTC(joint_training=True),
}


def stage_of(method: Method, client: Party, ctx: Context) -> Stage:
    """Return a client's training in a round in which it has been sent everything that its losses use."""
    if isinstance(method, FedVTC):
        prototypes = torch.zeros(CLASSES, LATENTS)
        client.inbox.data = {"sigma": torch.ones(LATENTS), "prototypes": prototypes, "classes": torch.arange(CLASSES)}
        return next(method.stages(client, ctx))
    if isinstance(method, FedGen):
        client.inbox.params["generator"] = {}  # it came; what is in it changes no size
        client.inbox.data = {"labels": torch.arange(CLASSES)}
    return next(method.local(client, Step("main"), ctx))


def sizes_of(network: str, batch_size: int) -> dict[str, int]:
    """Return the bytes of the largest update of each method with a network."""
    blueprint = make_blueprint(network, network, SHAPE, CLASSES, 0, LATENTS, "linear")
    ctx = Context(0, 1, 1, Training(epochs=1), CLASSES, SHAPE, 1, blueprints={network: blueprint})
    x, y = torch.zeros(batch_size, *SHAPE), torch.arange(batch_size) % CLASSES
    found: dict[str, int] = {}
    for name, method in METHODS.items():
        assert blueprint.build is not None
        client = Party(0, None, PartyData(Samples(x, y)))
        client.models["main"] = blueprint.build()
        method.setup_client(client, ctx)
        stage = stage_of(method, client, ctx)
        draws = {key: draw.sample(batch_size, torch.Generator()).to(META) for key, draw in stage.draws.items()}
        models = {key: model.to(META) for key, model in client.models.items()}
        batch = Batch(x.to(META), y.to(META), draws)
        aux = {key: value.to(META) if isinstance(value, torch.Tensor) else value for key, value in stage.aux.items()}
        found[name] = max(update_memory(update, models, batch, aux)["total"] for update in stage.all_updates())
    proxy = build(PROXY, SHAPE, CLASSES)  # it stands still while the private network moves
    found["fedtype"] = found["fedproto"] + sum(p.numel() * p.element_size() for p in proxy.parameters())
    return found
