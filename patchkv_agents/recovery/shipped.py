"""Where profiles lie: files, and those that come with the package. Loads nothing."""

from __future__ import annotations

from pathlib import Path

from patchkv_agents.errors import ProfileError

_FOLDER = Path(__file__).with_name("profiles")


def shipped_profiles() -> tuple[str, ...]:
    """Names of the profiles that come with the package."""
    return tuple(sorted(file.stem for file in _FOLDER.glob("*.json")))


def profile_file(path: str | Path) -> Path:
    """The file of a profile.

    Args:
        path: of the file; or the name of a profile that comes with the package, such as `smollm2`.

    Raises:
        ProfileError: there is no such profile.
    """
    file = Path(path).expanduser()
    if file.is_file():
        return file
    if file.is_dir():
        raise ProfileError(f"{file} is a folder: give the file that `patchkv profile` wrote")
    shipped = shipped_profiles()
    if str(path) in shipped:
        return _FOLDER / f"{path}.json"
    names = f" (the package has {', '.join(shipped)})" if shipped else ""
    raise ProfileError(
        f"there is no profile {path}{names}: make one with `patchkv profile MODEL --out {path}`"
    )
