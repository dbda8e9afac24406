"""Profiles on disk: what `calibrate` measured, found again by host and device.

A folder of JSON files, one for each host, device, backend and world size. A profile describes the
machine it was measured on: none of another host is ever found unless its host is asked for.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

import msgspec

from stepscope.errors import UnreadableInputError, UsageError
from stepscope.records.folders import node_name, user_folder
from stepscope.records.hardware import PROFILE_SCHEMA, Profile
from stepscope.trace.decode import NotJsonError, decode
from stepscope.trace.files import read_whole

PREVIOUS = ".previous"


def profiles_folder() -> Path:
    """$STEPSCOPE_PROFILES, else in the user's configuration folder."""
    return user_folder("STEPSCOPE_PROFILES", "profiles")


def load_profiles(host: str | None = None, *, skip_broken: bool = False) -> tuple[Profile, ...]:
    """Newest first. Those of one host; of every host, whose name each carries, for None.

    A file that is not a profile is an error unless the caller would rather go without it.
    """
    profiles = []
    for path in sorted(profiles_folder().glob("*.json")):
        try:
            profile = read_profile(path)
        except UnreadableInputError:
            if not skip_broken:
                raise
            continue
        if host in (None, profile.host):
            profiles.append(profile)
    return tuple(sorted(profiles, key=lambda profile: -profile.when_unix))


def find_calibrations(host: str, kind: str) -> tuple[Profile, ...]:
    """All profiles of a host's devices of one kind, newest first; broken files are left out."""
    profiles = load_profiles(host, skip_broken=True)
    return tuple(profile for profile in profiles if profile.kind == kind)


def find_profile(
    host: str | None = None, *, collective: str | None = None, skip_broken: bool = True
) -> Profile | None:
    """The newest profile of `host` (this one for None), with a fit of the collective if asked."""
    for profile in load_profiles(host or node_name(), skip_broken=skip_broken):
        if collective is None or any(collective == fit.kind for fit in profile.fits):
            return profile
    return None


def read_profile(path: Path) -> Profile:
    """One file; anything that is not a profile we know is an UnreadableInputError."""
    try:
        profile = decode(read_whole(path), Profile)
    except NotJsonError as error:
        raise UnreadableInputError(
            f"{path} is not a profile: {error}; delete it or run stepscope calibrate again"
        ) from None
    if profile.schema != PROFILE_SCHEMA:
        raise UnreadableInputError(
            f"{path} has schema {profile.schema}, but this stepscope reads {PROFILE_SCHEMA}; "
            "run stepscope calibrate again"
        )
    return profile


def save_profile(profile: Profile) -> Path:
    """Whole or not at all; the one it replaces is kept beside it as .previous."""
    folder = profiles_folder()
    parts = (profile.host, profile.device, profile.backend or "none", str(profile.world_size))
    path = folder / ("-".join(re.sub(r"[^A-Za-z0-9._]+", "_", part) for part in parts) + ".json")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1))
        if path.exists():
            path.replace(path.with_name(path.name + PREVIOUS))
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise UsageError(
            f"the profile cannot be written: {path}: {error.strerror}; "
            "set STEPSCOPE_PROFILES to a folder you can write"
        ) from None
    return path
