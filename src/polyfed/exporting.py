"""A trained model written down: for use without polyfed, and its predictions for the rows of a file."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.core.checkpoint import write_atomic
from polyfed.core.errors import InputError, first_line, nearest
from polyfed.core.learner import Learner
from polyfed.core.task import Regression
from polyfed.data.decode import is_picture
from polyfed.data.given import FILES
from polyfed.data.pictures import picture_files
from polyfed.data.tables import any_table
from polyfed.trained import TrainedModel, model_file

ENDINGS = {  # what each format's files are called; other endings are free
    "safetensors": (".safetensors",),
    "torch": (".pt2",),
    "torchscript": (".ts", ".pt", ".pth"),
    "onnx": (".onnx",),
}
FORMATS = tuple(ENDINGS)


def export(trained: TrainedModel, out: str | Path, format: str = "safetensors") -> Path:
    """Write a model for use without polyfed; it takes inputs that are scaled and encoded already (`trained.inputs`).

    Parameters
    ----------
    trained
        What `load_model` gave.
    out
        The file to write.
    format
        `safetensors` (the tensors by name, and for `load_model` how to use them; the only one for learners, which
        need the extra learners), `torch` (`torch.export`, a `.pt2` file), `torchscript` (for `torch.jit.load` and
        C++) or `onnx` (needs the extra onnx).

    Raises
    ------
    InputError
        If the format is unknown, the network cannot be written in it, or the file's ending is that of another format.
    """
    out = Path(out)
    if format not in FORMATS:
        raise InputError(f"format is {', '.join(FORMATS[:-1])} or {FORMATS[-1]}, not '{format}'.")
    for other, endings in ENDINGS.items():
        if out.suffix.lower() in endings and other != format:
            raise InputError(
                f"{out} would be a file of the format {other}, not {format}: call it "
                f"{out.with_suffix(ENDINGS[format][0])}, or give --format {other} (format='{other}')."
            )
    if isinstance(trained.module, Learner) and format != "safetensors":
        raise InputError(f"This model is no network, so it cannot be written as {format}: format is safetensors.")
    out.parent.mkdir(parents=True, exist_ok=True)
    if format == "safetensors":
        write_atomic(out, model_file(trained.module, trained.about))
        return out
    rows = torch.zeros(2, *trained.input_shape, dtype=torch.int64 if trained.input_shape.words else torch.float32)
    batch = {0: torch.export.Dim("batch")}
    try:
        if format == "torch":
            content = BytesIO()
            program = torch.export.export(trained.module, (rows,), dynamic_shapes=(batch,), strict=False)
            torch.export.save(program, content)
            write_atomic(out, content.getvalue())
        elif format == "torchscript":
            write_atomic(out, _script(trained.module, rows))
        else:
            with _quiet("torch.onnx"):
                torch.onnx.export(
                    trained.module,
                    (rows,),
                    out,
                    dynamo=True,
                    dynamic_shapes=(batch,),
                    external_data=False,
                    verbose=False,
                )
    except ImportError as error:
        raise InputError(f"Writing ONNX needs another package ({error}): pip install 'polyfed[onnx]'.") from error
    except Exception as error:  # torch raises many kinds; the sentence for people is the same
        cause = error.__cause__ or error  # that of torch.onnx itself is advice on what to try
        raise InputError(f"This network cannot be written as {format} ({first_line(cause)}).") from error
    return out


def _script(module: nn.Module, rows: Tensor) -> bytes:
    """Return a network as TorchScript, once it is sure that other numbers of rows go through it as through itself."""
    content = BytesIO()
    with _quiet("torch.jit"), torch.no_grad():
        script = torch.jit.trace(module, rows, check_trace=False)
        more = torch.ones(5, *rows.shape[1:], dtype=rows.dtype)
        if not torch.allclose(script(more), module(more), atol=1e-5):
            raise InputError("its steps depend on what it sees")
        torch.jit.save(script, content)
    return content.getvalue()


def write_predictions(trained: TrainedModel, data: str | Path, out: str | Path, keep: Sequence[str] = ()) -> int:
    """Predict for a file or folder and write a CSV file: prediction, and the probability of each class or label.

    The first column says which row it is, counted from 0, or the name of the image.

    Parameters
    ----------
    trained, data, out
        The model, the new rows, and the file to write, which must not be there yet.
    keep
        Columns of a table to write beside the predictions, for instance the one of an identifier.

    Raises
    ------
    InputError
        If the rows are not of the kind that the network was trained on, a column to keep is missing, or `out` exists.
    """
    import pandas  # type: ignore[import-untyped]

    if Path(out).exists():
        raise InputError(f"{out} already exists: choose another --out, or remove it.")
    place = Path(data).expanduser()
    kind = trained.form.kind
    if not place.exists():
        raise InputError(f"There is no file {data}: correct its name.")
    raw: Any = place
    columns: dict[str, Any] = {}
    if kind == "image" and (place.is_dir() or is_picture(place.name)):
        raw = picture_files(place)
        columns["file"] = [str(file.relative_to(place)) if place.is_dir() else file.name for file in raw]
    elif place.is_dir():
        raise InputError(f"{data} is a folder, but the network takes {kind}, not images: name a file.")
    elif place.suffix.lower() not in (".npy", ".parquet") and kind in ("signal", "features"):
        raise InputError(f"The network takes {kind}: give the inputs as an array in a .npy file.")
    kept = _columns_to_keep(place, keep, ("row", "prediction", *trained.class_names))
    found = trained.predictions(raw)
    columns = {**(columns or {"row": range(len(found))}), **kept}
    if not isinstance(trained.task, Regression):
        columns["prediction"] = [" ".join(one) if isinstance(one, list) else one for one in trained.in_words(found)]
    columns |= {name: found[:, place].tolist() for place, name in enumerate(trained.class_names)}
    write_atomic(Path(out), pandas.DataFrame(columns).to_csv(index=False).encode())
    return len(found)


def _columns_to_keep(place: Path, names: Sequence[str], taken: Sequence[str]) -> dict[str, list[Any]]:
    """Return columns of a table as they are."""
    if not names:
        return {}
    if place.suffix.lower() not in FILES:
        raise InputError(f"{place} has no columns to keep: only tables have (--keep).")
    rows = any_table(place, str(place)).rows
    for name in names:
        if name not in rows.column_names:
            raise InputError(
                f"{place} has no column '{name}' to keep: {nearest(name, rows.column_names, 'its columns are')}"
            )
        if name in taken:
            raise InputError(f"'{name}' is a column of the predictions, too: rename that of {place} to keep it.")
    return {name: rows[name].to_pylist() for name in names}


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Keep a library from warning of packages that are not needed."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
