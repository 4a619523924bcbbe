"""`polyfed keys ...`: certificates and keys of a real federation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polyfed.cli.failure import sentences
from polyfed.flower import require_flower

keys_app = typer.Typer(help="Certificates and keys of a real federation.", no_args_is_help=True)


@keys_app.callback()
def _keys() -> None:
    """Certificates and keys of a real federation."""


@keys_app.command("init")
def keys_init(
    directory: Annotated[Path, typer.Argument(help="A new folder; it stays with the server.")],
    server: Annotated[str, typer.Option(help="Host name or address by which the sites reach the server.")],
    sites: Annotated[str, typer.Option(help="Names of the sites: north,south,west.")],
) -> None:
    """Make a certificate authority, the server's certificate and a key pair for each site."""
    with sentences():
        require_flower()
        from polyfed.flower.keys import create_keys

        folders = create_keys(directory, server, [name.strip() for name in sites.split(",")])
    typer.echo(f"The server's keys are in {directory}; keep that folder to yourself.")
    for folder in folders:
        typer.echo(f"Give {folder} to that site, over a channel that you trust.")


@keys_app.command("add")
def keys_add(
    directory: Annotated[Path, typer.Argument(help="The server's folder of keys.")],
    site: Annotated[str, typer.Option(help="Name of the new site.")],
) -> None:
    """Make a key pair for a further site; it takes part in federations that are started or resumed afterwards."""
    with sentences():
        require_flower()
        from polyfed.flower.enroll import add_site

        folder = add_site(directory, site)
    typer.echo(f"Give {folder} to that site, over a channel that you trust.")


@keys_app.command("request")
def keys_request(
    folder: Annotated[Path, typer.Argument(help="A new folder; it stays at the site.")],
    name: Annotated[str, typer.Option(help="Name of the site.")],
) -> None:
    """At a site: make its key, and a request for the server to sign. The private key never leaves."""
    with sentences():
        require_flower()
        from polyfed.flower.enroll import request_key

        path = request_key(folder, name)
    typer.echo(f"Send {path} to the server; put the ca.crt that you get back into {folder}.")


@keys_app.command("sign")
def keys_sign(
    directory: Annotated[Path, typer.Argument(help="The server's folder of keys.")],
    request: Annotated[Path, typer.Argument(help="The request that a site sent.")],
    renew: Annotated[bool, typer.Option("--renew", help="Replace the key that the site has.")] = False,
) -> None:
    """At the server: let a site in with the key of its request. A federation that runs takes a renewed key at once."""
    with sentences():
        require_flower()
        from polyfed.flower.enroll import sign_request

        name = sign_request(directory, request, renew)
    typer.echo(f"Site {name} is let in. Send {directory / 'ca.crt'} back to it; that file is no secret.")


@keys_app.command("revoke")
def keys_revoke(
    directory: Annotated[Path, typer.Argument(help="The server's folder of keys.")],
    site: Annotated[str, typer.Option(help="Name of the site.")],
) -> None:
    """Shut a site out, also of a federation that runs."""
    with sentences():
        require_flower()
        from polyfed.flower.enroll import revoke_site

        revoke_site(directory, site)
    typer.echo(f"Site {site} is shut out; 'polyfed keys sign' lets it in again with a new key.")
