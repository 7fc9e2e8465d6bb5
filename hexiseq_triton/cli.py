"""The `hexiseq` command. Each subcommand lives in a module of its own and imports what it needs."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from hexiseq_triton.commands.compare import compare_command
from hexiseq_triton.commands.doctor import doctor_command
from hexiseq_triton.commands.files import gpus_command, import_app, schema_command
from hexiseq_triton.commands.options import check_written
from hexiseq_triton.commands.plan import plan_command
from hexiseq_triton.commands.profile import profile_command
from hexiseq_triton.commands.reproduce import reproduce_command
from hexiseq_triton.commands.simulate import simulate_command
from hexiseq_triton.commands.train import demo_command, launch_command, train_command
from hexiseq_triton.commands.tune import tune_command
from hexiseq_triton.commands.whatif import whatif_command
from hexiseq_triton.errors import HexiSeqError
from hexiseq_triton.reports.terminal import replace_unencodable

INTERRUPTED = 130
"""Exit code of what Ctrl-C ended, as shells have it: 128 and the signal's number."""


class _Commands(TyperGroup):
    """Subcommands whose errors end in one message on stderr and exit code 2; Ctrl-C in 130."""

    def main(self, *args: Any, **options: Any) -> Any:
        replace_unencodable()
        return super().main(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # who reads the output has seen enough
            raise
        except (HexiSeqError, OSError) as error:  # a full disk, or a folder that may not be written
            _tell(str(error))
            raise typer.Exit(2) from error
        except typer.Exit:
            raise
        except (Exception, KeyboardInterrupt) as error:
            if not _interrupted(error):
                raise
            _tell("interrupted")
            raise typer.Exit(INTERRUPTED) from error


class _Command(TyperCommand):
    """A subcommand that overwrites none of the files it reads."""

    def invoke(self, ctx: Any) -> Any:
        check_written(ctx)
        return super().invoke(ctx)


def _tell(text: str) -> None:
    """Write a line to stderr in one piece: several ranks may have something to say at once."""
    sys.stderr.write(f"hexiseq: {text}\n")


def _interrupted(error: BaseException | None) -> bool:
    """Return whether Ctrl-C is behind an error: compiled code reports it as another one."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


app = typer.Typer(cls=_Commands, no_args_is_help=True, add_completion=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"hexiseq {version('hexiseq-triton')}")
        raise typer.Exit


@app.callback()
def hexiseq(
    show_version: Annotated[
        bool,
        typer.Option("--version", help="print the version", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    """Plan and train on very long sequences over mixed GPUs."""


app.command("plan", cls=_Command)(plan_command)
app.command("simulate", cls=_Command)(simulate_command)
app.command("reproduce", cls=_Command)(reproduce_command)
app.command("whatif", cls=_Command)(whatif_command)
app.command("profile", cls=_Command)(profile_command)
app.command("doctor", cls=_Command)(doctor_command)
app.command("train", cls=_Command)(train_command)
app.command("compare", cls=_Command)(compare_command)
app.command("launch", cls=_Command)(launch_command)
app.command("demo", cls=_Command)(demo_command)
app.command("tune", cls=_Command)(tune_command)
app.command("gpus", cls=_Command)(gpus_command)
app.command("schema", cls=_Command)(schema_command)
app.add_typer(import_app, name="import", cls=_Commands)
