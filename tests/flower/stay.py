"""A site that stays for several federations, so that tests of many methods start its processes once."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import hostile
import problem

from polyfed.core.errors import PolyfedError
from polyfed.flower.join import Attendance, Joining
from polyfed.flower.keys import read_site_keys
from polyfed.flower.link import SiteLink
from polyfed.flower.site import Site
from polyfed.flower.sitedata import read_model


class StayingSite(Site):
    """Looks up its model for each federation; the tests write the table."""

    models: Path

    def describe(self, head: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        self.model = read_model(json.loads(self.models.read_text())[self.name])
        self.built = None
        return super().describe(head)

    def answer(self, head: dict[str, Any], blob: bytes) -> tuple[dict[str, Any], bytes]:
        reply = super().answer(head, blob)
        evil = json.loads(self.models.read_text()).get("evil", {})
        if head.get("kind") == "work" and evil.get("site") == self.name and reply[1]:
            return hostile.spoil(evil["rounds"][head["round"] - 1], *reply)
        return reply


def main() -> None:
    server, keys, state, models = sys.argv[1:]
    name = read_site_keys(Path(keys)).name
    site = StayingSite(name, "mlp:1x16", problem.part(problem.SITES.index(name)), Path(state))
    site.models = Path(models)
    link = SiteLink(server, read_site_keys(Path(keys)), Path(state) / "flower")
    attendance = Attendance(link, site, Joining(server, Path(keys), "", Path(state), 600.0), print)
    while True:
        try:
            attendance.run()
        except PolyfedError as error:
            print(error)
        site.ended = site.refused = None


if __name__ == "__main__":
    main()
