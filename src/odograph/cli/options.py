"""Options and output that the commands share: the ledger, the cost, JSON or text, progress."""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Final, NamedTuple, get_type_hints

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from odograph.connection import connect
from odograph.core.guarantees import SIZED, Guarantee, guarantee_from_dict
from odograph.core.mechanisms import gaussian, laplace
from odograph.errors import InvalidArgument, InvalidGuarantee
from odograph.ledger.ledger import Ledger
from odograph.ledger.results import Checkpoint

__all__ = [
    "DEFAULT_URL",
    "AsJson",
    "CheckpointFile",
    "CostOptions",
    "Key",
    "LedgerOptions",
    "Note",
    "account_names",
    "guarantee_from_json",
    "new_file",
    "print_result",
    "progress",
    "read_checkpoint",
    "with_options",
]

DEFAULT_URL: Final = "sqlite:///privacy.db"

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Key = Annotated[
    str | None, typer.Option(help="Idempotency key: repeating a request with the same key charges nothing more.")
]
Note = Annotated[str, typer.Option(help="Free text stored with the entry; it can be erased.", show_default=False)]
CheckpointFile = Annotated[
    str | None, typer.Option("--checkpoint", metavar="FILE", help="A file written by `odograph checkpoint`.")
]


@dataclass(frozen=True, slots=True)
class LedgerOptions:
    """The ledger, the principal, and the form of the output."""

    url: Annotated[
        str,
        typer.Option(
            envvar="ODOGRAPH_URL",
            help="URL of the ledger: sqlite:///FILE, sqlite:////FOLDER/FILE, postgresql://USER@HOST/DATABASE, or a"
            " service at https://HOST.",
        ),
    ] = DEFAULT_URL
    token_file: Annotated[
        Path | None,
        typer.Option(
            envvar="ODOGRAPH_TOKEN_FILE",
            metavar="FILE",
            help="File with the API key for a service; alternatively, set ODOGRAPH_TOKEN to the key.",
        ),
    ] = None
    plain_http: Annotated[
        bool,
        typer.Option(
            "--plain-http",
            envvar="ODOGRAPH_PLAIN_HTTP",
            help="Allow sending the API key unencrypted to a service at http://HOST on another machine.",
        ),
    ] = False
    principal: Annotated[
        str | None,
        typer.Option(
            envvar="ODOGRAPH_PRINCIPAL", help="Who makes the request; by default the user of the operating system."
        ),
    ] = None
    json: AsJson = False

    def ledger(self, *, accept_fsync_off: bool = False) -> Ledger:
        """Return the ledger; only `open`, `apply`, `import` and `restore` create one."""
        if self.url.startswith("memory:"):
            raise InvalidArgument(
                f"--url must not be in memory (got {self.url!r}): that ledger would end with this command. Use a URL"
                f" such as {DEFAULT_URL}"
            )
        if not self.url.startswith(("http://", "https://")):
            return connect(self.url, principal=self.principal, accept_fsync_off=accept_fsync_off)
        token = os.environ.get("ODOGRAPH_TOKEN") if self.token_file is None else self.token_file.read_text().strip()
        return connect(self.url, token=token, principal=self.principal, accept_plain_http=self.plain_http)


def print_result(form: Mapping[str, Any], text: RenderableType, *, as_json: bool) -> None:
    """Print the result: one JSON document, or text."""
    if as_json:
        typer.echo(json.dumps(form, allow_nan=False))
    elif isinstance(text, str):
        typer.echo(text)
    else:
        # Names, keys and notes are printed literally, even if they look like markup.
        Console(highlight=False, markup=False, emoji=False).print(text)


@contextmanager
def progress(what: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on standard error, if that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(what, total=None, visible=False)
        yield lambda done, rows: bar.update(task, completed=done, total=rows or None, visible=True)


@contextmanager
def new_file(path: Path) -> Iterator[IO[str]]:
    """Make a new file that only its owner can read, and remove it if writing it fails."""
    try:
        opened = os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w", encoding="utf-8")
    except OSError:
        raise
    except BaseException:  # interrupted after the file was made
        path.unlink(missing_ok=True)
        raise
    with opened as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            path.unlink()
            raise


def read_checkpoint(file: str | None) -> Checkpoint | None:
    """Read a checkpoint from a file; None if no file is given."""
    if file is None:
        return None
    with open(file, encoding="utf-8") as text:  # noqa: PTH123  so that errors name the file as it was typed
        try:
            return Checkpoint.from_dict(json.load(text))
        except ValueError as problem:
            raise InvalidArgument(
                f"--checkpoint must be a file that `odograph checkpoint` wrote (got {file!r}: {problem})"
            ) from problem


def account_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return completions of an account name; none if anything is wrong."""
    try:
        with connect(ctx.params.get("url") or DEFAULT_URL) as ledger:
            return [name for name in ledger.checkpoint().accounts if name.startswith(incomplete)]
    except Exception:  # noqa: BLE001  an error would be printed into the command that is being typed
        return []


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Expand each dataclass parameter of a command into one option per field."""
    own = get_type_hints(command, include_extras=True)
    bundles = {name: hint for name, hint in own.items() if is_dataclass(hint) and isinstance(hint, type)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name not in bundles:
            parameters.append(parameter.replace(annotation=own[name]))
    for bundle in bundles.values():
        hints = get_type_hints(bundle, include_extras=True)
        parameters += [
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
            )
            for field in fields(bundle)
        ]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, bundle in bundles.items():
            given[name] = bundle(**{field.name: given.pop(field.name) for field in fields(bundle)})
        command(**given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what Typer reads
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


# The cost of a request as options: `--pure 0.05`, or `--cost jan=pure:0.1` for each of several accounts. Each kind of
# guarantee that is made of numbers has an option, from its class: `--approx EPSILON,DELTA`.


class _Spelling(NamedTuple):
    """How a guarantee is made from numbers, which are passed on as strings so that they are read exactly."""

    make: Callable[..., Guarantee]
    numbers: tuple[str, ...]
    required: int  # how many of the numbers must be given

    @property
    def form(self) -> str:
        """The numbers as they are typed, such as RHO[,DELTA]."""
        return ",".join(self.numbers[: self.required]) + "".join(
            f"[,{name}]" for name in self.numbers[self.required :]
        )


# The options beside which --sensitivity may stand, and the kind of each.
_NOISE_OPTIONS: Final = {
    "gaussian_sigma": "gaussian",
    "laplace_scale": "laplace",
    "discrete_gaussian": "discrete_gaussian",
}
_NOISE: Final = {
    "gaussian": _Spelling(gaussian, ("SIGMA", "SENSITIVITY"), 1),
    "laplace": _Spelling(laplace, ("SCALE", "SENSITIVITY"), 1),
}


def _spellings() -> dict[str, _Spelling]:
    """Return the kinds that can be typed: guarantees made of numbers, and noise."""
    return {kind: _spelling(cls) for kind, cls in SIZED.items()} | _NOISE


def _spelling(cls: type[Guarantee]) -> _Spelling:
    numbers = tuple(name.upper() for name in cls.__match_args__)
    return _Spelling(cls, numbers, sum(one.default is MISSING for one in fields(cls)))


def _option(metavar: str, text: str) -> Any:  # noqa: ANN401  an annotation for Typer
    return typer.Option(metavar=metavar, help=text, rich_help_panel="Cost: one of")


def _text_option(metavar: str, text: str) -> Any:  # noqa: ANN401  an annotation for Typer
    return Annotated[str | None, _option(metavar, text)]


_OPTIONS: Final[dict[str, Any]] = {
    **{
        kind: _text_option(_spelling(cls).form, (inspect.getdoc(cls) or "").partition("\n")[0])
        for kind, cls in SIZED.items()
    },
    "gaussian_sigma": _text_option("SIGMA", "Gaussian noise of this standard deviation."),
    "laplace_scale": _text_option("SCALE", "Laplace noise of this scale."),
    "json_cost": _text_option("JSON", "Any guarantee, as its to_dict() returns it."),
}


if TYPE_CHECKING:

    class _Options:
        sensitivity: str | None
        cost: list[str] | None
else:
    _Options = make_dataclass(
        "_Options",
        [
            *[(name, option, field(default=None)) for name, option in _OPTIONS.items()],
            (
                "sensitivity",
                _text_option(
                    "SENSITIVITY", "With a sigma or scale: how far one privacy unit moves the query; by default 1."
                ),
                field(default=None),
            ),
            (
                "cost",
                Annotated[
                    list[str] | None,
                    _option(
                        "ACCOUNT=KIND:NUMBERS",
                        "A separate cost for each account, as in jan=pure:0.1 or feb=approx:0.1,1e-9;"
                        " may be repeated.",
                    ),
                ],
                field(default=None),
            ),
        ],
        frozen=True,
        namespace={"__module__": __name__},
    )


class CostOptions(_Options):
    """What a request costs. Numbers are read exactly as they are typed."""

    def costs(self, accounts: Sequence[str]) -> dict[str, Guarantee]:
        """Return the cost for each account."""
        pairs = [_parse_cost(text) for text in self.cost or ()]
        if pairs and (accounts or self._given_options()):
            raise InvalidArgument("--cost names its account itself: remove the other accounts and costs")
        if not pairs:
            if not accounts:
                raise InvalidArgument("name at least one account, as in: census-2030 --pure 0.05")
            one = self.guarantee()
            pairs = [(name, one) for name in accounts]
        costs = dict(pairs)
        if len(costs) < len(pairs):
            twice = next(name for i, (name, _) in enumerate(pairs) if name in dict(pairs[:i]))
            raise InvalidArgument(f"accounts must be named once, each with its whole cost (got {twice!r} twice)")
        return costs

    def guarantee(self) -> Guarantee:
        """Return the cost, if exactly one was given."""
        given = self._given_options()
        if len(given) != 1:
            both = f" (got {' and '.join(map(_flag, given))})" if given else ""
            raise InvalidArgument(
                f"pass exactly one cost, such as --pure 0.1: {', '.join(map(_flag, _OPTIONS))}{both}"
            )
        ((option, text),) = given.items()
        if option == "json_cost":
            return guarantee_from_json(text)
        if self.sensitivity is not None:
            if option not in _NOISE_OPTIONS or "," in text:
                raise InvalidArgument(
                    "--sensitivity is for --gaussian-sigma, --laplace-scale and --discrete-gaussian only, with one"
                    f" number (got {_flag(option)} {text})"
                )
            text = f"{text},{self.sensitivity}"
        return _make_guarantee(_NOISE_OPTIONS.get(option, option), text, _flag(option))

    @property
    def is_given(self) -> bool:
        """Whether any cost was given."""
        return bool(self._given_options() or self.cost)

    def _given_options(self) -> dict[str, str]:
        texts = {name: getattr(self, name) for name in _OPTIONS}
        return {name: text for name, text in texts.items() if text is not None}


def guarantee_from_json(text: str) -> Guarantee:
    """Read a guarantee as its `to_dict` writes it."""
    try:
        return guarantee_from_dict(json.loads(text, parse_float=str))  # a float would lose digits
    except json.JSONDecodeError as problem:
        raise InvalidArgument(f"--json-cost must be JSON (got {text!r}): {problem}") from problem
    except RecursionError as problem:
        raise InvalidArgument(f"--json-cost must not be nested that deeply (got {text!r:.120})") from problem


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _parse_cost(text: str) -> tuple[str, Guarantee]:
    name, _, cost = text.partition("=")
    kind, colon, numbers = cost.partition(":")
    spellings = _spellings()
    if not name or not colon or kind not in spellings:
        raise InvalidArgument(
            f"--cost must be ACCOUNT=KIND:NUMBERS, such as jan=pure:0.1, with a kind of {', '.join(spellings)}"
            f" (got {text!r})"
        )
    return name, _make_guarantee(kind, numbers, f"--cost {name}={kind}:")


def _make_guarantee(kind: str, text: str, option: str) -> Guarantee:
    spelling = _spellings()[kind]
    numbers = [number.strip() for number in text.split(",")]
    if not spelling.required <= len(numbers) <= len(spelling.numbers):
        raise InvalidGuarantee(f"{option} must be {spelling.form} (got {text!r})")
    return spelling.make(*numbers)
