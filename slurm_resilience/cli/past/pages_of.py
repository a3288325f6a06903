"""Read the past from sresctld, page by page, until there is enough."""

from __future__ import annotations

from typing import Any

import msgspec

from slurm_resilience.cli.controller import ClusterView, ask_page
from slurm_resilience.errors import SlurmError
from slurm_resilience.wire.messages import StatusRequest


def newest(cluster: ClusterView, request: StatusRequest, name: str) -> list[dict[str, Any]]:
    """Return the newest entries, oldest first.

    Args:
        cluster: where sresctld is.
        request: the question; its `limit` counts for all pages together.
        name: of the entries in the answer.
    """
    found: list[dict[str, Any]] = []
    with cluster.connect() as connection:
        page = ask_page(connection, request)
        found += page.data[name]
        while page.next and len(found) < request.limit:
            rest = request.limit - len(found)
            page = ask_page(
                connection, msgspec.structs.replace(request, after=page.next, limit=rest)
            )
            found += page.data[name]
    return found[: request.limit][::-1]


def check_known(cluster: ClusterView, hostlist: str | None) -> None:
    """Refuse a list with a node that neither Slurm nor the journal knows: nothing is told of it,
    and a misspelled name would look like good news. Where Slurm cannot be asked, all is taken.

    Raises:
        NotFound: which nodes.
    """
    if hostlist is not None:
        try:
            cluster.named_or_removed(hostlist)
        except SlurmError:
            return
