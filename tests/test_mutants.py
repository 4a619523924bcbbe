"""The tool behind `make mutants`: what it breaks, and what it leaves alone."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import mutants_found as found
from mutate import mutants_of

SOURCE = '''
class Method:
    lam: NotNegative = 1.0

    def loss(self, z, y):
        """Return a loss."""
        if z.dim() > 9:
            raise ValueError("more than " + str(9 - 1))
        return F.mse_loss(z, y) + self.lam * (z - y).pow(2).mean()

    def plan(self):
        return 1 + 1


def share(counts):
    return counts / counts.sum()
'''


def made():
    return {mutant.identity: mutant for mutant in mutants_of(SOURCE, "method.py")}


def test_every_place_of_a_formula_is_broken_and_nothing_else():
    term, whole = "self.lam * (z - y).pow(2).mean()", "F.mse_loss(z, y) + self.lam * (z - y).pow(2).mean()"
    assert list(made()) == [
        "Method.loss: condition: z.dim() > 9 -> z.dim() <= 9",
        f"Method.loss: sign: {whole} -> F.mse_loss(z, y) - {term}",
        f"Method.loss: term: {whole} -> F.mse_loss(z, y)",
        f"Method.loss: term: {whole} -> {term}",
        f"Method.loss: factor: {term} -> self.lam",
        f"Method.loss: factor: {term} -> (z - y).pow(2).mean()",
        "Method.loss: mean: (z - y).pow(2).mean() -> (z - y).pow(2).sum()",
        "Method.loss: left out: (z - y).pow(2) -> z - y",
        "Method.loss: sign: z - y -> z + y",
        "Method.loss: term: z - y -> z",
        "Method.loss: term: z - y -> -y",
        "share: factor: counts / counts.sum() -> counts",
        "share: sum: counts.sum() -> counts.mean()",
    ]


@pytest.mark.parametrize(
    ("call", "others"),
    [
        ("F.cross_entropy(z, y)", ["swapped: F.cross_entropy(z, y) -> F.cross_entropy(y, z)"]),
        ("mean_state(states, w)", ["uniform: mean_state(states, w) -> mean_state(states, [1.0 for _ in w])"]),
        ("z.detach()", ["left out: z.detach() -> z"]),
        ("1 - z", ["sign: 1 - z -> 1 + z", "term: 1 - z -> 1", "complement: 1 - z -> z"]),
        ("a.lerp(b, t)", ["left out: a.lerp(b, t) -> a", "complement: a.lerp(b, t) -> a.lerp(b, 1 - t)"]),
        ("z if y else w", ["choice: z if y else w -> z", "choice: z if y else w -> w"]),
        ("f(z, reduction='sum')", ["reduction: f(z, reduction='sum') -> f(z, reduction='mean')"]),
        ("reply.meta['samples']", ["uniform: reply.meta['samples'] -> 1"]),
        ("[z for reply.meta['samples'] in z]", []),  # written to, not read
        ("'main' + name", []),
        ("step.name == 'main'", []),
    ],
)
def test_kinds_of_mistakes(call, others):
    found = mutants_of(f"def f(z):\n    return {call}\n", "method.py")
    assert [mutant.identity.removeprefix("f: ") for mutant in found] == others


def test_a_mutant_is_the_function_with_one_change():
    def share(counts):
        return None

    mutant = made()["share: factor: counts / counts.sum() -> counts"]
    share.__code__ = mutant.code()
    assert share(3.0) == 3.0
    again = made()["share: sum: counts.sum() -> counts.mean()"]
    assert again.function == mutant.function != made()["Method.loss: sign: z - y -> z + y"].function


@pytest.mark.parametrize("name", found.PARTS)
def test_a_part_has_formulas_and_tests_that_import_it(name):
    assert found.mutants(name) and found.name_of(found.file_of(name)) == name
    assert found.test_files(name)


def test_methods_and_their_parts_are_told_apart():
    methods, users = found.method_files(), found.users_of("ops.distance")
    assert found.name_of(found.METHODS / "moon.py") == "moon" and found.name_of(found.METHODS / "../api.py") is None
    assert "moon" in methods and not set(methods) & set(found.PARTS)
    assert {"fedgen", "fedgen_hetero"} <= set(users) and "local" not in users
