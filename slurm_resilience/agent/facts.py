"""Ask Slurm for the facts that sresd needs: once, then remember; again until Slurm answers."""

from __future__ import annotations

import logging
import re
import threading

from slurm_resilience.errors import SresError
from slurm_resilience.model import Node
from slurm_resilience.slurm.client import ClusterInfo, SlurmClient

log = logging.getLogger("sresd.slurm")


class SlurmFacts:
    """Thread safe; a question that failed is asked again by the next who needs it."""

    def __init__(self, client: SlurmClient, node: str) -> None:
        self._client = client
        self._name = node
        self._lock = threading.Lock()
        self._cluster: ClusterInfo | None = None
        self._node: Node | None = None

    @property
    def cluster(self) -> ClusterInfo | None:
        """Return what is known of the cluster; None when Slurm has not answered yet. Never asks."""
        return self._cluster

    def ask_cluster(self) -> ClusterInfo:
        """Return the cluster's configuration.

        Raises:
            SresError: Slurm does not answer.
        """
        with self._lock:
            if self._cluster is None:
                self._cluster = self._client.info()
            return self._cluster

    def ask_node(self, again: bool = False) -> Node | None:
        """Return this node as Slurm describes it; None while that is unknown.

        Args:
            again: ask although an answer is known; the old one stays when Slurm does not answer.
        """
        with self._lock:
            if self._node is None or again:
                try:
                    self._node = self._client.node(self._name)
                except SresError as error:
                    log.debug("%s", error)
            return self._node


NEURON_TYPE = re.compile(r"trainium|inferentia|neuron", re.IGNORECASE)


def gpus(gres: str) -> int:
    """GPUs in a node's GRES, e.g. ``gpu:h100:8(S:0-1),gpu:2,nvme:1`` → 10. Pure.

    Slurm's `AutoDetect=nrt` lists Neuron devices as `gpu`, too; they are none.
    """
    found = re.findall(r"(?:^|,)gpu(?::([^,:(]+))??(?::([0-9]+))?(?=[,(]|$)", gres)
    return sum(int(count or 1) for kind, count in found if not NEURON_TYPE.search(kind))
