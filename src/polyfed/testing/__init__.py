"""The contract that every method keeps, for methods of other packages too.

    from polyfed.testing import check_method

    def test_my_method():
        check_method(MyMethod(lam=0.5), models=["mlp:1x16", "cnn:4-8"])

Every check runs the method in a small federation on noise with class patterns, and raises an `AssertionError` that says
what does not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from polyfed.arguments import as_method, as_models
from polyfed.core.method import Method
from polyfed.specs import ModelSpec
from polyfed.testing.checks import CHECKS, NotApplicable
from polyfed.testing.setting import Limit, Setting, synthetic, unequal

__all__ = ["CHECKS", "Limit", "NotApplicable", "Setting", "check_method", "synthetic", "unequal"]


def check_method(
    method: Method | type[Method] | str,
    models: Sequence[ModelSpec] | ModelSpec = ("mlp:1x16", "mlp:2x16", "cnn:4-8"),
    *,
    public: bool = False,
    feature_dim: int | None = None,
    limit: Limit | tuple[Method, Method] | None = None,
    stacked: bool = True,
) -> list[str]:
    """Put a method through every check of the contract and return the names of those that applied.

    The parameters are those of `Setting`.

    Raises
    ------
    AssertionError
        With the check, and what does not hold.
    """
    setting = Setting(as_method(method), tuple(as_models(models)), public, feature_dim, limit, stacked)
    done = []
    for check in CHECKS:
        try:
            check(setting)
        except NotApplicable:
            continue
        except Exception as error:
            said = f"{error}" if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
            raise AssertionError(f"{setting.method.name or type(method).__name__}: {_words(check)}: {said}") from error
        done.append(check.__name__)
    return done


def _words(check: Callable[[Setting], None]) -> str:
    return (check.__doc__ or check.__name__).splitlines()[0].rstrip(".")
