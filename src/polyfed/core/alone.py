"""Train one network outside of a federation, with the same stages, batches and optimisers as inside."""

from __future__ import annotations

from torch import nn

from polyfed.core.party import Context, Party, PartyData
from polyfed.core.rng import SERVER, seeded
from polyfed.core.runner import run_stage
from polyfed.core.settings import Training
from polyfed.core.stage import Stage, Trained
from polyfed.core.threads import one_thread


def train_alone(model: nn.Module, stage: Stage, training: Training, seed: int = 0, name: str = "alone") -> Trained:
    """Run a stage (which names its data) on a model, in place, and return what it tells.

    The model is `nets["main"]` of the stage. Device: that of the model's parameters.
    """
    assert stage.data is not None, "a stage that runs alone names its data"
    device = next(model.parameters()).device
    party = Party(SERVER, None, PartyData(stage.data))
    party.models["main"] = model
    ctx = Context(
        seed=seed,
        round=1,
        rounds=1,
        training=training,
        num_classes=0,
        input_shape=tuple(stage.data.x.shape[1:]),
        clients=0,
        device=device,
    )
    with one_thread(), seeded(seed, f"own/{name}"):
        return run_stage(stage, party, ctx, name)
