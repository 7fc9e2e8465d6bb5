"""What options of several commands share: how they are read, and what is refused before work."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from hexiseq_triton.errors import ConfigError


def lengths_of(documents: str | None) -> tuple[int, ...] | None:
    """Return the lengths in "3000,1096"."""
    if documents is None:
        return None
    try:
        return tuple(int(length) for length in documents.split(","))
    except ValueError as error:
        raise ConfigError(
            f"--documents is {documents!r}; it is lengths with commas between them"
        ) from error


def file_to_write(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """Return the path an option gives for a file, as its callback.

    Raises:
        ConfigError: if no file can be written there; known before the work, and not after it.
    """
    if path is None or not _writes():
        return path
    given = f"{option.opts[0]} is {path}"
    if path.is_dir():
        raise ConfigError(f"{given}, which is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ConfigError(f"{given}; there is no folder {path.parent}, make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{given}, which may not be written")
    return path


def file_to_make(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """Return the path an option gives for a file whose folder may have to be made, as its callback.

    Raises:
        ConfigError: as `file_to_write`.
    """
    if path is None or not _writes():
        return path
    if path.parent.is_dir():
        return file_to_write(option, path)
    _check_folder(f"{option.opts[0]} is {path}", path.parent)
    return path


def folder_to_write(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """Return the path an option gives for a folder that may have to be made, as its callback.

    Raises:
        ConfigError: if nothing can be written there.
    """
    if path is None or not _writes():
        return path
    _check_folder(f"{option.opts[0]} is {path}", path)
    return path


def _check_folder(given: str, folder: Path) -> None:
    """Refuse a folder that can be neither written nor made."""
    nearest = next(each for each in (folder, *folder.parents) if each.exists())
    if not nearest.is_dir():
        raise ConfigError(f"{given}; {nearest} is no folder")
    if not os.access(nearest, os.W_OK):
        raise ConfigError(f"{given}; nothing may be written into {nearest}")


def _writes() -> bool:
    """Return whether this process writes files: under torchrun only rank 0 does."""
    return os.environ.get("RANK", "0") == "0"
