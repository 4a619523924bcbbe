"""Fused networks in files: fuse the states of trained networks, write the result, read it again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from polyfed.core.checkpoint import read_json, state_file, write_atomic, write_json
from polyfed.core.errors import InputError
from polyfed.core.shape import InputShape
from polyfed.core.weights import KEY, fill, header_of, read_state
from polyfed.data.described import differences
from polyfed.fusion.chain import load_chain
from polyfed.fusion.combining import Combined
from polyfed.fusion.fusing import fuse
from polyfed.fusion.networks import Averaged, Selection, Several
from polyfed.models import with_feature_dim
from polyfed.specs import ModelSpec, construct, is_own

KEPT = ("input_shape", "form", "scaling", "class_names", "task", "outputs", "seed", "feature_dim", "feature_adapter")
FORMAT = 2  # of the json file beside a fused model


def fuse_files(
    paths: Sequence[str | Path],
    model_specs: Sequence[str] | str,
    method: str = "ams-top1",
    *,
    input_shape: Sequence[int],
    num_classes: int,
    out: str | Path,
    header: Mapping[str, Any] | None = None,
    **options: Any,
) -> nn.Module:
    """Fuse networks of the zoo whose states are in files, and write the fused model.

    Parameters
    ----------
    paths
        One file for each network (safetensors, or `.pt` with tensors only), as a run leaves them in
        `models/client-<n>.safetensors`.
    model_specs
        Their model strings; fewer than paths are dealt in turn.
    method, options
        As in `fuse`; `distill_into` must be a model string.
    input_shape, num_classes
        Of the data that the networks were trained on.
    out
        Where to write: `<out>.safetensors` and, beside it, `<out>.json`, which says how to build the module again
        (`load_fused`).
    header
        What the files say about their use (`common_header`): the fused file then says it, too, and `load_model` reads
        it.

    Raises
    ------
    InputError
        A file cannot be read or does not fit its model string; or as in `fuse`.
    """
    specs = [model_specs] if isinstance(model_specs, str) else list(model_specs)
    student = options.get("distill_into")
    if not specs or not paths:
        raise InputError("Nothing to fuse: name at least one file and one model.")
    if isinstance(student, nn.Module):
        raise InputError("fuse_files needs distill_into as a model string, so that the file can be read again.")
    dealt = [specs[place % len(specs)] for place in range(len(paths))]
    models = [_read_network(path, spec, input_shape, num_classes) for path, spec in zip(paths, dealt, strict=True)]
    fused = fuse(models, method, input_shape=input_shape, **options)
    description: dict[str, Any] = {
        "method": method,
        "sources": [Path(path).name for path in paths],
        "input_shape": InputShape(input_shape).dump(),
        "num_classes": num_classes,
    }
    if isinstance(fused, Several):
        kept = [dealt[place] for place in fused.places]
        projections = [_projection(models[place].state_dict()) for place in fused.places]
        description |= {"kind": fused.kind, "models": kept, "projections": projections, "options": fused.recipe()}
    else:
        kind = "model" if student is not None or method == "average" else "matched"
        projections = [_projection(fused.state_dict())]
        description |= {"kind": kind, "models": [student or dealt[0]], "projections": projections, "options": {}}
    write_fused(fused, description, out, header)
    return fused


def common_header(paths: Sequence[str | Path]) -> tuple[dict[str, Any] | None, list[str]]:
    """Return what the files of networks say about their use, and the names of those that say nothing.

    Raises
    ------
    InputError
        If two of them disagree: they would need different inputs, or mean different classes.
    """
    found = {str(path): header_of(Path(path)) for path in paths}
    headers = {path: header for path, header in found.items() if header is not None}
    for path, header in headers.items():
        first = next(iter(headers))
        if told := differences(headers[first], header):
            raise InputError(
                f"The networks of {first} and {path} cannot be fused, as their headers do not agree: "
                f"{'; '.join(told)}. Networks that are fused take the same inputs and know the same classes."
            )
    return next(iter(headers.values()), None), [Path(path).name for path in found if path not in headers]


def _read_network(path: str | Path, spec: str, input_shape: Sequence[int], num_classes: int) -> nn.Module:
    state = read_state(Path(path))
    network = _projected(construct(spec, InputShape(input_shape), num_classes), _projection(state))
    fill(network, state, f"{path}, read as {spec},")
    return network


def _projection(state: Mapping[str, Tensor]) -> tuple[int, str] | None:
    """Return size and kind of the features that a run with `feature_dim` gave a network, if it did."""
    if "head.weight" not in state or not any(name.startswith("model.") for name in state):
        return None
    return state["head.weight"].shape[1], "linear" if "projection.weight" in state else "avgpool"


def _projected(network: nn.Module, projection: Sequence[Any] | None) -> nn.Module:
    return network if projection is None else with_feature_dim(network, projection[0], projection[1], always=True)


def write_fused(
    fused: nn.Module, description: Mapping[str, Any], out: str | Path, header: Mapping[str, Any] | None = None
) -> None:
    """Write `<out>.safetensors` and `<out>.json`, which says how to build the module again."""
    base = _base(out)
    words = {}
    if header is not None:
        about = {key: value for key, value in header.items() if key in KEPT}
        about |= {"model": None, "name": base.name, "fused": dict(description)}
        words = {KEY: json.dumps(about)}
    write_atomic(base.with_name(f"{base.name}.safetensors"), state_file(fused.state_dict(), words))
    write_json(base.with_name(f"{base.name}.json"), {"format": FORMAT, **description})


def load_fused(path: str | Path, models: Sequence[ModelSpec] | None = None) -> nn.Module:
    """Read what `write_fused` wrote (either of its two files, or their common name), in prediction mode.

    Parameters
    ----------
    path
        Where it was written.
    models
        What builds the networks, where they are somebody's own (`package.module:function`): a file never decides which
        code runs.

    Raises
    ------
    InputError
        If a file is missing, damaged or from another version.
    """
    base = _base(path)
    about = read_json(base.with_name(f"{base.name}.json"))
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise InputError(f"{base}.json does not describe a fused model of this version.")
    return rebuild(about, read_state(base.with_name(f"{base.name}.safetensors")), models, base)


def rebuild(
    about: Mapping[str, Any], state: dict[str, Tensor], models: Sequence[ModelSpec] | None, base: Path
) -> nn.Module:
    """Build a fused module from its description and fill it, in prediction mode."""
    shape = InputShape.load(about["input_shape"])
    specs: Sequence[ModelSpec] = about["models"]
    own = [str(spec) for spec in specs if is_own(str(spec))]
    if own and models is None:
        raise InputError(f"{base} was fused of {', '.join(dict.fromkeys(own))}: pass what builds them (models=[...]).")
    if models is not None:
        specs = [models[place % len(models)] for place in range(len(specs))]
    networks = [
        _projected(construct(spec, shape, about["num_classes"]), projection)
        for spec, projection in zip(specs, about["projections"], strict=True)
    ]
    kinds: dict[str, type[Several]] = {"selection": Selection, "ensemble": Averaged, "combined": Combined}
    if about["kind"] in kinds:
        fused: nn.Module = kinds[about["kind"]](networks, **about["options"])
    elif about["kind"] == "matched":
        fused = load_chain(networks[0], state)
    else:
        fused = networks[0]
    fill(fused, state, base)
    return fused.eval()


def _base(path: str | Path) -> Path:
    path = Path(path)
    return path.with_suffix("") if path.suffix in (".safetensors", ".json") else path
