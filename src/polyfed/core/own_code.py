"""Somebody's own code, by name: `package.module:function`, imported where it is and never sent anywhere."""

from __future__ import annotations

import importlib
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from polyfed.core.errors import InputError, PolyfedError

LOG = Path("polyfed-error.log")  # the traceback of an exception in a party's own code
PACKAGE = Path(__file__).parents[2]
REFERENCE = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")


def is_reference(name: str) -> bool:
    """Tell whether a text looks like `package.module:function`."""
    return REFERENCE.fullmatch(name) is not None


def imported(name: str, option: str) -> Any:
    """Import `package.module:attribute`; the current folder counts, as with `python -m`.

    Raises
    ------
    InputError
        Naming the option and what is wrong.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise InputError(f"{option} {name} names nothing to import: write package.module:function.")
    if "" not in sys.path:
        sys.path.insert(0, "")
    importlib.invalidate_caches()  # the file may have been written a moment ago
    with own_code(f"{option} {name}"):
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise InputError(f"{option} {name} cannot be imported: {error}.") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise InputError(f"{option} {name} cannot be imported: module '{module}' has no attribute '{attribute}'.")
        found = getattr(found, part)
    return found


@contextmanager
def own_code(what: str) -> Iterator[None]:
    """Turn an exception in a party's own code into one sentence, and keep the traceback in a file.

    Raises
    ------
    InputError
        Naming `what`, the error, and the line of the party's own code where it happened.
    """
    try:
        yield
    except PolyfedError:
        raise
    except Exception as error:
        place, kept = _place(error), kept_traceback(error)
        raise InputError(f"{what} failed with {type(error).__name__}: {error}{place}.{kept}") from error


def kept_traceback(error: Exception) -> str:
    """Keep an error's traceback in a file and say where (nothing, where no file can be written)."""
    with suppress(OSError):
        LOG.write_text("".join(traceback.format_exception(error)))
        return f" The whole traceback is in {LOG}."
    return ""


def _place(error: Exception) -> str:
    """Return file and line of the innermost call in somebody's own code: neither ours nor installed."""
    if isinstance(error, SyntaxError):
        return ""  # its words name file and line
    installed = (str(PACKAGE), *(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")), "<")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(installed)]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
