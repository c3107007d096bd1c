"""The application, how it ends in an error, and the options that several commands share."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup


class Commands(TyperGroup):
    """Errors that the user can mend are one line on stderr and exit code 2; a traceback with --debug."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # `kvpop ... | head`: dealt with further up
            raise
        except (ValueError, OSError, ImportError) as error:
            if ctx.params.get("debug"):
                raise
            typer.echo(f"error: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(2) from error
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(130) from None


app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

ModelOption = Annotated[str, typer.Option(help='"smollm2" (embedded), a directory, or a hub name.')]
DataOption = Annotated[
    str, typer.Option(help="champ, a text, .jsonl or .parquet file, a directory, a hub dataset, or what prepare wrote.")
]
SinksOption = Annotated[
    int | None, typer.Option(min=0, help="First tokens that are always held (the adapter's, or 4).")
]
WindowOption = Annotated[
    int | None, typer.Option(min=1, help="Newest tokens that are always held (the adapter's, or 64).")
]
SeedOption = Annotated[int, typer.Option(min=0, help="Of every draw; a session goes on with its own draws.")]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...; auto: a GPU if there is one.")]
DtypeOption = Annotated[str, typer.Option(help="float32, bfloat16 or float16; auto: bfloat16 on a GPU, else float32.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
ADAPTER = 'A directory that distill wrote, "kvpop:smollm2" (carried by the package), or a hub name'
