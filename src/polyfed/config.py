"""The configuration of a run: one typed tree for the command line, TOML files, `config.json`, resume and the report.

Settings have short names (`lr`) and full ones (`training.lr`); both are understood everywhere. Two runs are the same
when their configurations are equal; `stored.py` names what is not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

from polyfed.core.errors import unknown
from polyfed.core.fields import AtLeastOne, PartShare, check_fields, setting, split_names
from polyfed.core.privacy import Privacy
from polyfed.core.settings import Evaluation, Execution, Participation, Settings, Training
from polyfed.core.trust import Trust

if TYPE_CHECKING:
    from polyfed.core.method import Method
    from polyfed.data import Clients, Dataset

OWN = "own data"  # the source of data that came as objects


@dataclass(frozen=True)
class Data:
    """Which data, and how it is dealt to clients.

    Attributes
    ----------
    source
        Data set: a known name, a Hub id, a parquet or CSV file, a folder, or package.module:function.
    test, path, name
        The test part where it is a file or folder of its own; where the files of a known name are; what tables call it.
    limit
        Use at most N training and N test samples (two numbers set them apart).
    resize
        Height and width that images are brought to.
    inputs
        The input column, or all features of a table (none: all columns that are nothing else).
    label
        The column of labels, or several: a,b (none: the one that is called like it).
    columns
        Columns of a table that are kept beside the features, for instance to divide by: a,b.
    drop
        Columns of a table that are left out: a,b.
    kind
        What the inputs are, where it is not plain: image, signal, table, text or tokens.
    tokenizer, length
        Of texts: a tokenizer.json, a folder with one, or package.module:function (none: the words of the training
        texts); how many words a text has.
    num_classes, class_names
        The classes, where they are not those that occur.
    normalize
        Scale inputs to mean 0 and standard deviation 1.
    clients
        Number of clients (none: as many as the partition has natural groups, else 10).
    partition
        iid | dirichlet:A | labels:3-6 | shards:N | quantity:A | column:NAME.
    validation
        Share of each client's rows kept apart for its own validation.
    public
        Public data: N rows held out, or NAME, or NAME:N.
    min_size
        Each client has at least so many rows.
    task
        What is to be learned: classification (as by default), multilabel (rows of zeros and ones) or regression.
    own_test
        Share of each client's rows kept apart as its own test data, beside the common test set.
    scaling
        Whose training rows scale the inputs: those of all clients together, or each client's own.
    split_seed, limit_seed
        Seeds of the split and of `limit` (none: the run's seed).
    """

    source: str = setting("digits", short="data")
    test: str | None = None
    path: str | None = None
    name: str | None = None
    limit: AtLeastOne | tuple[int | None, int | None] | None = setting(None)
    resize: AtLeastOne | tuple[AtLeastOne, AtLeastOne] | None = None
    inputs: str | tuple[str, ...] | None = None
    label: str | tuple[str, ...] | None = setting(None)
    columns: tuple[str, ...] = setting(())
    drop: tuple[str, ...] = setting((), short="drop_columns")
    kind: Literal["image", "signal", "table", "text", "tokens"] | None = setting(None)
    tokenizer: str | None = setting(None)
    length: AtLeastOne | None = None
    num_classes: AtLeastOne | None = None
    class_names: tuple[str, ...] | None = None
    normalize: bool = True
    clients: AtLeastOne | None = setting(None)
    partition: str = setting("dirichlet:0.5")
    validation: PartShare = setting(0.0)
    public: int | float | str | None = setting(None)
    min_size: AtLeastOne = 1
    split_seed: int | None = None
    limit_seed: int | None = None
    task: Literal["classification", "multilabel", "regression"] | None = setting(None)
    own_test: PartShare = setting(0.0)
    scaling: Literal["together", "own"] = "together"

    def __post_init__(self) -> None:
        for name in ("inputs", "columns", "drop", "class_names"):  # --columns a,b on the command line
            value: Any = getattr(self, name)
            if isinstance(value, str) and (name != "inputs" or "," in value):
                object.__setattr__(self, name, split_names(value))
        check_fields(self, "data")

    def load(self, seed: int) -> Clients:
        """Load and split the data."""
        from polyfed.core.own_code import is_reference
        from polyfed.data import Clients, split
        from polyfed.data.sources import call

        if is_reference(self.source) and self == Data(self.source) and isinstance(made := call(self.source), Clients):
            return made  # divided already
        whole = self.whole(seed)
        by = seed if self.split_seed is None else self.split_seed
        how = (self.clients, self.partition, by, self.validation, self.public, self.min_size, self.own_test or None)
        return split(whole, *how, scaling=self.scaling)

    def whole(self, seed: int, **more: Any) -> Dataset:
        """Load the data without splitting it; `more` are further arguments of `load`."""
        from polyfed.data import load

        return load(
            self.source,
            test=self.test,
            path=self.path,
            name=self.name,
            limit=self.limit,
            seed=seed if self.limit_seed is None else self.limit_seed,
            resize=self.resize,
            inputs=self.inputs,
            label=self.label,
            columns=self.columns,
            drop=self.drop,
            kind=self.kind,
            tokenizer=self.tokenizer,
            length=self.length,
            normalize=self.normalize,
            **{"num_classes": self.num_classes, "class_names": self.class_names, "task": self.task, **more},
        )

    @staticmethod
    def of(clients: Clients, seed: int) -> Data:
        """Describe clients that exist already."""
        recipe = dict(clients.recipe)
        loaded = dict(recipe.pop("data", {}))
        limit_seed = loaded.pop("seed", 0)
        return Data(
            source=loaded.pop("source", None) or OWN,
            clients=len(clients),
            partition=recipe.get("by") or OWN,
            validation=recipe.get("validation", 0.0),
            public=recipe.get("public"),
            min_size=recipe.get("min_size", 1),
            split_seed=None if recipe.get("seed", seed) == seed else recipe["seed"],
            limit_seed=None if limit_seed == seed else limit_seed,
            own_test=recipe.get("test") or 0.0,
            scaling=recipe.get("scaling", "together"),
            **{**({"task": clients.task.name} if clients.task.name != "classification" else {}), **loaded},
        )


@dataclass(frozen=True)
class Networks:
    """The clients' networks.

    Attributes
    ----------
    names
        Model strings, dealt to the clients in turn: a,b,c; your own are package.module:function.
    feature_dim
        Give every model features of this size.
    feature_adapter
        By a trainable projection, or by pooling.
    """

    names: tuple[str, ...] = setting(("mlp:2",), short="models")
    feature_dim: AtLeastOne | None = setting(None)
    feature_adapter: Literal["linear", "avgpool"] = "linear"

    def __post_init__(self) -> None:
        names: Any = self.names
        if isinstance(names, str):
            from polyfed.specs import split_models

            object.__setattr__(self, "names", tuple(split_models(names)))
        check_fields(self, "models")


@dataclass(frozen=True)
class Config:
    """Everything that describes one run.

    Attributes
    ----------
    method, label
        The method, and what tables call this run.
    rounds
        Number of rounds.
    seed
        Seed of everything random.
    script, fingerprint, networks
        Parts that only a script can make again (objects instead of names); checksums of the data as it was split, and
        of the structure of networks that came as objects.
    """

    method: Method
    label: str
    rounds: AtLeastOne = setting(10)
    seed: int = setting(0)
    data: Data = field(default_factory=Data)
    models: Networks = field(default_factory=Networks)
    training: Training = field(default_factory=Training)
    participation: Participation = field(default_factory=Participation)
    evaluation: Evaluation = field(default_factory=Evaluation)
    execution: Execution = field(default_factory=Execution)
    trust: Trust = field(default_factory=Trust)
    privacy: Privacy = field(default_factory=Privacy)
    script: tuple[str, ...] = ()
    fingerprint: str = ""
    networks: str = ""

    def __post_init__(self) -> None:
        check_fields(self, "run")

    def settings(self) -> Settings:
        """Return what the round loop needs."""
        parts = {key: getattr(self, key) for key in SECTIONS if key not in ("data", "models")}
        return Settings(self.rounds, self.seed, **parts)

    def value(self, full: str) -> Any:
        """Return a setting by its full name."""
        return attrgetter(full)(self)

    def planned_rounds(self) -> int:
        """Return the rounds that will be run: the method's own number, or the one asked for."""
        planned = self.method.plan().rounds
        return planned if planned is not None else self.rounds

    def dump(self) -> dict[str, Any]:
        """Return the content of `config.json`."""
        from polyfed.methods import reference

        tree = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "method"}
        dumped = {key: asdict(value) if is_dataclass(value) else value for key, value in tree.items()}  # type: ignore[arg-type]
        options = {item.name: getattr(self.method, item.name) for item in fields(self.method)}
        method = {"name": reference(type(self.method)), **options}
        plain: dict[str, Any] = json.loads(json.dumps({"method": method, **dumped}, default=repr))  # as in a file
        return plain

    @staticmethod
    def load(dumped: Mapping[str, Any]) -> Config:
        """Read what `dump` wrote; a setting that it does not have yet takes its default.

        Raises
        ------
        InputError
            When a value is not possible.
        """
        from polyfed import methods

        options = dict(dumped["method"])
        method = methods.make(options.pop("name"), options)
        parts = {key: kind(**known_fields(key, kind, dumped.get(key, {}))) for key, kind in SECTIONS.items()}
        plain = {
            key: dumped[key]
            for key in ("rounds", "seed", "label", "script", "fingerprint", "networks")
            if key in dumped
        }
        return Config(method=method, **plain, **parts)


SECTIONS: dict[str, type[Any]] = {
    "data": Data,
    "models": Networks,
    "training": Training,
    "participation": Participation,
    "evaluation": Evaluation,
    "execution": Execution,
    "trust": Trust,
    "privacy": Privacy,
}


def _declared() -> Iterator[tuple[str, str, bool]]:
    """Yield short name, full name, and whether there is an option for each setting, as the fields declare them."""
    top = [item for item in fields(Config) if item.metadata]
    sections = [(f"{section}.", item) for section, kind in SECTIONS.items() for item in fields(kind)]
    for start, item in [*(("", item) for item in top), *sections]:
        yield item.metadata.get("short") or item.name, start + item.name, item.metadata.get("option", False)


def short_names() -> dict[str, str]:
    """Return every setting: its short name and its full one, in the order in which people think of them."""
    return {short: full for short, full, _ in _declared()}


def option_names() -> tuple[str, ...]:
    """Return the short names of the settings with an option of their own on the command line."""
    return tuple(short for short, _, option in _declared() if option)


def known_fields(section: str, kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a section; a name that it does not have is refused with the nearest one."""
    known = [item.name for item in fields(kind)]
    for name in values:
        if name not in known:
            raise unknown(f"option of {section}", name, known)
    return dict(values)
