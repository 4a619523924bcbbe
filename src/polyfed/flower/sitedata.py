"""A site's own model and data: named by the site, imported at the site, never sent anywhere."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from polyfed.build import explained_starts, make_blueprint
from polyfed.config import Data
from polyfed.core.errors import InputError
from polyfed.core.own_code import imported, is_reference, own_code
from polyfed.core.samples import Samples
from polyfed.core.shape import InputShape
from polyfed.core.task import CLASSIFICATION, Regression, Task, as_task, check_score
from polyfed.data import Clients, Dataset, load
from polyfed.data.agree import Agreed
from polyfed.data.dataset import form_of
from polyfed.data.described import describe_inputs
from polyfed.data.form import Form, Raw
from polyfed.data.objects import part_of
from polyfed.data.public import drawn_rows, load_public
from polyfed.data.sources import call
from polyfed.data.split import split
from polyfed.data.targets import make_targets
from polyfed.flower import plain
from polyfed.models.registry import parse
from polyfed.specs import ModelSpec, is_own, label_of, own_model, weights_of


@dataclass(frozen=True)
class SiteData:
    """What one site holds.

    Attributes
    ----------
    train, test, validation
        Its own samples. `test` measures the site's model; it never leaves the site either.
    public
        Samples that all sites and the server have (methods that need them say so), the same in the same order.
    num_classes, class_names
        The classes, the same at all sites and in the same order. Without names they are called 0, 1, 2, ...
    public_classes
        Set where the public samples have labels of their own, apart from the sites' classes.
    own_test
        Test samples of its own distribution, where `test` is the same at all sites; they measure the personal figures.
    task
        What is learned, the same at all sites: `num_classes` and `class_names` then speak of labels or targets.
    """

    train: Samples
    test: Samples
    num_classes: int
    validation: Samples | None = None
    public: Samples | None = None
    public_classes: int | None = None
    class_names: tuple[str, ...] = ()
    own_test: Samples | None = None
    task: Task = CLASSIFICATION
    shape: InputShape | None = None  # where inputs are words or categories, which no plain shape tells
    form: Form | None = None  # how raw rows became inputs
    notes: tuple[str, ...] = ()  # what was done to the data

    @property
    def input_shape(self) -> InputShape:
        """The shape of one input."""
        return self.shape or InputShape(self.train.x.shape[1:])

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes; numbers where none were given."""
        return tuple(plain(str(name)) for name in self.class_names) or tuple(map(str, range(self.num_classes)))


def read_model(name: str) -> ModelSpec:
    """Return a model of the zoo by its string, or what the site's own code offers under `package.module:name`."""
    if is_own(name):
        return own_model(name, "--model")
    parse(weights_of(name)[0])
    return name


def try_model(name: str, model: ModelSpec, data: SiteData) -> None:
    """Build a site's network once, before the server is asked: what is wrong with it is said at once."""
    if data.public_classes is None:  # else only the method knows how many outputs it needs
        with own_code(f"--model {name}"), explained_starts([model], lambda: described(data)):
            make_blueprint(model, label_of(model), data.input_shape, data.num_classes, 0, None, "linear")


def described(data: SiteData) -> dict[str, Any]:
    """Return how a site's raw inputs become those of a network, and what its outputs mean."""
    form = data.form or form_of(data.train.x, data.test.x)
    return describe_inputs(data.input_shape, form, data.train.scaling, data.classes, data.task)


def read_data(name: str | Data, public: str | None = None, agreed: Agreed | None = None) -> SiteData:
    """Return a site's data from its own function `package.module:name`, or a file or data set by name.

    The function returns `SiteData`, a `Dataset`, `Clients` with one client, what `load` takes, or a table with `train`,
    `test` and perhaps `validation`, `public`, `num_classes` and `class_names`, whose parts may be pairs of arrays.

    Parameters
    ----------
    name
        The function, file or name, perhaps with how to read it.
    public
        Public samples, by name.
    agreed
        How all sites make numbers of their rows, where they agreed on that.
    """
    how = Data(name) if isinstance(name, str) else name
    whole = agreed.options() if agreed is not None else {}
    if is_reference(how.source):
        given = call(how.source)
        with own_code(f"--data {how.source}"):
            data = as_site_data(given) if _is_site_data(given) else _from(load(given, **whole), how)
    else:
        data = _from(how.whole(0, **whole), how, agreed)
    check_data(data)
    return data if public is None else replace(data, public=read_public(public))


def _is_site_data(given: Any) -> bool:
    return given is None or isinstance(given, SiteData | Dataset | Clients | dict)


def _from(dataset: Dataset, how: Data, agreed: Agreed | None = None) -> SiteData:
    """Return a data set as a site's own, with a share kept apart for validation."""
    data = as_site_data(split(dataset, 1, validation=how.validation) if how.validation else dataset)
    if agreed is not None and isinstance(dataset.task, Regression):
        data = replace(data, task=dataset.task)
    return replace(data, own_test=data.test)


def check_data(data: SiteData) -> None:
    """Refuse data that cannot be trained on: no samples, or labels that are none of the classes."""
    for part in ("train", "test", "validation", "public", "own_test"):
        given = getattr(data, part)
        if given is not None and not isinstance(given, Samples):
            raise InputError(
                f"--data gives SiteData whose {part} is a {type(given).__name__}, not Samples: return a table "
                "{'train': (inputs, labels), 'test': (inputs, labels)} instead, which takes arrays."
            )
    if not len(data.train):
        raise InputError("--data gives no training samples.")
    for part, samples in (("training", data.train), ("test", data.test), ("validation", data.validation)):
        if samples is None or not len(samples):
            continue
        labels = samples.labels()
        if data.task != CLASSIFICATION:
            _check_targets(part, labels, data)
            continue
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= data.num_classes:
            raise InputError(
                f"--data gives {part} labels from {low} to {high}, but num_classes is {data.num_classes}: "
                f"number the classes from 0 to {data.num_classes - 1}."
            )
    if len(set(data.classes)) != data.num_classes or len(data.classes) != data.num_classes:
        raise InputError(
            f"--data gives {len(data.classes)} class names ({', '.join(map(str, data.classes))}), but num_classes is "
            f"{data.num_classes}: name every class once."
        )


def _check_targets(part: str, targets: torch.Tensor, data: SiteData) -> None:
    """Refuse targets that a task other than classification cannot learn or be judged by."""
    if tuple(targets.shape[1:]) != (data.num_classes,) or not targets.is_floating_point():
        raise InputError(
            f"--data gives {part} targets of shape {tuple(targets.shape)} ({targets.dtype}), but task "
            f"'{data.task.name}' needs floats of shape (samples, {data.num_classes}), by its num_classes."
        )
    if part == "test":
        check_score(data.task, targets, "the test samples")


def _units_of_all(task: Task, given: Any) -> Task:
    """Return a regression in units that all sites have: those that were given; a site's own say nothing to others."""
    return (given if isinstance(given, Task) else as_task(given)) if isinstance(task, Regression) else task


def as_site_data(given: Any) -> SiteData:
    """Turn what a site's function returned into `SiteData`; its test samples are its own unless it has others."""
    if isinstance(given, SiteData):
        return given if given.own_test is not None else replace(given, own_test=given.test)
    if isinstance(given, Dataset):
        return SiteData(
            given.train,
            given.test,
            given.num_classes,
            class_names=given.class_names,
            own_test=given.test,
            task=_units_of_all(given.task, "regression"),
            shape=given.input_shape,
            form=given.form,
            notes=given.notes,
        )
    if isinstance(given, dict) and {"train", "test"} <= given.keys():
        options: dict[str, Any] = {key: given.get(key) for key in ("num_classes", "class_names", "public", "task")}
        if given.get("own_test") is not None:
            options["own_test"] = [given["own_test"]]
        made = Clients.from_parts([given["train"]], test=given["test"], **options)
        data = as_site_data(made)
        data = replace(data, task=_units_of_all(data.task, given.get("task")))
        if given.get("validation") is None:
            return data
        part = part_of(given["validation"])
        if data.task != CLASSIFICATION:
            targets = make_targets({"the validation samples": part.labels}, data.task).parts[0]
        else:
            targets = torch.from_numpy(_numbers(np.asarray(part.labels), data.classes))
        x = made.form.encode(part.inputs, "the validation set")[0] if isinstance(part.inputs, Raw) else part.inputs
        return replace(data, validation=Samples(x, targets, None, data.train.scaling))
    if isinstance(given, Clients):
        if len(given) != 1:
            raise InputError(f"A site is one client, but its data has {len(given)}: return the site's own part.")
        return SiteData(
            given.train[0],
            given.test,
            given.num_classes,
            given.validation[0],
            given.public,
            given.public_classes,
            given.class_names,
            given.own_tests(0).get(0, given.test),
            _units_of_all(given.task, "regression"),
            given.input_shape,
            given.form,
            given.notes,
        )
    raise InputError(
        f"The --data function returned a {type(given).__name__}: return polyfed.flower.sitedata.SiteData, a "
        "Dataset, or a table with 'train' and 'test'."
    )


def _numbers(labels: np.ndarray, classes: tuple[str, ...]) -> np.ndarray:
    """Return labels as numbers, where they are words."""
    if labels.dtype.kind not in "OUS":
        return labels
    strange = sorted(set(labels.astype(str)) - set(classes))
    if strange:
        raise InputError(f"Label '{strange[0]}' of the validation samples is not one of the classes {classes}.")
    return np.array([classes.index(label) for label in labels.astype(str)])


def read_public(name: str) -> Samples:
    """Return public samples: a data set or file, all of it or `NAME:N`, or what `package.module:function` returns."""
    start, _, rest = name.partition(":")
    if rest and not rest.isdigit():
        found = imported(name, "--public")
        with own_code(f"--public {name}"):
            found = found() if callable(found) else found
            if isinstance(found, Samples):
                return found
            part = part_of(found)
            return Samples(part.tensor, torch.from_numpy(np.asarray(part.labels)))
    samples = load_public(start).train
    if not rest:
        return samples
    if not 1 <= int(rest) <= len(samples):
        raise InputError(f"--public {name}: ask for 1 to {len(samples)} rows, it has no more.")
    return samples.select(torch.from_numpy(drawn_rows(len(samples), int(rest), seed=0)))


def fingerprint(samples: Samples | None) -> str | None:
    """Return a checksum by which parties find out that they hold the same public samples."""
    if samples is None:
        return None
    digest = hashlib.sha256(repr((samples.scaling, tuple(samples.x.shape[1:]))).encode())
    for tensor in (samples.x[samples.rows()], samples.labels()):
        digest.update(f"{tensor.dtype}".encode())
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()
