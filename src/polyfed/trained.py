"""A finished client's model in another script: `load_model("runs/a", client=3)` predicts on raw inputs.

A model is also one file: named tensors, and in the file's own header what is needed to use them on raw inputs. That is
what a site of a real federation ends with.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.build import make_module
from polyfed.core.checkpoint import read_json, read_tree, state_file
from polyfed.core.errors import InputError, RunDirectoryError
from polyfed.core.kept import packed, unpacked
from polyfed.core.learner import Learner
from polyfed.core.party import PartyData
from polyfed.core.samples import Scaling
from polyfed.core.shape import InputShape
from polyfed.core.task import CLASSIFICATION, Multilabel, Regression, Task, from_description
from polyfed.core.weights import KEY, fill, read_state
from polyfed.data import Clients
from polyfed.data.dataset import check_finite
from polyfed.data.decode import as_inputs
from polyfed.data.described import describe_inputs, scaling_for
from polyfed.data.form import Form, Raw
from polyfed.data.given import check_shape, given_ids, given_texts, read_array, read_columns
from polyfed.data.pictures import given_images, in_unit, one_by_one
from polyfed.data.texts import Words
from polyfed.fusion.files import rebuild
from polyfed.specs import ModelSpec, is_own, label_of, weights_of
from polyfed.stored import read_config

FILE = "inputs.json"  # beside the models of a run
CHUNK = 256  # rows at once
MANY = 1000  # clients: of more, only those that worked in some round leave a model


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
    apart = clients.recipe.get("scaling") == "own"  # asked first: clients may be made when somebody looks at them
    own = {"scalings": [asdict(samples.scaling) for samples in clients.train]} if apart else {}
    scaling = clients.train[0].scaling
    return {
        **describe_inputs(clients.input_shape, clients.form, scaling, clients.class_names, clients.task),
        **own,
        "outputs": outputs,
        "models": [name_of(model) for model in dealt],
        "names": list(clients.names),
        "seed": seed,
        "feature_dim": feature_dim,
        "feature_adapter": adapter,
    }


def name_of(model: ModelSpec) -> str | None:
    """Return the string that builds a network again; None: only whoever has its code can."""
    return weights_of(model)[0] if isinstance(model, str) else None


def model_file(module: nn.Module, about: Mapping[str, Any]) -> bytes:
    """Return a model as one file: its tensors by name (a learner's: as bytes), and what is needed to use it."""
    state: Mapping[str, Tensor] = module.state_dict()
    if isinstance(module, Learner):
        state, seen = packed(module)
        about = {**about, "learner": seen}
    return state_file(state, {KEY: json.dumps(about)})


def about_one(use: Mapping[str, Any], client: int) -> dict[str, Any]:
    """Return what is needed to use one model of a run."""
    one = {key: value for key, value in use.items() if key not in ("models", "names", "scalings", "checksum")}
    name = use["names"][client] if use["names"] and len(use["names"]) == len(use["models"]) else str(client)
    if "scalings" in use and len(use["scalings"]) == len(use["models"]):
        one["scaling"] = use["scalings"][client]
    return {**one, "model": use["models"][client], "name": name}


def load_model(
    run: str | Path,
    client: int | str | None = None,
    model: ModelSpec | None = None,
    tokenizer: Any = None,
    clients: Clients | None = None,
) -> TrainedModel:
    """Load the model that a client of a finished run, or a site of a real federation, ended up with.

    Parameters
    ----------
    run
        The directory of the run; or the file of one model, as a site and `polyfed export` write it.
    client
        Of a run: its number, or its name where clients have names.
    model
        What builds the network, where it is not a model of the zoo: a function, class or `package.module:function`. A
        file never decides which code runs.
    tokenizer
        The tokenizer of texts, where it was given as an object.
    clients
        The clients of the run, where these came from a script and the model is a learner, which is fitted again.

    Raises
    ------
    RunDirectoryError
        If the run is not finished or has no such client, or the file is not one of a model.
    """
    file, about = _find(Path(run), client)
    fused: dict[str, Any] | None = about.get("fused")
    who = f"Client {about['name']} of {run}"
    spec = model if model is not None else about["model"]
    task = from_description(about.get("task", [CLASSIFICATION.name]))
    kept: list[Any] | None = about.get("learner")
    if kept is None and fused is None and (spec is None or (model is None and is_own(str(spec)))):
        called = f" ({spec})" if spec else ""
        raise RunDirectoryError(
            f"{who} had a network of your own{called}: pass what builds it (model=...), on the command line "
            "--model package.module:function."
        )
    shape, form = InputShape.load(about["input_shape"]), Form.load(about["form"])
    if tokenizer is not None:
        form = replace(form, words=Words.given(tokenizer))
    settings = about["outputs"], about["seed"], about["feature_dim"], about["feature_adapter"]
    if kept is not None:
        module: nn.Module = unpacked(read_state(file), kept, task, about["outputs"], str(file))
    elif fused is not None:
        module = rebuild(fused, read_state(file), None if model is None else [model], file)
    else:
        module = make_module(spec, str(spec), shape, *settings)
        if isinstance(module, Learner):
            fit_again(module, run, about["number"], file, clients)
        else:
            fill(module, read_state(file), f"{file}, read as {spec},")
    scaling = about["scaling"]
    return TrainedModel(
        module.eval(),
        form,
        Scaling(tuple(scaling["mean"]), tuple(scaling["std"]), scaling["divisor"]),
        tuple(about["class_names"]),
        shape,
        task,
        about,
    )


def fit_again(learner: Learner, run: str | Path, client: int, file: Path, clients: Clients | None) -> None:
    """Fit the learner of a finished run again: to what it was taught, and the samples of its client.

    Raises
    ------
    RunDirectoryError
        If only the script of the run can make its data.
    """
    config = read_config(run)
    if "data" in config.script and clients is None:
        raise RunDirectoryError(
            f"Client {client} of {run} had a learner, which is fitted again from the run's data, and that came from a "
            "script: pass it (clients=...); what polyfed.exporting.export then writes needs no data any more."
        )
    clients = clients or config.data.load(config.seed)
    learner.recall(read_tree(file), PartyData(clients.client(client)[0], public=clients.public), client)


def _find(place: Path, client: int | str | None) -> tuple[Path, dict[str, Any]]:
    """Return the file of a model, and what is needed to use it."""
    if place.is_file():
        return place, _header(place)
    folder = place / "models"
    if not place.exists():
        raise RunDirectoryError(f"There is no {place}: correct the path of the run, or of the model's file.")
    if not (folder / FILE).is_file():
        raise RunDirectoryError(
            f"{place} holds no models: name the directory of a finished run, or the file that a site ended with."
        )
    use = read_json(folder / FILE)
    count, names = len(use["models"]), use["names"]
    number = names.index(client) if isinstance(client, str) and client in names else client
    if not isinstance(number, int) or not 0 <= number < count:
        named = f", or {', '.join(names)}" if names else ""
        which = "needs a client to be named" if client is None else f"has no client {client!r}"
        raise RunDirectoryError(f"The run in {place} {which}: they are 0 to {count - 1}{named}.")
    file = folder / f"client-{number}.safetensors"
    if not file.is_file():
        raise RunDirectoryError(f"There is no {file}: {no_file(number, count)}")
    return file, {**about_one(use, number), "number": number}


def no_file(client: int, clients: int) -> str:
    """Return why a run may have no file of a client's model."""
    if clients > MANY:
        return (
            f"of more than {MANY} clients only those that worked in some round have one, and client {client} did not."
        )
    return "was the run finished and kept whole?"


def _header(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            words = file.metadata() or {}
            found = words.get(KEY)
    except (OSError, SafetensorError) as error:
        raise RunDirectoryError(f"Cannot read {path} ({error}): give a file that a site ended with.") from error
    if found is None and "tree" in words:
        raise RunDirectoryError(
            f"{path} holds what a learner was taught, from which it is fitted again to the run's data: give the run's "
            "directory and client=..., or a file that 'polyfed export' made of it."
        )
    if found is None:
        raise RunDirectoryError(
            f"{path} holds tensors only, and not what is needed to use them: give the run's directory and client=..., "
            "or a file that a site or 'polyfed export' wrote."
        )
    about: dict[str, Any] = json.loads(found)
    return about


@dataclass(frozen=True)
class TrainedModel:
    """A network, and what is needed to use it on raw inputs."""

    module: nn.Module
    form: Form
    scaling: Scaling
    class_names: tuple[str, ...]
    input_shape: InputShape
    task: Task = CLASSIFICATION
    about: dict[str, Any] = field(default_factory=dict, repr=False)  # what its file says

    def inputs(self, raw: Any) -> Tensor:
        """Return network inputs of a table (data frame, CSV or parquet file, columns by name), texts, images, arrays.

        Images are files, a folder, arrays, images of PIL, or what holds them: dictionaries, a table, a `Dataset`.
        Arrays may be in a `.npy` file.

        Raises
        ------
        InputError
            If they are not of the kind that the network was trained on, or not finite.

        Warns
        -----
        UserWarning
            Of values that training does not know, and of empty cells.
        """
        what = "the given data"
        notes: tuple[str, ...] = ()
        if isinstance(raw, str | os.PathLike) and str(raw).lower().endswith(".npy"):
            raw = read_array(Path(raw).expanduser())
        if self.form.kind == "table":
            rows = Raw(read_columns(raw, [column.name for column in self.form.columns], what))
            check_finite(rows, what)  # here its columns still have names
            stored, notes = self.form.encode(rows, what)
        elif self.form.kind == "text":
            rows = Raw({"text": given_texts(raw, self.form.column, what)}, "text")
            stored, notes = self.form.encode(rows, what)
        elif self.form.kind == "image":
            stored = given_images(raw, tuple(self.input_shape), self.form.resize, what)
        elif self.form.kind == "tokens":
            rows, said = given_ids(raw, self.form, what)
            stored, notes = self.form.encode(rows, what)
            notes += said
        else:
            found = one_by_one(raw, self.form.kind, what)
            stored = as_inputs(found, what, "signal" if self.form.kind == "signal" else None)
        check_shape(stored, tuple(self.input_shape), what)
        check_finite(stored, what)
        if self.form.kind == "image" or self.scaling.divisor == 255.0:
            stored, notes = in_unit(stored, self.scaling, self.form.white, what)
        for note in notes:
            warnings.warn(f"{note}.", stacklevel=2)
        return scaling_for(stored, asdict(self.scaling)).apply(stored)

    @torch.inference_mode()
    def predictions(self, raw: Any) -> Tensor:
        """Return what the network says of each row: probabilities of classes or labels, or values in their units."""
        parts = [self.module(part) for part in self.inputs(raw).split(CHUNK)]
        return self.task.predictions(torch.cat(parts)[:, : len(self.class_names)])

    def probabilities(self, raw: Any) -> Tensor:
        """Return the probability of each class (or label), `[rows, classes]`.

        Raises
        ------
        InputError
            Of a regression, which has none.
        """
        if isinstance(self.task, Regression):
            raise InputError("A regression predicts values, not probabilities: use predictions or predict.")
        return self.predictions(raw)

    def predict(self, raw: Any) -> list[Any]:
        """Return for each row the name of the most probable class, of several labels those that hold, or the value.

        A regression with several targets gives a list of values for each row.
        """
        return self.in_words(self.predictions(raw))

    def in_words(self, found: Tensor) -> list[Any]:
        """Return what `predict` says, from `predictions`."""
        if isinstance(self.task, Regression):
            return [float(row[0]) if len(row) == 1 else row.tolist() for row in found]
        if isinstance(self.task, Multilabel):
            return [[self.class_names[place] for place in (row > 0.5).nonzero().flatten().tolist()] for row in found]
        return [self.class_names[place] for place in found.argmax(1).tolist()]
