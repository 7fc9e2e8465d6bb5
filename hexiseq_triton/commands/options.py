"""What options of several commands share: how they are read, and what is refused before work."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from hexiseq_triton.errors import ConfigError

_WRITTEN = "hexiseq.written"
"""Where a call's context keeps the names of the options that give what is written."""
_FILE_OR_PRESET = "model"
"""The one option whose text names a file, if there is such a file."""


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


def file_to_write(
    context: typer.Context, option: typer.CallbackParam, path: Path | None
) -> Path | None:
    """Return the path an option gives for a file, as its callback.

    Raises:
        ConfigError: if no file can be written there; known before the work, and not after it.
    """
    _note_written(context, option)
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


def file_to_make(
    context: typer.Context, option: typer.CallbackParam, path: Path | None
) -> Path | None:
    """Return the path an option gives for a file whose folder may have to be made, as its callback.

    Raises:
        ConfigError: as `file_to_write`.
    """
    _note_written(context, option)
    if path is None or not _writes():
        return path
    if path.parent.is_dir():
        return file_to_write(context, option, path)
    _check_folder(f"{option.opts[0]} is {path}", path.parent)
    return path


def folder_to_write(
    context: typer.Context, option: typer.CallbackParam, path: Path | None
) -> Path | None:
    """Return the path an option gives for a folder that may have to be made, as its callback.

    Raises:
        ConfigError: if nothing can be written there.
    """
    _note_written(context, option)
    if path is None or not _writes():
        return path
    _check_folder(f"{option.opts[0]} is {path}", path)
    return path


def check_written(context: typer.Context) -> None:
    """Refuse a call that would overwrite a file that it reads, or write one file twice.

    Raises:
        ConfigError: naming both options; on every rank, as all of them see it.
    """
    options = {each.name: each.opts[0] for each in context.command.params}
    written = context.meta.get(_WRITTEN, [])
    for name in written:
        for other, value in context.params.items():
            path = context.params[name]
            if other != name and any(_same_file(path, each) for each in _paths(other, value)):
                does = "writes" if other in written else "reads"
                raise ConfigError(
                    f"{options[name]} is {path}, which {options[other]} {does} too; name another "
                    f"file for {options[name]}"
                )


def _note_written(context: typer.Context, option: typer.CallbackParam) -> None:
    """Keep an option's name for `check_written`, which sees all options of the call."""
    context.meta.setdefault(_WRITTEN, []).append(option.name)


def _paths(name: str, value: Any) -> Iterator[Path]:
    """Yield the files that an option's value names."""
    if isinstance(value, Path):
        yield value
    elif isinstance(value, list):
        yield from (each for each in value if isinstance(each, Path))
    elif name == _FILE_OR_PRESET and Path(value).exists():
        yield Path(value)


def _same_file(one: Path | None, other: Path) -> bool:
    """Return whether what is written to one path is lost to the other; /dev/null loses nothing."""
    if one is None:
        return False
    if one.exists() and other.exists():
        return one.is_file() and one.samefile(other)
    return one.resolve() == other.resolve()


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
