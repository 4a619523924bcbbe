"""Experiments: a run, or several methods and seeds of it, from a TOML file or options, and back to a command."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyfed.command import parse_setting, parse_value
from polyfed.config import SECTIONS, Config, known_fields, short_names
from polyfed.core.errors import InputError, unknown
from polyfed.core.fields import AtLeastOne, check_fields, split_names

if TYPE_CHECKING:
    from polyfed.core.method import Method


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
    settings
        Label -> settings of this label alone, by full name: its networks, how it trains, who takes part, its rounds,
        attack and rule.
    sweep
        Setting, `method.OPTION` or `LABEL.OPTION` -> the values that `polyfed compare` tries.
    """

    base: Config
    methods: dict[str, dict[str, Any]] = field(default_factory=dict)
    compare: tuple[str, ...] = ()
    seeds: AtLeastOne = 3
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    sweep: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self, "experiment")

    def config(self, label: str | None = None, seed: int | None = None) -> Config:
        """Return the configuration of one method of the experiment with one seed."""
        label = self.base.label if label is None else label
        method = _make(label, self.methods, {})
        config = replace(self.base, method=method, label=label, seed=self.base.seed if seed is None else seed)
        for full, value in self.settings.get(label, {}).items():
            section, _, name = full.partition(".")
            own = replace(getattr(config, section), **{name: value}) if name else value
            config = replace(config, **{section: own})
        return config

    def own_settings(self, label: str) -> dict[str, Any]:
        """Return the settings of a label that are not those of all."""
        own, common = self.config(label), self.base

        def value(config: Config, full: str) -> Any:
            section, _, name = full.partition(".")
            return getattr(getattr(config, section), name) if name else getattr(config, section)

        given = self.settings.get(label, {})
        return {full: leaf for full, leaf in given.items() if value(own, full) != value(common, full)}

    def dump(self) -> dict[str, Any]:
        """Return everything for `comparison.json`."""
        more = {"methods": self.methods, "compare": list(self.compare), "seeds": self.seeds, "settings": self.settings}
        swept = {"sweep": {key: list(values) for key, values in self.sweep.items()}} if self.sweep else {}
        return {**self.base.dump(), **more, **swept}


KEYS = ("method", "methods", "compare", "seeds", "sweep")  # of an experiment, beside the settings
OWN = ("models", "training", "participation", "rounds", "trust")  # what a label may have of its own; data is common
SWEPT = ("models", "training")  # sections whose settings a sweep may vary


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
    parts = {section: kind(**known_fields(section, kind, tree[section])) for section, kind in SECTIONS.items()}
    variants = {label: dict(options) for label, options in _table("methods", values.get("methods", {})).items()}
    own = {
        label: _own_settings(label, options.pop("settings"))
        for label, options in variants.items()
        if "settings" in options
    }
    given = values.get("method", "fedavg")
    options = dict(given) if isinstance(given, Mapping) else {"name": given}
    name = options.pop("name", "fedavg")
    base = Config(_make(name, variants, options), name, **top, **parts)
    if options:
        variants[name] = {**variants.get(name, {}), **options}
    rest = {key: values[key] for key in ("compare", "seeds") if key in values}
    made = Experiment(base, variants, settings=own, sweep=_swept(values.get("sweep", {})), **rest)
    for label in own:
        made.config(label)  # refuses wrong values before anything runs
    return made


def _own_settings(label: str, given: Any) -> dict[str, Any]:
    """Return the settings of one label by full name."""
    if not isinstance(given, Mapping):
        raise InputError(f"methods.{label}.settings is a table of settings, such as {{models = [...], lr = 0.01}}.")
    found = {full: leaf for key, value in given.items() for full, leaf in _placed(key, value, short_names())}
    for full in found:
        section, _, name = full.partition(".")
        if section not in OWN:
            raise InputError(
                f"methods.{label}.settings: '{full}' is the same for all methods of a comparison: only settings of "
                f"{' and '.join(OWN)} can differ."
            )
        if name:
            known_fields(section, SECTIONS[section], {name: None})
    return found


def full_name(key: str) -> str:
    """Return the full name of a setting given by either of its names."""
    return short_names().get(key, key)


def _swept(given: Any) -> dict[str, tuple[Any, ...]]:
    """Return the values of a sweep by full name, checked as far as that goes without its methods."""
    if not isinstance(given, Mapping):
        raise InputError("sweep is a table of lists, such as {lr = [0.01, 0.1]}.")
    listed: dict[str, Any] = {}
    for key, values in given.items():
        inner = values.items() if isinstance(values, Mapping) else ()  # [sweep.method] or [sweep.LABEL]
        listed |= {f"{key}.{name}": each for name, each in inner} if inner else {full_name(key): values}
    names = short_names()
    for key, values in listed.items():
        section, dot, name = key.partition(".")
        if not isinstance(values, list | tuple) or not values:
            raise InputError(f"sweep.{key} is a list of values to try, not {values!r}.")
        if not dot and key not in names:
            raise unknown("setting to sweep", key, [short for short, full in names.items() if full.startswith(SWEPT)])
        if not dot or (section in SECTIONS and section not in SWEPT):
            raise InputError(
                f"sweep.{key} would change more than the method: a sweep varies settings of {' and '.join(SWEPT)}, and "
                "options of methods (method.OPTION)."
            )
        if section in SWEPT:
            known_fields(section, SECTIONS[section], {name: None})
    plain = {key: [tuple(v) if isinstance(v, list) else v for v in values] for key, values in listed.items()}
    for key, values in plain.items():
        for value in values:
            if values.count(value) > 1:
                raise InputError(f"sweep.{key} names {value} twice: name each value once.")
    return {key: tuple(values) for key, values in sorted(plain.items())}  # the order is nobody's choice


def _placed(key: str, value: Any, names: Mapping[str, str]) -> Iterable[tuple[str, Any]]:
    """Yield full names and values of one entry: a setting by either name, or a section as a table."""
    if isinstance(value, Mapping) and key in SECTIONS:
        return [(f"{key}.{name}", item) for name, item in value.items()]
    if key in names:
        return [(names[key], value)]
    if key.partition(".")[0] in SECTIONS:
        return [(key, value)]
    raise unknown("option", key, [*names, *SECTIONS, *KEYS])


def _table(name: str, value: Any) -> Mapping[str, Mapping[str, Any]]:
    if isinstance(value, list | tuple):
        raise InputError(
            f"'{name}' holds options, [methods.LABEL]; which methods to compare is said by compare = {value}."
        )
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
    sweep: Sequence[str] = (),
) -> Experiment:
    """Build an experiment from a file, then options, then `--set key=value`, each overriding the one before.

    Parameters
    ----------
    path
        A TOML file; its `[scales.NAME]` tables hold alternative sizes of the same experiment.
    given
        Options from the command line as texts (None values are left out).
    settings
        Texts `key=value`; `method.KEY=...` sets a hyper-parameter of the method, `LABEL.KEY=...` of another one, and
        `LABEL.settings.KEY=...` a setting of this label alone.
    scale
        Which `[scales.NAME]` table of the file to apply.
    labels
        The methods that will run, where they are not the file's.
    sweep
        Texts `key=a,b,c`: values to try, instead of the file's for this key.

    Raises
    ------
    InputError
        For an unreadable file or an unknown key (with the nearest known name) or a value of the wrong kind.
    """
    values = _read_file(path, scale)
    values = _overridden(values, {key: parse_value(text) for key, text in (given or {}).items() if text is not None})
    for text in settings:
        values = _assigned(values, *parse_setting(text), labels)
    swept: set[str] = set()
    for text in sweep:
        key, separator, value = text.partition("=")
        if not separator or not split_names(value):
            raise InputError(f"--sweep takes key=a,b,c, for instance --sweep lr=0.01,0.1, not '{text}'.")
        key = key.strip()
        if full_name(key) in swept:
            raise InputError(f"--sweep {key} is given twice: name all of its values in one, --sweep {key}=a,b,c.")
        swept.add(full_name(key))
        listed = parse_value(value.strip())
        tried = listed if isinstance(listed, list) else [parse_value(part) for part in split_names(value)]
        values = {**values, "sweep": {**values.get("sweep", {}), key: tried}}
    try:
        return experiment(**values)
    except InputError as error:
        if path is None:
            raise
        raise InputError(f"{path}: {error}") from error


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
    return _at_scale(values, scale, f"scale of {path}")


def _at_scale(values: Mapping[str, Any], scale: str | None, what: str) -> dict[str, Any]:
    """Return the settings of a file with one of its scales laid over them; what a paper says is no setting."""
    found = {key: value for key, value in values.items() if key not in ("scales", "paper")}
    if scale is None:
        return found
    scales = values.get("scales", {})
    if scale not in scales:
        raise unknown(what, scale, scales or {"(none)"})
    return _overridden(found, scales[scale])


def experiment_of(values: Mapping[str, Any], scale: str | None, case: Mapping[str, Any]) -> Experiment:
    """Build an experiment from what a file says: its settings, one of its scales, and settings laid over both.

    Raises
    ------
    InputError
        As `experiment`, and for an unknown scale.
    """
    return experiment(**_overridden(_at_scale(values, scale, "scale"), case))


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
    own_setting = owner.endswith(".settings")
    owner = owner.removesuffix(".settings")
    given = values.get("method", "fedavg")
    own = given.get("name", "fedavg") if isinstance(given, Mapping) else given
    label = own if owner == "method" else owner
    running = [own, *(labels or values.get("compare", ()))]
    if label not in running:
        raise unknown("owner of an option", owner, ["method", *SECTIONS, *running])
    tables = dict(values.get("methods", {}))
    mine = tables.get(label, {})
    added = {"settings": {**mine.get("settings", {}), option: value}} if own_setting else {option: value}
    tables[label] = {**mine, **added}
    return {**values, "methods": tables}


# --- back to a command ---
