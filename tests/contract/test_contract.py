"""The invariants that every method keeps (`polyfed.testing`; one line for each method, see table.py and cases_*.py)."""

import subprocess
import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from tests.contract.table import CASES, everyday

import polyfed as pf
from polyfed import methods
from polyfed.testing import CHECKS, NotApplicable, Setting, check_method
from polyfed.testing.checks import (
    another_seed_another_run,
    client_order_does_not_matter,
    fusing_can_be_divided,
    resume_gives_the_same_run,
    rules_against_bad_senders_slot_in,
    same_seed_same_run,
    stacks_give_the_same_numbers,
)


def name_of(check):
    return check.__name__


def test_every_registered_method_is_in_the_table():
    assert set(methods.registry()) == {case.method for case in CASES}
    assert len({case.id for case in CASES}) == len(CASES)  # each has its own line in the stored results


SEEDS = (same_seed_same_run, another_seed_another_run)
OF_A_FEW = (
    resume_gives_the_same_run,
    client_order_does_not_matter,
    rules_against_bad_senders_slot_in,
    fusing_can_be_divided,
)  # every day of a few methods: several runs each


@pytest.mark.parametrize("check", [check for check in CHECKS if check not in (*SEEDS, *OF_A_FEW)], ids=name_of)
@everyday()
def test_contract(case, check):
    fulfils(case, check)


@pytest.mark.long
@pytest.mark.parametrize("check", SEEDS, ids=name_of)
@everyday()
def test_contract_of_seeds(case, check):
    """Where the first fails `workers_do_not_matter` does, which compares all the same with another run of the seed."""
    fulfils(case, check)


@pytest.mark.parametrize("check", OF_A_FEW, ids=name_of)
@everyday(few=True)
def test_contract_every_day_of_a_few_methods(case, check):
    fulfils(case, check)


def fulfils(case, check):
    try:
        check(case.setting)
    except NotApplicable as reason:
        pytest.skip(str(reason))


@dataclass(frozen=True)
class Averaged(pf.FedAvg):
    """A method of somebody else, which a test breaks in one place."""

    name: ClassVar[str] = "averaged"
    fault: str = ""

    def local(self, client, step, ctx):
        reply = yield from super().local(client, step, ctx)
        if self.fault == "inputs":
            reply.data["more"] = client.train.inputs()[:2]
        if self.fault == "forgets":
            COUNTS[client.id] = COUNTS.get(client.id, 0) + 1  # not in its memory, which is checkpointed
            reply.params["main"] = {name: t * COUNTS[client.id] for name, t in reply.params["main"].items()}
        if self.fault == "other model":
            reply.params["side"] = {"w": torch.zeros(2)}
        return reply

    def loss(self, nets, batch, aux):
        loss = super().loss(nets, batch, aux)
        return (
            2 * loss if self.fault == "looks" and float(loss.detach()) > 1e9 else loss
        )  # at a value: no stack can do that


COUNTS: dict[int, int] = {}


def test_a_method_of_somebody_else_passes():
    done = check_method(Averaged(), "mlp:1x8", limit=(Averaged(weighting="uniform"), pf.FedAvg(weighting="uniform")))
    assert len(done) == len(CHECKS)


@pytest.mark.long
def test_the_contract_is_at_hand_after_import_polyfed():
    """In a process of its own: here it was imported already."""
    code = "import polyfed as pf; print(pf.testing.check_method.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["check_method"], done.stderr


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("inputs", "no client tells an input as it is: data/more holds inputs of client"),
        ("other model", "Only models that `shares` names travel"),
        ("forgets", "The same seed gives the same run"),
    ],
)
def test_a_broken_method_is_told_what_does_not_hold(fault, says):
    with pytest.raises(AssertionError, match=says):
        check_method(Averaged(fault=fault), "mlp:1x8")


def test_a_loss_that_cannot_be_stacked_must_be_said():
    looks = Averaged(fault="looks")
    with pytest.raises(AssertionError, match=r"one by one \(.*mlp:1x8 run one by one: .*\.item\(\).*but stacked=True"):
        stacks_give_the_same_numbers(Setting(looks, ("mlp:1x8",)))
    stacks_give_the_same_numbers(Setting(looks, ("mlp:1x8",), stacked=False))
    with pytest.raises(AssertionError, match="in stacks, but stacked=False"):
        stacks_give_the_same_numbers(Setting(Averaged(), ("mlp:1x8",), stacked=False))
