"""FENS: Revisiting Ensembling in One-Shot Federated Learning.

Allouah, Dhasade, Guerraoui, Gupta, Kermarrec, Pinot, Pires, Sharma, NeurIPS 2024. https://arxiv.org/abs/2411.07182

Clients train alone and upload their networks once. Then they learn together, in light rounds of federated learning, a
small combiner a of all logits z = [z_1, ..., z_J]; the server's m and u are running means of D and D² (FedAdam):

    a(z) = W_2 relu(W_1 z + b_1) + b_2 (`mlp`);  a(z)_c = sum_j v_jc z_jc (`class`);  sum_j v_j z_jc + b (`client`)
    a_k = a - eta grad CE(a(z), y),  D = sum_k n_k (a_k - a) / sum_k n_k,  a = a + eta_s m / (sqrt(u) + 0.001)

Deviations:
    Networks travel as they are; released code quantizes them to int8 and combines the logits of the quantized ones.
    Clients of one architecture start from the same weights.
    Accuracy is that after the last round; released code also reports the best round on test data.
    A client with a single sample uses it for both, its network and the combiner.
    The combiner is learned by the clients; learning it at a server with labelled public data is not offered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from polyfed.core.fields import AtLeastOne, NotNegative, PartShare, Positive
from polyfed.core.message import Message
from polyfed.core.method import Combination, Local, Plan, Step
from polyfed.core.party import ClientInfo, Context, Party, load_state
from polyfed.core.rng import generator
from polyfed.core.samples import Samples, split_off
from polyfed.core.settings import Training
from polyfed.core.stage import Stage
from polyfed.core.traffic import Symbol, Traffic, model_size
from polyfed.fusion.combining import OTHERS, Combined, Combiner, combined_loss, logits_of_everybody, networks_message
from polyfed.methods.oneshot import OneShot
from polyfed.ops.adaptive import adam_step
from polyfed.ops.aggregate import mean_state

UPLOAD = Step("upload", who="all", down=False)
MODELS = Step("models", who="all", up=False)
COMBINE = Step("combiner")


@dataclass(frozen=True)
class FENS(OneShot):
    """Learn together how to combine everybody's networks.

    Parameters
    ----------
    combiner, hidden
        `mlp`: J·d hidden units for J networks, d being `hidden`; `class`: a weight of each network and class; `client`:
        one of each network, and a bias. The last two begin as the mean of the logits, and stay it if `server_lr` is 0.
    combiner_rounds, combiner_lr, combiner_batch
        Rounds of learning the combiner, and in each a client's one step of SGD.
    server_lr, beta_1, beta_2
        Step eta_s and decays of the server's Adam, without bias correction.
    held_out
        Share of a client's samples for the combiner alone; 0: it is learned on what the network has seen.
    """

    name: ClassVar[str] = "fens"
    paper: ClassVar[str] = "Allouah et al. 2024"
    sends: ClassVar[str] = "the trained weights, once; then a combiner of everybody's logits and the number of samples"
    shares: ClassVar[frozenset[str]] = frozenset({"main", "combiner"})
    combines: ClassVar[Mapping[str, Combination]] = {"params/main": "apart", "params/combiner": "mean"}
    traffic: ClassVar[Mapping[str, Traffic]] = {
        "upload": Traffic(up="4*(P + B)"),
        "models": Traffic("4*O + A"),
        "combiner": Traffic("4*K", "4*K + 8"),
    }
    symbols: ClassVar[Mapping[str, Symbol]] = OTHERS | {"K": model_size("combiner", "numbers of the combiner")}

    l1: NotNegative = 0.0
    combiner: Literal["mlp", "class", "client"] = "mlp"
    hidden: AtLeastOne = 2
    combiner_rounds: AtLeastOne = 500
    combiner_lr: Positive = 1.0
    combiner_batch: AtLeastOne = 128
    server_lr: NotNegative = 1e-3
    beta_1: PartShare = 0.9
    beta_2: PartShare = 0.99
    held_out: PartShare = 0.1

    def plan(self) -> Plan:
        """Upload, receive everybody's networks, then rounds of the combiner alone."""
        return Plan(before=(UPLOAD, MODELS), round=(COMBINE,), rounds=self.combiner_rounds)

    def make_combiner(self, ctx: Context) -> nn.Module:
        """Return the combiner as every party starts with it."""
        return ctx.initialized("combiner", lambda: Combiner(self.combiner, ctx.clients, ctx.num_classes, self.hidden))

    # --- server ---

    def setup_server(self, server: Party, infos: Mapping[int, ClientInfo], ctx: Context) -> None:
        """Make the combiner."""
        server.models["combiner"] = self.make_combiner(ctx)

    def send(self, server: Party, info: ClientInfo, step: Step, ctx: Context) -> Message:
        """Send the others' networks once, later the combiner."""
        if step.name == COMBINE.name:
            return Message(params={"combiner": server.tensors("combiner")})
        if step.name != MODELS.name:
            return Message()  # clients are measured by their own networks
        states = zip(self.held(server), self.about(server, "state"), strict=True)
        return networks_message({client: state for client, state in states if client != info.id}, ctx)

    def fuse(self, server: Party, replies: Mapping[int, Message], step: Step, ctx: Context) -> None:
        """Keep the uploads; later take the step of FedAdam along D = sum p_k (a_k - a)."""
        if step.name == UPLOAD.name:
            self.check_complete(replies, ctx)  # the combiner has a place for each network
            return super().fuse(server, replies, step, ctx)
        a = server.tensors("combiner")
        states = (reply.params["combiner"] for reply in replies.values())
        mean = mean_state(states, [float(reply.meta["samples"]) for reply in replies.values()])
        change = {name: mean[name] - a[name] for name in a}
        rates = self.server_lr, self.beta_1, self.beta_2
        moved, server.memory["adam"] = adam_step(a, change, server.memory.get("adam", {}), *rates)
        return load_state(server.models["combiner"], moved)

    def make_fused(self, server: Party, ctx: Context) -> nn.Module:
        """Return a([z_1(x), ..., z_J(x)]); the combiner is the server's own, so it is always the current one."""
        combiner = server.models["combiner"]
        assert isinstance(combiner, Combiner)
        return Combined(self.networks(server, ctx), combiner)

    # --- client ---

    def setup_client(self, client: Party, ctx: Context) -> None:
        """Add the combiner."""
        client.models["combiner"] = self.make_combiner(ctx)

    def local(self, client: Party, step: Step, ctx: Context) -> Local:
        """Train alone; ask all networks about the held-out samples; later take one step of the combiner."""
        own, apart = self.split(client, ctx)
        if step.name == UPLOAD.name:
            yield self.alone(own)
            return self.upload(client, ctx)
        if step.name == MODELS.name:
            client.memory["logits"] = logits_of_everybody(client, apart, ctx)
            return None
        data = Samples(client.memory["logits"], apart.labels())
        training = Training(batch_size=self.combiner_batch, lr=self.combiner_lr)
        yield Stage(combined_loss, trainable={"combiner": None}, data=data, steps=1, training=training)
        return Message(params={"combiner": client.tensors("combiner")}, meta={"samples": len(client.train)})

    def split(self, client: Party, ctx: Context) -> tuple[Samples, Samples]:
        """Return the samples of the network and those of the combiner, the same whenever it is called."""
        return split_off(client.train, self.held_out, generator(ctx.seed, "held-out", 0, client.id))
