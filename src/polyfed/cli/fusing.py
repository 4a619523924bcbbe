"""`polyfed fuse`: which data, prepared how. Files of models say it themselves, where they have a header."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from polyfed.config import Data
from polyfed.core.task import CLASSIFICATION, from_description
from polyfed.data import Dataset
from polyfed.data.dataset import plural
from polyfed.data.described import few, scaled_as
from polyfed.data.form import Form
from polyfed.data.texts import Words
from polyfed.fusion.files import common_header


def data_for(files: Sequence[Path], settings: Data) -> tuple[Dataset, dict[str, Any] | None, str]:
    """Return the data as the networks of some files take it, the header of the files, and a sentence about both.

    Raises
    ------
    InputError
        If the headers disagree, or the data cannot be prepared as they say.
    """
    header, bare = common_header(files)
    if header is None:
        loaded = settings.whole(0)
        columns = f" ({few(loaded.features)})" if loaded.features else ""
        return loaded, None, (
            f"{few(bare)}: no header says how these networks take their inputs, so columns{columns}, scaling and the "
            f"order of the {plural(loaded.task)} are those of {settings.source}; networks "
            "that were trained on other data need its scaling"
        )  # fmt: skip
    form, task = Form.load(header["form"]), from_description(header.get("task", [CLASSIFICATION.name]))
    more: dict[str, Any] = {"task": task} if settings.task is None or task.name == settings.task else {}
    if form.words is not None and settings.tokenizer is not None:
        form = replace(form, words=Words.given(settings.tokenizer))
    if form.kind in ("table", "text", "tokens"):
        more["form"] = form
    if form.kind == "table":
        settings = replace(settings, inputs=tuple(column.name for column in form.columns))
    source = next(Path(path).name for path in files if Path(path).name not in bare)
    names = header["class_names"]
    first = settings.whole(0, **more)
    if task == CLASSIFICATION and list(first.class_names) != names:
        first = settings.whole(0, **more, class_names=names)
    loaded = scaled_as(first, header, source)
    others = f"; {few(bare)}: no header, taken to be alike" if bare else ""
    return loaded, header, (
        f"The rows of {settings.source} are prepared as the header of {source} says: its columns, words, scaling and "
        f"order of classes{others}"
    )  # fmt: skip
