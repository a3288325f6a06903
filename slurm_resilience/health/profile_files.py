"""Read the profile of a node type: one that comes with the package, or a file."""

from __future__ import annotations

import sys
import tomllib
from importlib import resources
from pathlib import Path

import msgspec

from slurm_resilience.errors import ConfigError
from slurm_resilience.health.node_profile import NodeProfile
from slurm_resilience.trusted_paths import untrusted


def shipped_profiles() -> tuple[str, ...]:
    """Return the names of the profiles that come with the package."""
    folder = resources.files("slurm_resilience.health").joinpath("profiles")
    files = (entry.name for entry in folder.iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in files if name.endswith(".toml")))


class ProfileAnswer(msgspec.Struct):
    """A profile as a child has read it, or why there is none."""

    profile: NodeProfile | None = None
    fault: str = ""


def load_trusted(file: str) -> ProfileAnswer:
    """Read a profile from a file, unless a user could have written it."""
    try:
        profile = load_profile(file)
        if fault := untrusted(Path(file)):
            return ProfileAnswer(fault=fault)
        return ProfileAnswer(profile)
    except (ConfigError, OSError) as error:
        return ProfileAnswer(fault=str(error))


def load_profile(name_or_file: str) -> NodeProfile:
    """Return a profile.

    Args:
        name_or_file: the name of a node type, or the path of a TOML file.

    Raises:
        ConfigError: there is no such profile, or it cannot be understood.
    """
    try:
        if name_or_file in shipped_profiles():
            folder = resources.files("slurm_resilience.health").joinpath("profiles")
            text = folder.joinpath(f"{name_or_file}.toml").read_text("utf-8")
        else:
            text = Path(name_or_file).read_text("utf-8")
        profile = msgspec.convert({"name": name_or_file, **tomllib.loads(text)}, NodeProfile)
    except FileNotFoundError:
        known = ", ".join(shipped_profiles())
        raise ConfigError(
            f"no profile '{name_or_file}': name a TOML file, or one of {known}"
        ) from None
    except OSError as error:
        raise ConfigError(f"{name_or_file} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise ConfigError(f"profile {name_or_file}: {error}") from None
    if profile == NodeProfile(profile.name):
        raise ConfigError(
            f"profile {name_or_file} expects nothing; `sres check profile --learn` writes one"
        )
    return profile


if __name__ == "__main__":
    # A child of sresd's: the file may be on a file server that is dead.
    sys.stdout.buffer.write(msgspec.json.encode(load_trusted(sys.argv[1])))
