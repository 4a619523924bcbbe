"""The configuration of a run: one typed tree for the command line, TOML files, `config.json`, resume and the report.

Settings have short names (`lr`) and full ones (`training.lr`); both are understood everywhere. Two runs are the same
when their configurations are equal, and `differences` names what is not.
"""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from polyfed.core.errors import InputError, unknown
from polyfed.core.fields import AtLeastOne, PartShare, check_fields
from polyfed.core.settings import Evaluation, Execution, Participation, Settings, Training

if TYPE_CHECKING:
    from polyfed.core.method import Method
    from polyfed.data import Clients

OWN = "own data"  # the source of data that came as objects
UNIMPORTANT = ("execution.workers", "execution.checkpoint_seconds")  # they change no bit of a result


@dataclass(frozen=True)
class Data:
    """Which data, and how it is dealt to clients.

    Attributes
    ----------
    source
        Data set: a known name, a Hub id, a parquet file or a folder.
    test, path, name
        The test part where it is a file or folder of its own; where the files of a known name are; what tables call it.
    limit
        Use at most N training and N test samples (two numbers set them apart).
    resize
        Height and width that images are brought to.
    inputs, label, columns
        Names of the input column (or of all features), the label column, and of columns that are no features (tables).
    num_classes, class_names
        The classes, where they are not those that occur.
    normalize
        Scale inputs to mean 0 and standard deviation 1.
    clients
        Number of clients (none: as many as the partition has natural groups).
    partition
        iid | dirichlet:A | labels:3-6 | shards:N | quantity:A | column:NAME.
    validation
        Share of each client's rows kept apart for its own validation.
    public
        Public data: N rows held out, or NAME, or NAME:N.
    min_size
        Each client has at least so many rows.
    split_seed, limit_seed
        Seeds of the split and of `limit` (none: the run's seed).
    """

    source: str = "digits"
    test: str | None = None
    path: str | None = None
    name: str | None = None
    limit: AtLeastOne | tuple[int | None, int | None] | None = None
    resize: AtLeastOne | tuple[AtLeastOne, AtLeastOne] | None = None
    inputs: str | tuple[str, ...] | None = None
    label: str | None = None
    columns: tuple[str, ...] = ()
    num_classes: AtLeastOne | None = None
    class_names: tuple[str, ...] | None = None
    normalize: bool = True
    clients: AtLeastOne | None = 10
    partition: str = "dirichlet:0.5"
    validation: PartShare = 0.0
    public: int | float | str | None = None
    min_size: AtLeastOne = 1
    split_seed: int | None = None
    limit_seed: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, "data")

    def load(self, seed: int) -> Clients:
        """Load and split the data."""
        from polyfed.data import load, split

        whole = load(
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
            num_classes=self.num_classes,
            class_names=self.class_names,
            normalize=self.normalize,
        )
        by = seed if self.split_seed is None else self.split_seed
        return split(whole, self.clients, self.partition, by, self.validation, self.public, self.min_size)

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
            **loaded,
        )


@dataclass(frozen=True)
class Networks:
    """The clients' networks.

    Attributes
    ----------
    names
        Model strings, dealt to the clients in turn: a,b,c.
    feature_dim
        Give every model features of this size.
    feature_adapter
        By a trainable projection, or by pooling.
    """

    names: tuple[str, ...] = ("mlp:2",)
    feature_dim: AtLeastOne | None = None
    feature_adapter: Literal["linear", "avgpool"] = "linear"

    def __post_init__(self) -> None:
        names: Any = self.names
        if isinstance(names, str):
            from polyfed.build import split_models

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
    script, fingerprint
        Parts that only a script can make again (objects instead of names); a checksum of the data as it was split.
    """

    method: Method
    label: str
    rounds: AtLeastOne = 10
    seed: int = 0
    data: Data = field(default_factory=Data)
    models: Networks = field(default_factory=Networks)
    training: Training = field(default_factory=Training)
    participation: Participation = field(default_factory=Participation)
    evaluation: Evaluation = field(default_factory=Evaluation)
    execution: Execution = field(default_factory=Execution)
    script: tuple[str, ...] = ()
    fingerprint: str = ""

    def __post_init__(self) -> None:
        check_fields(self, "run")

    def settings(self) -> Settings:
        """Return what the round loop needs."""
        return Settings(self.rounds, self.seed, self.training, self.participation, self.evaluation, self.execution)

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
        parts = {key: kind(**_known(key, kind, dumped.get(key, {}))) for key, kind in SECTIONS.items()}
        plain = {key: dumped[key] for key in ("rounds", "seed", "label", "script", "fingerprint") if key in dumped}
        return Config(method=method, **plain, **parts)


SECTIONS: dict[str, type[Any]] = {
    "data": Data,
    "models": Networks,
    "training": Training,
    "participation": Participation,
    "evaluation": Evaluation,
    "execution": Execution,
}
TOP = ("rounds", "seed")
# Short names that are not the last part of the full name.
SHORT = {
    "data": "data.source",
    "models": "models.names",
    "participation": "participation.share",
    "drop": "participation.who",
    "evaluate": "evaluation.every",
    "evaluate_clients": "evaluation.clients",
    "evaluate_samples": "evaluation.samples",
}


def short_names() -> dict[str, str]:
    """Return every setting: its short name and its full one, in the order in which people think of them."""
    taken = {full: short for short, full in SHORT.items()}
    names: dict[str, str] = {}
    for section, kind in SECTIONS.items():
        for item in fields(kind):
            full = f"{section}.{item.name}"
            names[taken.get(full, item.name)] = full
    return {**{name: name for name in TOP}, **names}


def differences(earlier: Config, now: Config) -> list[str]:
    """Name every setting in which two runs differ: `training.lr was 0.05, now 0.1`."""
    before, after = _flat(earlier.dump()), _flat(now.dump())
    keys = [key for key in dict.fromkeys([*after, *before]) if key not in UNIMPORTANT]
    return [
        f"{key} was {before.get(key)!r}, now {after.get(key)!r}" for key in keys if before.get(key) != after.get(key)
    ]


def _flat(tree: Mapping[str, Any], start: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{start}{key}.")
        else:
            found[start + key] = value
    return found


# --- several runs: an experiment file ---


@dataclass(frozen=True)
class Experiment:
    """What a TOML file or the options of a command describe: a run, and perhaps several methods and seeds.

    Attributes
    ----------
    base
        The run; a comparison varies its method and seed.
    methods
        Label -> hyper-parameters; the key `method` names the method of a variant.
    compare
        Labels that `polyfed compare` runs when --methods is not given.
    seeds
        How many seeds a comparison takes.
    """

    base: Config
    methods: dict[str, dict[str, Any]] = field(default_factory=dict)
    compare: tuple[str, ...] = ()
    seeds: AtLeastOne = 3

    def __post_init__(self) -> None:
        check_fields(self, "experiment")

    def config(self, label: str | None = None, seed: int | None = None) -> Config:
        """Return the configuration of one method of the experiment with one seed."""
        label = label or self.base.label
        method = _make(label, self.methods, {})
        return replace(self.base, method=method, label=label, seed=self.base.seed if seed is None else seed)

    def dump(self) -> dict[str, Any]:
        """Return everything for `comparison.json`."""
        return {**self.base.dump(), "methods": self.methods, "compare": list(self.compare), "seeds": self.seeds}


KEYS = ("method", "methods", "compare", "seeds")  # of an experiment, beside the settings


def experiment(labels: Sequence[str] | None = None, **values: Any) -> Experiment:
    """Build an experiment from settings by short or full name; sections may be tables.

    Parameters
    ----------
    labels
        The methods that will run, where they are not those of `compare`.
    values
        `method`, `methods`, `compare`, `seeds` and any setting: `lr=0.1` is `training={"lr": 0.1}`.

    Raises
    ------
    InputError
        For an unknown setting (with the nearest known name) or a value that is not possible.
    """
    names = short_names()
    tree: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    top: dict[str, Any] = {}
    for key, value in values.items():
        if key in KEYS:
            continue
        for full, leaf in _placed(key, value, names):
            section, dot, name = full.partition(".")
            if dot:
                tree[section][name] = leaf
            else:
                top[full] = leaf
    parts = {section: kind(**_known(section, kind, tree[section])) for section, kind in SECTIONS.items()}
    variants = {label: dict(options) for label, options in _table("methods", values.get("methods", {})).items()}
    given = values.get("method", "fedavg")
    options = dict(given) if isinstance(given, Mapping) else {"name": given}
    name = options.pop("name", "fedavg")
    base = Config(_make(name, variants, options), name, **top, **parts)
    if options:
        variants[name] = {**variants.get(name, {}), **options}
    rest = {key: values[key] for key in ("compare", "seeds") if key in values}
    return Experiment(base, variants, **rest)


def _placed(key: str, value: Any, names: Mapping[str, str]) -> Iterable[tuple[str, Any]]:
    """Yield full names and values of one entry: a setting by either name, or a section as a table."""
    if isinstance(value, Mapping) and key in SECTIONS:
        return [(f"{key}.{name}", item) for name, item in value.items()]
    if key in names:
        return [(names[key], value)]
    if key.partition(".")[0] in SECTIONS:
        return [(key, value)]
    raise unknown("option", key, [*names, *SECTIONS, *KEYS])


def _known(section: str, kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    known = [item.name for item in fields(kind)]
    for name in values:
        if name not in known:
            raise unknown(f"option of {section}", name, known)
    return dict(values)


def _table(name: str, value: Any) -> Mapping[str, Mapping[str, Any]]:
    if not isinstance(value, Mapping) or not all(isinstance(item, Mapping) for item in value.values()):
        raise InputError(f"'{name}' is a table of tables, one for each label: [methods.LABEL].")
    return value


def _make(label: str, variants: Mapping[str, Mapping[str, Any]], more: Mapping[str, Any]) -> Method:
    from polyfed import methods

    options = {**variants.get(label, {}), **more}
    return methods.make(options.pop("method", label), options)


def read_experiment(
    path: Path | None = None,
    given: Mapping[str, Any] | None = None,
    settings: Sequence[str] = (),
    scale: str | None = None,
    labels: Sequence[str] | None = None,
) -> Experiment:
    """Build an experiment from a file, then options, then `--set key=value`, each overriding the one before.

    Parameters
    ----------
    path
        A TOML file; its `[scales.NAME]` tables hold alternative sizes of the same experiment.
    given
        Options from the command line as texts (None values are left out).
    settings
        Texts `key=value`; `method.KEY=...` sets a hyper-parameter of the method, `LABEL.KEY=...` of another one.
    scale
        Which `[scales.NAME]` table of the file to apply.
    labels
        The methods that will run, where they are not the file's.

    Raises
    ------
    InputError
        For an unreadable file or an unknown key (with the nearest known name) or a value of the wrong kind.
    """
    values = _read_file(path, scale)
    values = _overridden(values, {key: parse_value(text) for key, text in (given or {}).items() if text is not None})
    for text in settings:
        key, separator, value = text.partition("=")
        if not separator:
            raise InputError(f"--set takes key=value, for instance --set method.mu=0.1, not '{text}'.")
        values = _assigned(values, key.strip(), parse_value(value.strip()), labels)
    try:
        return experiment(**values)
    except InputError as error:
        if path is None:
            raise
        raise InputError(f"{path}: {error}") from error


def parse_value(text: Any) -> Any:
    """Read a value as TOML does; anything else is a word."""
    try:
        return tomllib.loads(f"value = {text}")["value"] if isinstance(text, str) else text
    except tomllib.TOMLDecodeError:
        return text


def _read_file(path: Path | None, scale: str | None) -> dict[str, Any]:
    if path is None:
        if scale is not None:
            raise InputError("--scale needs an experiment file that defines it.")
        return {}
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise InputError(f"Cannot read the experiment file {path}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"The experiment file {path} is not valid TOML: {error}.") from error
    scales = values.pop("scales", {})
    if scale is not None:
        if scale not in scales:
            raise unknown(f"scale of {path}", scale, scales or {"(none)"})
        values = _overridden(values, scales[scale])
    return values


def _overridden(values: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with others laid over them; a setting may have been written under another of its names."""
    names = short_names()
    found = dict(values)
    for key, value in others.items():
        full = names.get(key, key)
        section, dot, name = full.partition(".")
        if isinstance(value, Mapping) and isinstance(found.get(key), Mapping):
            found[key] = {**found[key], **value}
            continue
        for other in [short for short, place in names.items() if place == full and short != key]:
            found.pop(other, None)
        if dot and isinstance(found.get(section), Mapping) and key != section:
            found[section] = {item: leaf for item, leaf in found[section].items() if item != name}
        found[key] = value
    return found


def _assigned(values: dict[str, Any], key: str, value: Any, labels: Sequence[str] | None) -> dict[str, Any]:
    """Return values with one `--set`: a setting, an option of the method, or an option of one that is compared."""
    owner, dot, option = key.rpartition(".")
    if not dot or owner in SECTIONS:
        return _overridden(values, {key: value})
    given = values.get("method", "fedavg")
    own = given.get("name", "fedavg") if isinstance(given, Mapping) else given
    label = own if owner == "method" else owner
    running = [own, *(labels or values.get("compare", ()))]
    if label not in running:
        raise unknown("owner of an option", owner, ["method", *SECTIONS, *running])
    tables = dict(values.get("methods", {}))
    tables[label] = {**tables.get(label, {}), option: value}
    return {**values, "methods": tables}


# --- back to a command ---


def command(config: Config) -> str | None:
    """Return the command that runs the same again: what differs from the defaults. None: only a script can."""
    if config.script or "=" in config.label:
        return None
    words = ["polyfed", "run", "--method", config.label, *setting_words(config)]
    return shlex.join([*words, *method_words(config, "method")])


def setting_words(config: Config) -> list[str]:
    """Return the settings that differ from the defaults as options of the command line."""
    usual = Config(config.method, config.label)
    words = []
    for short, full in short_names().items():
        value, default = _leaf(config, full), _leaf(usual, full)
        if value != default or short in ("data", "models"):
            text = ",".join(value) if full == "models.names" else to_text(value)
            option = f"--{short.replace('_', '-')}"
            words += [option, text] if short in OPTIONS else ["--set", f"{full}={text}"]
    return words


def method_words(config: Config, owner: str) -> list[str]:
    """Return what a label stands for and the hyper-parameters that are not the defaults, as `--set OWNER.key=...`."""
    from polyfed.methods import reference

    method, name = config.method, reference(type(config.method))
    usual = type(method)()
    changed = {item.name: getattr(method, item.name) for item in fields(method)}
    told = {} if name == config.label else {"method": name}
    told |= {key: value for key, value in changed.items() if value != getattr(usual, key)}
    return [word for key, value in told.items() for word in ("--set", f"{owner}.{key}={to_text(value)}")]


def to_text(value: Any) -> str:
    """Write a value so that `parse_value` reads it back: plain words stay bare, None is `none`."""
    if value is None:
        return "none"
    if isinstance(value, str):
        return value if parse_value(value) == value else json.dumps(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(json.dumps(item) for item in value) + "]"
    return json.dumps(value)


def _leaf(config: Config, full: str) -> Any:
    value: Any = config
    for part in full.split("."):
        value = getattr(value, part)
    return value


# Settings with an option of their own on the command line; all others are reached with --set.
OPTIONS = (
    *("rounds", "seed", "data", "limit", "clients", "partition", "public", "validation", "models", "feature_dim"),
    *("participation", "epochs", "batch_size", "optimizer", "lr", "momentum"),
    *("evaluate", "evaluate_clients", "evaluate_samples", "engine", "workers", "device"),
)
