"""What the commands share: plain groups, exit codes, errors and progress on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn

P = ParamSpec("P")
T = TypeVar("T")

#: The option --memory of the commands that read dumps, archives and traces; see `in_bytes`.
Gigabytes = Annotated[
    float | None,
    typer.Option(
        "--memory",
        min=0,
        help="GiB that reading and analyzing may need together; default: half of the free memory",
    ),
]
GOOD, FOUND, UNUSABLE = 0, 1, 2  # exit codes: all good, a remark, nothing that could be read


class PlainGroup(TyperGroup):
    """Lists its commands without rich, whose import takes longer than all the rest of `--help`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options | {"rich_markup_mode": None})


def with_extra(what: str, extra: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorates `what`, a command that needs an extra; see `end_without_package`."""

    def decorate(command: Callable[P, T]) -> Callable[P, T]:
        @wraps(command)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return command(*args, **kwargs)
            except ImportError as error:
                end_without_package(error, what, extra)
                raise

        return run

    return decorate


def end_without_package(error: ImportError, what: str, extra: str) -> None:
    """Ends the command with one sentence and its cure if a package of an extra is missing, which it needs."""
    from rich.console import Console

    from unicomm.flight_recorder.extras import MissingExtraError, explain

    found = error if isinstance(error, MissingExtraError) else explain(error, what, extra)
    if found is not None:
        print_error(Console(stderr=True), found)
        raise typer.Exit(UNUSABLE) from None


def in_bytes(gigabytes: float | None) -> int | None:
    """Returns the bytes of the option --memory."""
    return None if gigabytes is None else int(gigabytes * (1 << 30))


def print_line(console: Console, text: object, style: str = "") -> None:
    """Prints a text: brackets are no markup, control characters are shown, the terminal wraps long lines."""
    from unicomm.flight_recorder.texts import printable

    lines = map(printable, str(text).split("\n"))
    console.print("\n".join(lines), style=style, markup=False, soft_wrap=True)


def print_error(errors: Console, text: object) -> None:
    print_line(errors, text, "red")


def print_unreadable(errors: Console, remarks: Iterable[Any], most: int = 20) -> None:
    """Prints a reader's remarks: which file could not be read, and why."""
    for remark in list(remarks)[:most]:
        print_error(errors, f"{remark.path}: {remark.message}")


def folder_with_rings(folder: Path | None, errors: Console) -> Path:
    """Returns `folder`, by default this user's; ends the command if the user's folder is unusable."""
    from unicomm.flight_recorder.ring.folder import FolderError, rings_folder

    try:
        return rings_folder() if folder is None else folder
    except FolderError as error:
        print_error(errors, error)
        raise typer.Exit(UNUSABLE) from None


def progress(errors: Console, counter: ProgressColumn) -> Progress:
    """A progress bar on stderr that vanishes at its end, so that pipes and logs get the result alone."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        counter,
        TimeElapsedColumn(),
        console=errors,
        transient=True,
        disable=not errors.is_terminal,
    )
