"""The configuration file: defaults, and one clear line for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_resilience import config
from slurm_resilience.controller.decide.recovery_modes import check_names, with_each_node
from slurm_resilience.controller.journal.journal import Journal
from slurm_resilience.controller.journal.records import NamedModes
from slurm_resilience.errors import ConfigError
from slurm_resilience.model import Node


def test_without_a_file_the_defaults_hold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SRES_CONFIG", raising=False)
    monkeypatch.setattr(config, "DEFAULT_PATH", tmp_path / "none.toml")
    assert config.load() == config.Config()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[contoller]\nport = 1", "unknown key 'contoller'; did you mean 'controller'?"),
        ("[spares.gpu]\nnode = 2", "unknown key 'spares.gpu.node'; did you mean 'nodes'?"),
        ("[spares]\nnodes = 2", "'spares.nodes' is a table: write [spares.nodes]"),
        ('[sinks.x]\nurl = "https://x"\ntokn = "y"', "unknown key 'sinks.x.tokn'"),
        ("[detect]\nsilent_aftr = 3.0", "unknown key 'detect.silent_aftr'; did you mean 'silent_"),
        ("[controller]\nport = 'x'", "Expected 'int', got 'str'"),
        ("[controller]\nport = 70000", "controller.port must be between 1 and 65535"),
        ("[controller]\nhost = 'a b'", "'a b' is no name of a machine"),
        ("[agent]\nbeat = 1e-9", "agent.beat is in seconds, and must be at least 0.05"),
        ("[agent]\ncheck_interval = 60000", "is in seconds, and must be at most 14400"),
        ("[agent]\ncheck_interval = 0.001", "is in seconds, and must be at least 0.5"),
        ("[checks.periods]\ndisk = 0.001", "disk is in seconds, and must be at least 0.5"),
        ("[checks.periods]\ndisk = 1e300", "disk is in seconds, and must be at most 2678400"),
        ("[hang]\nfloor = 0", "hang.floor must be greater than 0"),
        ("[hang]\nsteps = 0", "hang.steps must be greater than 0"),
        ("[elastic]\nbackoff = 0", "elastic.backoff must be greater than 0"),
        ("[controller]\ninterval = 0", "controller.interval must be greater than 0"),
        ("[controller]\ninterval = 2000", "interval is in seconds, and must be at most 60"),
        ("[detect]\ndead_after = 4000", "dead_after is in seconds, and must be at most 3600"),
        (
            "[checks]\nmemory_tolerance_percent = 0.05",
            "memory_tolerance_percent is in percent: 0.05 looks like a fraction; write 5 for it",
        ),
        ("[checks]\ndisk_full_percent = 0.95", "write 95 for it"),
        ("[checks]\nopen_files_percent = 800", "is in percent, and must be at most 100"),
        ("[controller]\nkeep = 180", "keep is in seconds, and must be at least 86400"),
        ("[recovery]\nrecurrence_window = 7", "is in seconds, and must be at least 3600"),
        ("[resume]\ngrace = -1", "resume.grace must be 0 or more"),
        ("[recovery]\nmode = 'auto'", "recovery.mode: 'auto' is no mode; write one of: none, obs"),
        ("[recovery]\nmode = 3", "recovery.mode: 3 is no mode"),
        ("[recovery]\nnodes = 'n1'", "recovery.nodes is a table: write [recovery.nodes]"),
        ("[recovery.partitions]\ngpu = 'off'", "recovery.partitions.gpu: 'off' is no mode"),
        ("controller = 3", "'controller' is a table"),
        ("[detect]\nsilent_after = 0.6", "at least two beats"),
        ("[detect]\ndead_after = 1.0", "dead_after must be more than"),
        ("[agent]\nfence_after = 1", "agent.fence_after must be 0 (no fencing), or at least 3 s"),
        (
            "agent = { beat = 2, fence_after = 5 }\ndetect = { silent_after = 5, dead_after = 9 }",
            "at least 6 s",
        ),
        ("[detect]\ndead_after = nan", "detect.dead_after must be a finite number"),
        ("[replace]\ntimeout = inf", "replace.timeout must be a finite number"),
        ("not toml", "not valid TOML"),
    ],
)
def test_each_mistake_is_named(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.parse(text, "sres.toml")
    assert says in str(caught.value)
    assert str(caught.value).startswith("sres.toml: ")
    assert "\n" not in str(caught.value)


def test_the_ends_of_a_percentage_are_allowed() -> None:
    text = "[checks]\nmemory_tolerance_percent = 0\ndisk_full_percent = 100"
    checks = config.parse(text).checks
    assert (checks.memory_tolerance_percent, checks.disk_full_percent) == (0.0, 100.0)


@pytest.mark.parametrize(
    ("text", "says", "port", "breaker"),
    [
        ("[controller]\nport = 7000\n[breaker]\nquiet = 5\n", "", 7000, 5.0),
        ("[controller]\nport = 7000\n[breaker]\nquiet = 'x'\n", "breaker.quiet", 7000, None),
        ("[controller]\nport = -1\n[breaker]\nquiet = 5\n", "controller.port", None, 5.0),
        ("[controller]\nprot = 7000\n[breaker]\nquiet = 5\n", "did you mean", None, 5.0),
        ("nonsense = 1\n[breaker]\nquiet = 5\n", "nonsense", None, 5.0),
        ("controller = 5\n[breaker]\nquiet = 5\n", "write [controller]", None, 5.0),
        ("[controller\nport = 7000\n", "not valid TOML", None, None),
        ("\xff", "cannot be read", None, None),
    ],
)
def test_what_can_be_used_of_the_sites_file_is_used(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    text: str,
    says: str,
    port: int | None,
    breaker: float | None,
) -> None:
    """`sres pause` has to reach sresctld while another edits the file."""
    file = tmp_path / "sres.toml"
    file.write_bytes(text.encode("latin-1"))
    monkeypatch.setattr(config, "DEFAULT_PATH", str(file))
    monkeypatch.delenv("SRES_CONFIG", raising=False)
    found, trouble = config.load_usable()
    assert says in trouble and bool(trouble) == bool(says)
    usual = config.Config()
    assert found.controller.port == (port or usual.controller.port)
    assert found.breaker.quiet == (breaker or usual.breaker.quiet)
    if trouble:
        with pytest.raises(ConfigError):
            config.load_usable(file)


def test_a_named_file_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml: no such file$"):
        config.load(tmp_path / "missing.toml")
    monkeypatch.setenv("SRES_CONFIG", str(tmp_path / "missing.toml"))
    with pytest.raises(ConfigError, match="no such file; write one, or unset SRES_CONFIG"):
        config.load()


@pytest.mark.parametrize("path", ["", "var/lib/sresctld", "./here"])
def test_a_state_directory_does_not_depend_on_where_sresctld_is_started(path: str) -> None:
    """Elsewhere it would begin anew, with a journal that knows of nothing."""
    with pytest.raises(ConfigError, match=r"controller\.state_dir must be an absolute path"):
        config.parse(f"[controller]\nstate_dir = '{path}'")


@pytest.mark.parametrize(
    ("table", "line"),
    [
        ("agent", "health_log = 'health.jsonl'"),
        ("agent", "kernel_log = 'kmsg'"),
        ("checks", "mounts = ['/', 'scratch']"),
        ("checks", "directory = './checks.d'"),
        ("checks", "state_dir = ''"),
    ],
)
def test_nor_do_the_paths_of_sresd(table: str, line: str) -> None:
    key = line.partition(" ")[0]
    with pytest.raises(ConfigError, match=rf"sres.toml: {table}\.{key} must be an absolute path"):
        config.parse(f"[{table}]\n{line}", "sres.toml")


def test_a_node_has_its_own_mode_or_the_most_careful_of_its_partitions() -> None:
    text = """
        [recovery]
        mode = "observe"
        [recovery.partitions]
        canary = "automatic"
        old = "none"
        [recovery.nodes]
        "n[1-2]" = "automatic"
    """
    recovery = with_each_node(config.parse(text)).recovery
    assert recovery.mode_of("n9", ["main"]) == "observe"
    assert recovery.mode_of("n9", ["main", "canary"]) == "automatic"
    assert recovery.mode_of("n9", ["canary", "old"]) == "none"
    assert recovery.mode_of("n2", ["old"]) == "automatic"
    assert config.Config().recovery.mode_of("n1", ["main"]) == "automatic"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[recovery.nodes]\n'n[1-' = 'none'", "recovery.nodes: 'n[1-' is not a hostlist"),
        (
            "[recovery.nodes]\n'n[1-3]' = 'none'\nn2 = 'observe'",
            "recovery.nodes: n2 has two modes, none and observe",
        ),
        (
            "[recovery.partitions]\nmian = 'none'",
            "recovery.partitions: Slurm has no partition 'mian'; did you mean 'main'?",
        ),
        ("[recovery.nodes]\n'n[1-9]' = 'none'", "recovery.nodes: Slurm has no node 'n3'"),
    ],
)
def test_a_mode_for_what_slurm_does_not_have_is_refused(text: str, says: str) -> None:
    """Read over, it would have nodes replaced that were to be left alone."""
    nodes = [Node(name, "IDLE", partitions=("main",)) for name in ("n1", "n2")]
    with pytest.raises(ConfigError) as caught:
        check_names(with_each_node(config.parse(text)), nodes, NamedModes())
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_what_slurm_had_at_an_earlier_start_is_no_typo(tmp_path: Path) -> None:
    """A person has removed it from slurm.conf since. Its nodes must not be replaced for that."""
    text = """
        [recovery.partitions]
        old = "none"
        main = "observe"
        [recovery.nodes]
        "n[3-4]" = "none"
    """
    said = with_each_node(config.parse(text))
    parts = {"n1": ("main", "old"), "n2": ("old", "new"), "n3": ("new",), "n4": ("new",)}
    nodes = [Node(name, "IDLE", partitions=of_node) for name, of_node in parts.items()]
    first = check_names(said, nodes, NamedModes())
    assert (first.config, first.warning) == (said, "")
    journal = Journal(tmp_path / "journal.db")
    journal.put_named_modes(first.names)
    left = [
        Node(name, "IDLE", partitions=tuple(p for p in of_node if p != "old"))
        for name, of_node in parts.items()
        if name != "n4"
    ]
    for _ in range(2):  # also at the start after that
        later = check_names(said, left, journal.named_modes())
        journal.put_named_modes(later.names)
        assert later.warning == (
            "sres.toml names what Slurm does not have any more: node n4, partition old (its nodes "
            "keep their modes: n1, n2); take it out of [recovery]"
        )
        modes = [later.config.recovery.mode_of(node.name, node.partitions) for node in left]
        assert modes == ["none", "none", "none"]
    typo = with_each_node(config.parse(text.replace("old", "odl")))
    with pytest.raises(ConfigError, match="no partition 'odl'"):
        check_names(typo, left, journal.named_modes())
