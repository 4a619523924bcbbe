"""A federation of sites, once the server stands: who takes part, does it fit, the rounds, and what is left behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from polyfed import methods
from polyfed.core.checkpoint import pack_tree, read_json, unpack_tree, write_atomic
from polyfed.core.errors import InputError, PolyfedError
from polyfed.core.method import Method
from polyfed.core.metrics import Metric, make_metrics
from polyfed.core.needs import check_needs, missing
from polyfed.core.party import Blueprint, ClientInfo
from polyfed.core.robust import nobody_to_compare
from polyfed.core.rundir import RunDirectory
from polyfed.core.runstate import Line
from polyfed.core.samples import Samples
from polyfed.core.settings import Settings
from polyfed.core.task import CLASSIFICATION
from polyfed.flower.agree import agree, settle
from polyfed.flower.alone import ask_alone
from polyfed.flower.backend import FlowerBackend, LiveFederation
from polyfed.flower.codec import Head
from polyfed.flower.describe import MAX_SAMPLES, read_introduction, read_task, shape_of
from polyfed.flower.expect import Expectations
from polyfed.flower.mailbox import Mailbox, TooFewSites, refusal
from polyfed.flower.registration import END_SECONDS, Introductions, Registration
from polyfed.flower.rehearse import Problem
from polyfed.flower.sitedata import fingerprint
from polyfed.flower.weights import in_words
from polyfed.result import Result
from polyfed.terminal.stopping import Stopped

RESULT = "result.json"
Observer = Callable[[Line], None]
Met = tuple[ClientInfo, Blueprint]  # what an introduction tells
Observers = Sequence[Observer] | Callable[[], Sequence[Observer]]  # a function is called when the sites are there


@dataclass(frozen=True)
class Given:
    """What a federation is about, before its sites are known."""

    method: Method
    settings: Settings
    run: Head  # the settings that every message carries
    sites: list[str]
    directory: RunDirectory | None  # None keeps everything in memory
    public: Samples | None = None
    public_classes: int | None = None
    test: Samples | None = None
    max_bytes: int = 1 << 30
    max_share: float = 1.0
    max_samples: int = MAX_SAMPLES
    metrics: tuple[Metric, ...] = ()  # where they are functions; otherwise the settings name them
    alone: bool = False  # whether to let the sites train by themselves as well, after the last round

    def read(self, site: str, head: Head, blob: bytes) -> Met:
        """Read an introduction."""
        return read_introduction(site, head, blob, self.method, self.run, self.max_bytes, self.max_samples)


def run_federation(
    mailbox: Mailbox,
    given: Given,
    resume: bool = False,
    observers: Observers = (),
    say: Callable[[str], None] = print,
) -> Result:
    """Register the sites, run the rounds, keep the result, and then tell the sites that it is over."""
    assert given.directory is not None
    out = given.directory.path
    check = partial(agree, public=fingerprint(given.public), needs_public="public" in given.method.requirements())
    registration = Registration(mailbox, given.run, given.sites, say, check, given.read)
    over = resume and is_over(given)
    known = _load_introductions(out) if resume else {}
    introductions = registration.readable(known) if over else registration.wait(known)
    _leave_out_misfits(mailbox, given, introductions, registration.met, say)
    clients = [given.sites.index(site) for site in introductions]
    try:
        federation, infos = make_federation(
            mailbox, given, introductions, observers() if callable(observers) else observers, registration.met
        )
        federation.ctx.secure = True  # all sites know the seed
        _save_introductions(out, introductions)  # not earlier: what does not fit must not come back with --resume
        mailbox.members = set(infos)
        for line in in_words(infos, federation.backend.infos):
            say(line)
        if (told := nobody_to_compare(federation.rule, given.method, federation.server, federation.ctx)) is not None:
            say(f"Warning: {told}")
        history = federation.run(resume)
        if (told := in_words_of_budget(federation, out)) is not None:
            say(told)
        alone = (
            read_json(out / RESULT)["accuracy"].get("alone") if over else _alone(mailbox, given, federation, infos, say)
        )
    except PolyfedError as error:
        if not isinstance(error, TooFewSites | Stopped):  # after these the run is resumed: the sites wait for that
            mailbox.audit.write("ended", why=str(error))
            mailbox.tell("query.end", clients, {"kind": "end", "run": given.run, "reason": str(error)}, END_SECONDS)
        raise
    first = next(iter(introductions.values()))[0]
    result = _result(federation, infos, first, history, given.directory, given.sites, alone)
    # Not earlier: a server that is killed here is resumed without the sites that know already, and has all it needs.
    mailbox.audit.write("ended")
    goodbye = {"kind": "end", "run": given.run, "reason": ""}
    if over:
        say(f"This federation has ended; its result is in {out}. Sites that still wait for the end are told.")
        mailbox.tell_comers("query.end", clients, goodbye, END_SECONDS)
    else:
        mailbox.tell("query.end", clients, goodbye, END_SECONDS)
    return result


def is_over(given: Given) -> bool:
    """Tell whether all rounds are done and the result is kept: only sites may not know it yet."""
    assert given.directory is not None
    history = given.directory.history()
    if not history or not (given.directory.path / RESULT).is_file():
        return False
    last = history[-1]
    return last["round"] >= given.run["rounds"] or "stopped" in last or len(last.get("spent", ())) == len(given.sites)


def in_words_of_budget(federation: LiveFederation, out: Path) -> str | None:
    """Say that a run ended because nobody has a privacy budget left, and where its result is."""
    infos = federation.backend.infos
    if not federation.spent >= infos.keys():
        return None
    names = ", ".join(info.name for _, info in sorted(infos.items()))
    where, epsilon = f"round {federation.history[-1]['round']}", federation.settings.privacy.epsilon
    return (
        f"The run ended in {where} of {federation.rounds}: the privacy budget of epsilon {epsilon:g} is used up at all "
        f"sites ({names}). What was learned until then is kept in {out}."
    )


def _alone(
    mailbox: Mailbox,
    given: Given,
    federation: LiveFederation,
    infos: Mapping[int, ClientInfo],
    say: Callable[[str], None],
) -> dict[str, Any] | None:
    """Return what the sites reach by themselves, where that is asked for and costs nobody's privacy."""
    if not given.alone or given.method.name == "local":
        return None
    if given.settings.privacy.on:
        say("What the sites would have reached alone is not measured: training for that would spend privacy, too.")
        return None
    say("The rounds are over; now each site trains by itself, to see what it gained (--no-alone leaves that out).")
    one_shot = given.method.plan().rounds is not None
    rounds = given.settings.rounds if one_shot or not federation.history else int(federation.history[-1]["round"])
    return ask_alone(mailbox, given.run, infos, federation.ctx, rounds, say)


def _leave_out_misfits(
    mailbox: Mailbox, given: Given, introductions: Introductions, met: Mapping[str, Met], say: Callable[[str], None]
) -> None:
    """Go on without sites whose networks do not fit the method by themselves, if enough others are there.

    Else the method is the wrong one for these sites, and they all hear that.
    """
    for_method = given.method
    wrong: dict[str, str] = {}
    for site, (head, _) in introductions.items():
        info, own = met[site]
        need = missing(for_method, [info], {own.name: own}, given.public, shape_of(head), read_task(head))
        if need is not None:
            wrong[site] = f"Site {site} cannot take part: {for_method.name} needs {need}."
    if not wrong or len(introductions) - len(wrong) < mailbox.min_sites:
        return
    for site, why in wrong.items():
        del introductions[site]
        say(f"Not taking part: {why}")
        mailbox.audit.write("refused", site, why=why)
        mailbox.tell("query.end", [given.sites.index(site)], refusal(why), END_SECONDS)


def make_federation(
    mailbox: Mailbox,
    given: Given,
    introductions: Introductions,
    observers: Sequence[Observer],
    met: Mapping[str, Met] | None = None,
) -> tuple[LiveFederation, dict[int, ClientInfo]]:
    """Check that the sites and the method fit together, and make the federation of them.

    Returns it with the sites as they described themselves; what they count with is bounded.
    """
    method, run = given.method, given.run
    heads = {site: head for site, (head, _) in introductions.items()}
    agree(heads, fingerprint(given.public), "public" in method.requirements())
    known = {site: met[site] if met else given.read(site, head, blob) for site, (head, blob) in introductions.items()}
    infos, blueprints = settle(known, given.sites)
    first = next(iter(heads.values()))
    shape, classes, task = shape_of(first), first["num_classes"], read_task(first)
    check_needs(method, list(infos.values()), blueprints, given.public, shape, methods.candidates, task)
    metrics = given.metrics or make_metrics(given.settings.evaluation.metrics, task)
    if given.settings.evaluation.patience is not None and not any(head["validation"] for head in heads.values()):
        raise InputError("patience needs validation data, but no site has any (validation in what --data returns).")
    if given.test is not None and tuple(given.test.y.shape[1:]) != (() if task == CLASSIFICATION else (classes,)):
        raise InputError(f"The server's test set has no targets of {task.name} as the sites have: leave it out.")
    outputs = method.outputs(classes, given.public_classes)
    run["public_classes"] = outputs - classes or None
    run["class_names"] = list(first["class_names"])
    run["metrics"] = [metric.name for metric in metrics]
    problem = Problem(classes, shape, outputs, given.public is not None, task)
    expectations = Expectations(method, blueprints, problem, given.settings.seed)
    federation = LiveFederation(
        method,
        FlowerBackend(mailbox, infos, blueprints, run, expectations, given.max_bytes, given.max_share),
        given.settings,
        num_classes=classes,
        input_shape=shape,
        test=given.test,
        public=given.public,
        public_classes=run["public_classes"],
        directory=given.directory,
        observers=observers,
        task=task,
        metrics=metrics,
    )
    federation.sites = len(given.sites)
    return federation, infos


def _save_introductions(out: Path, introductions: Introductions) -> None:
    """Keep the introductions: a resumed run must lay out the same tensors, also for a site that is away then."""
    tree = {
        site: {"head": head, "blob": torch.frombuffer(bytearray(blob), dtype=torch.uint8) if blob else None}
        for site, (head, blob) in introductions.items()
    }
    write_atomic(out / "sites.safetensors", pack_tree(tree))


def _load_introductions(out: Path) -> Introductions:
    path = out / "sites.safetensors"
    if not path.is_file():
        return {}
    tree = unpack_tree(path.read_bytes(), str(path))
    return {
        site: (item["head"], b"" if item["blob"] is None else item["blob"].numpy().tobytes())
        for site, item in tree.items()
    }


def _result(
    federation: LiveFederation,
    infos: Mapping[int, ClientInfo],
    first: Head,
    history: list[Line],
    directory: RunDirectory,
    sites: list[str],
    alone: dict[str, Any] | None,
) -> Result:
    absent = ClientInfo(-1, 0, "(did not take part)", 0)
    ordered = [infos.get(client, absent) for client in range(federation.sites)]
    result = Result(
        method=federation.method.name,
        seed=federation.settings.seed,
        rounds=int(history[-1]["round"]) if history else federation.rounds,
        history=history,
        cost=federation.meter,
        architectures=[info.architecture for info in ordered],
        samples=[info.samples for info in ordered],
        server_model=federation.server.models.get("main"),
        directory=directory.path,
        task=federation.ctx.task,
        names=list(sites),
        alone=alone,
    )
    result.parameters = [info.parameters for info in ordered]
    result.class_names = list(first["class_names"])
    result.server = federation.server
    result.save(directory.path)
    return result
