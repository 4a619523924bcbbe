"""A finished client's model in another script: `load_model("runs/a", client=3)` predicts on raw inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from polyfed.build import ModelSpec, label_of, make_module, weights_of
from polyfed.config import read_config
from polyfed.core.checkpoint import read_json, read_tree, write_atomic
from polyfed.core.errors import InputError, RunDirectoryError
from polyfed.core.learner import Learner
from polyfed.core.party import PartyData
from polyfed.core.samples import Scaling
from polyfed.core.shape import InputShape
from polyfed.core.weights import fill, read_state
from polyfed.data import Clients
from polyfed.data.decode import as_inputs
from polyfed.data.form import Form, Raw
from polyfed.data.tables import read_columns

FILE = "inputs.json"  # beside the models of a run
CHUNK = 256  # rows at once


def describe_use(
    clients: Clients,
    models: Sequence[ModelSpec],
    outputs: int,
    seed: int,
    feature_dim: int | None,
    adapter: str,
    pooled: bool = False,
) -> dict[str, Any]:
    """Return what is needed to use a run's models on raw inputs: architecture, scaling, class names, form."""
    dealt = [models[number % len(models)] for number in range(len(clients))]
    if pooled:  # one model for each architecture
        dealt = list({label_of(model): model for model in reversed(dealt)}.values())[::-1]
    return {
        "input_shape": clients.input_shape.dump(),
        "form": clients.form.dump(),
        "scaling": asdict(clients.train[0].scaling),
        "class_names": list(clients.class_names),
        "outputs": outputs,
        "models": [weights_of(model)[0] if isinstance(model, str) else None for model in dealt],
        "names": list(clients.names),
        "seed": seed,
        "feature_dim": feature_dim,
        "feature_adapter": adapter,
    }


def load_model(run: str | Path, client: int | str, model: ModelSpec | None = None) -> TrainedModel:
    """Load the model that a client of a finished run ended up with.

    Parameters
    ----------
    run
        The directory of the run.
    client
        Its number, or its name where clients have names.
    model
        What builds the network, where the run used an object instead of a model string.

    Raises
    ------
    RunDirectoryError
        If the run is not finished or has no such client.
    """
    folder = Path(run) / "models"
    if not (folder / FILE).is_file():
        raise RunDirectoryError(f"{run} holds no models: name the directory of a finished run.")
    about = read_json(folder / FILE)
    count = len(about["models"])
    if isinstance(client, str) and client in about["names"]:
        client = about["names"].index(client)
    if not isinstance(client, int) or not 0 <= client < count:
        named = f", or {', '.join(about['names'])}" if about["names"] else ""
        raise RunDirectoryError(f"The run in {run} has no client {client!r}: they are 0 to {count - 1}{named}.")
    spec = model if model is not None else about["models"][client]
    if spec is None:
        raise RunDirectoryError(f"Client {client} of {run} had a network of your own: pass what builds it (model=...).")
    shape = InputShape.load(about["input_shape"])
    settings = about["outputs"], about["seed"], about["feature_dim"], about["feature_adapter"]
    module = make_module(spec, str(spec), shape, *settings)
    file = folder / f"client-{client}.safetensors"
    if isinstance(module, Learner):
        fit_again(module, run, client, file)
    else:
        fill(module, read_state(file), f"{file}, read as {spec},")
    scaling = about["scaling"]
    return TrainedModel(
        module.eval(),
        Form.load(about["form"]),
        Scaling(tuple(scaling["mean"]), tuple(scaling["std"]), scaling["divisor"]),
        tuple(about["class_names"]),
        shape,
    )


def fit_again(learner: Learner, run: str | Path, client: int, file: Path) -> None:
    """Fit the learner of a finished run again: to what it was taught, and the samples of its client.

    Raises
    ------
    RunDirectoryError
        If only the script of the run can make its data.
    """
    config = read_config(run)
    if "data" in config.script:
        raise RunDirectoryError(
            f"Client {client} of {run} had a learner, which is fitted again from the run's data, and that came from a "
            "script: use result.models there."
        )
    clients = config.data.load(config.seed)
    learner.recall(read_tree(file), PartyData(clients.client(client)[0], public=clients.public), client)


def export(trained: TrainedModel, out: str | Path, format: str = "safetensors") -> Path:
    """Write a model for use without polyfed; it takes inputs that are scaled and encoded already (`trained.inputs`).

    Parameters
    ----------
    trained
        What `load_model` gave.
    out
        The file to write.
    format
        `safetensors` (the tensors by name), `torch` (`torch.export`, a `.pt2` file) or `onnx` (needs the extra onnx).

    Raises
    ------
    InputError
        If the format is unknown, or the network cannot be written in it.
    """
    out = Path(out)
    if isinstance(trained.module, Learner):
        raise InputError(
            "This model is no network, so it has no tensors to write: load_model(...).module.estimators() gives what "
            "was fitted."
        )
    if format not in ("safetensors", "torch", "onnx"):
        raise InputError(f"format is safetensors, torch or onnx, not '{format}'.")
    out.parent.mkdir(parents=True, exist_ok=True)
    if format == "safetensors":
        from safetensors.torch import save

        state = {name: tensor.contiguous() for name, tensor in trained.module.state_dict().items()}
        write_atomic(out, save(state))
        return out
    rows = torch.zeros(2, *trained.input_shape, dtype=torch.int64 if trained.input_shape.words else torch.float32)
    batch = {0: torch.export.Dim("batch")}
    try:
        if format == "torch":
            program = torch.export.export(trained.module, (rows,), dynamic_shapes=(batch,))
            torch.export.save(program, out)
        else:
            torch.onnx.export(
                trained.module, (rows,), out, dynamo=True, dynamic_shapes=(batch,), external_data=False, verbose=False
            )
    except ImportError as error:
        raise InputError(f"Writing ONNX needs another package ({error}): pip install 'polyfed[onnx]'.") from error
    except Exception as error:  # torch raises many kinds; the sentence for people is the same
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise InputError(f"This network cannot be written as {format} ({reason}).") from error
    return out


@dataclass(frozen=True)
class TrainedModel:
    """A network, and what is needed to use it on raw inputs."""

    module: nn.Module
    form: Form
    scaling: Scaling
    class_names: tuple[str, ...]
    input_shape: InputShape

    def inputs(self, raw: Any) -> Tensor:
        """Return network inputs: a table (data frame, CSV or parquet file, columns by name), texts, ids or an array.

        Raises
        ------
        InputError
            If they are not of the kind that the network was trained on.
        """
        what = "the given data"
        if self.form.kind == "table":
            rows = Raw(read_columns(raw, [column.name for column in self.form.columns], what))
            stored = self.form.encode(rows, what)[0]
        elif self.form.kind == "text":
            texts = np.array([raw] if isinstance(raw, str) else list(raw), dtype=object)
            stored = self.form.encode(Raw({"text": texts}, "text"), what)[0]
        else:
            kind = self.form.kind if self.form.kind in ("signal", "tokens") else None
            stored = as_inputs(raw, what, kind)
        if tuple(stored.shape[1:]) != tuple(self.input_shape):
            raise InputError(
                f"The given data has rows of shape {tuple(stored.shape[1:])}, but the network takes "
                f"{tuple(self.input_shape)}."
            )
        done = stored.is_floating_point() and self.scaling.divisor == 255.0  # floats of 0..1 where training had bytes
        scaling = Scaling(self.scaling.mean, self.scaling.std) if done else self.scaling
        return scaling.apply(stored)

    @torch.inference_mode()
    def probabilities(self, raw: Any) -> Tensor:
        """Return the probability of each class, `[rows, classes]`."""
        parts = [self.module(part) for part in self.inputs(raw).split(CHUNK)]
        return torch.cat(parts)[:, : len(self.class_names)].softmax(1)

    def predict(self, raw: Any) -> list[str]:
        """Return the name of the most probable class of each row."""
        return [self.class_names[place] for place in self.probabilities(raw).argmax(1).tolist()]
