"""Slurm's topology as text, as 22.05, 24.11 and 26.05 print it."""

from __future__ import annotations

from slurm_resilience.slurm.topology import domains_of

TREE = """\
SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n[1-2]
SwitchName=s2 Level=0 LinkSpeed=1 Nodes=n[3-4],gpu7
SwitchName=empty Level=0 LinkSpeed=1 Nodes=(null)
SwitchName=top Level=1 LinkSpeed=1 Nodes=n[1-4],gpu7 Switches=s[1-2]
"""
BLOCK = """\
BlockName=b1 BlockIndex=0 Nodes=n[1-2] BlockSize=2
BlockName=b2 BlockIndex=1 Nodes=n[3-4] BlockSize=2
AggregatedBlock=b[1-2] BlockIndex=2 Nodes=n[1-4] BlockSize=4
"""


def test_a_node_is_in_its_leaf_switch_or_its_block() -> None:
    assert domains_of(TREE) == {"n1": "s1", "n2": "s1", "n3": "s2", "n4": "s2", "gpu7": "s2"}
    assert domains_of(BLOCK) == {"n1": "b1", "n2": "b1", "n3": "b2", "n4": "b2"}


def test_other_sites_have_none() -> None:
    for text in ("", "No topology information available\n", "RingName=r1 Nodes=n[1-4]\n"):
        assert domains_of(text) == {}
