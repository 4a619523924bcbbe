"""`polyfed serve`: wait for the sites, drive the rounds, write the run directory."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import httpx

from polyfed import methods
from polyfed.config import Config, Networks
from polyfed.core.errors import InputError, RunDirectoryError
from polyfed.core.method import Method
from polyfed.core.privacy import check_privacy
from polyfed.core.robust import check_rule
from polyfed.core.rundir import RunDirectory
from polyfed.core.samples import Samples
from polyfed.core.settings import Settings
from polyfed.flower.audit import Audit
from polyfed.flower.child import Address, LinkError
from polyfed.flower.codec import Head
from polyfed.flower.describe import MAX_SAMPLES
from polyfed.flower.keys import ServerKeys, check_names, read_server_keys
from polyfed.flower.link import ServerLink
from polyfed.flower.mailbox import Mailbox
from polyfed.flower.reach import check_free
from polyfed.flower.registration import NodeDirectory
from polyfed.flower.running import Given, Observers, run_federation
from polyfed.result import Result
from polyfed.stored import check_same

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class Hosting:
    """How the server offers a federation.

    Attributes
    ----------
    host, port
        Where it listens.
    keys
        The folder of `polyfed keys init`; None is insecure and works on this machine only.
    sites
        Names of the sites where there are no keys.
    min_sites
        How many sites make an exchange count; None: all of them.
    wait
        Seconds to wait for the sites: at the start for all of them, later for enough of them.
    deadline
        Seconds that a site has for one exchange.
    max_bytes
        Of one message.
    max_share
        How much of the whole one site may weigh: a share of the samples of all sites.
    max_samples
        How many samples a site can say that it has.
    alone
        After the last round, let every site train by itself, and report what it gained.
    """

    host: str = "0.0.0.0"
    port: int = 9092
    keys: Path | None = None
    sites: tuple[str, ...] = ()
    min_sites: int | None = None
    wait: float = 120.0
    deadline: float = 600.0
    max_bytes: int = 1 << 30
    max_share: float = 1.0
    max_samples: int = MAX_SAMPLES
    alone: bool = True


def serve(
    config: Config,
    out: Path,
    hosting: Hosting,
    *,
    public: Samples | None = None,
    public_classes: int | None = None,
    test: Samples | None = None,
    resume: bool = False,
    observers: Observers = (),
    say: Callable[[str], None] = print,
) -> Result:
    """Run a federation of real sites and return its result.

    Raises
    ------
    InputError
        When the request cannot be carried out as given.
    TooFewSites
        When too few sites are there; the run can be resumed.
    """
    method = config.method
    if method.pools_data:
        raise InputError(f"{method.name} puts all data in one place: it exists in simulations only.")
    if not methods.is_importable(type(method)):
        raise InputError(f"{method.name} is a class of a script: put it into a file that sites can import by its name.")
    if config.trust.attack is not None:
        raise InputError("attack is for simulations: in a real federation nobody is malicious on request.")
    check_rule(config.trust.rule(), method, methods.candidates)
    check_privacy(config.privacy, method, config.trust.rule())
    if "public" in method.requirements() and public is None:
        raise InputError(f"{method.name} needs public data: give --public the same here and at every site.")
    keys, sites = _check(hosting)
    check_free(Address(hosting.host, hosting.port))
    directory, run = start_directory(config, out, sites, resume, hosting.port)
    link = ServerLink(Address(hosting.host, hosting.port), keys, out / "flower", hosting.max_bytes)
    try:
        link.open()
    except BaseException:  # it has closed what it had opened
        directory.close()
        raise
    try:
        audit = Audit(out)
        say(f"Listening on {link.bind}; the sites are {', '.join(sites)}.")
        audit.write("resumed" if resume else "started", method=method.name, federation=run["federation"], sites=sites)
        node_directory = NodeDirectory(link, sites, keys is not None, say, audit)
        mailbox = Mailbox(
            grid=link.grid,
            nodes=link.nodes,
            node_ids=node_directory.node_ids,
            names=dict(enumerate(sites)),
            deadline=hosting.deadline,
            min_sites=hosting.min_sites if hosting.min_sites is not None else len(sites),
            wait=hosting.wait,
            say=say,
            refresh=node_directory.refresh,
            audit=audit,
            budgets=config.privacy.epsilon is not None,
        )
        given = Given(
            method,
            config.settings(),
            run,
            sites,
            directory,
            public,
            public_classes,
            test,
            hosting.max_bytes,
            hosting.max_share,
            hosting.max_samples,
            alone=hosting.alone,
        )
        return run_federation(mailbox, given, resume, observers, say)
    except httpx.HTTPError as error:
        raise LinkError(f"SuperLink does not answer any more ({error}); its log is {link.child.log}.") from error
    finally:
        link.close()
        directory.close()


def _check(hosting: Hosting) -> tuple[ServerKeys | None, list[str]]:
    """Refuse what is not safe or not possible; return keys and the sites' names."""
    if hosting.keys is None:
        if hosting.host not in LOOPBACK:
            raise InputError(
                f"Without keys a federation stays on this machine, but --host is {hosting.host}: make keys with "
                "'polyfed keys init', or use --host 127.0.0.1 with --insecure."
            )
        keys, sites = None, list(hosting.sites)
    else:
        keys = read_server_keys(hosting.keys)
        sites = list(keys.sites)
    check_names(sites)
    if not 0 < hosting.port < 1 << 16:
        raise InputError(f"--port is a number from 1 to 65535, not {hosting.port}.")
    if hosting.max_bytes <= 0:
        raise InputError("--max-mb must be positive.")
    if hosting.min_sites is not None and not 1 <= hosting.min_sites <= len(sites):
        raise InputError(f"--min-sites is {hosting.min_sites}, but there are {len(sites)} sites.")
    if hosting.deadline <= 0 or hosting.wait < 0:
        raise InputError("--deadline must be positive and --wait must not be negative.")
    if not 0 < hosting.max_share <= 1:
        raise InputError(f"--max-share is a share of all samples, above 0 and at most 1, not {hosting.max_share:g}.")
    if hosting.max_samples < 1:
        raise InputError("--max-samples must be positive.")
    return keys, sites


def start_directory(
    config: Config, out: Path, sites: list[str], resume: bool, port: int = Hosting.port
) -> tuple[RunDirectory, Head]:
    """Create or open the run directory; return it with the settings that every message carries."""
    if resume:
        check_same(out, config)
        earlier = RunDirectory.read_config(out)
        known = earlier.get("sites", [])
        if sites[: len(known)] != known:
            raise RunDirectoryError(
                f"{out} holds a federation of other sites ({', '.join(known)}, now {', '.join(sites)}): use the same "
                "ones, and further ones after them, or another --out."
            )
        directory, federation = RunDirectory.open(out), earlier["federation"]
        if (sites, port) != (known, earlier.get("port")):  # who was let in since ('polyfed keys add') takes part, too
            directory.rewrite_config({**earlier, "sites": sites, "port": port})
    else:
        federation = secrets.token_hex(8)
        directory = RunDirectory.create(out, {**config.dump(), "sites": sites, "federation": federation, "port": port})
        out.chmod(0o700)  # what sites tell is for those who run the server
    return directory, run_head(config.method, config.settings(), config.models, federation)


def run_head(method: Method, settings: Settings, networks: Networks, federation: str) -> Head:
    """Return the settings that every message carries."""
    planned = method.plan().rounds
    return {
        "federation": federation,
        "method": methods.reference(type(method)),
        "options": {item.name: getattr(method, item.name) for item in fields(method)},
        "seed": settings.seed,
        "training": asdict(settings.training),
        "privacy": asdict(settings.privacy),
        "feature_dim": networks.feature_dim,
        "feature_adapter": networks.feature_adapter,
        "rounds": planned if planned is not None else settings.rounds,
        "public_classes": None,
    }
