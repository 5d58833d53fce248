"""The ``narrowgate`` command: parse, call the library, print."""

# No "from __future__ import annotations" here: typer reads the options' types of a function inside a function.
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

if TYPE_CHECKING:
    import typer

_INSTALL = {
    "typer": 'pip install "narrowgate[cli]"',
    "rich": 'pip install "narrowgate[cli]"',
    "sklearn": 'pip install "narrowgate[cli]" scikit-learn',
    "lightning": 'pip install "narrowgate[train]"',
    "torchvision": 'pip install "narrowgate[train]"',
    "timm": "pip install timm",
    "onnx": 'pip install "narrowgate[export]"',
    "onnxruntime": 'pip install "narrowgate[export]"',
    "onnxscript": 'pip install "narrowgate[export]"',
    "matplotlib": 'pip install "narrowgate[report]"',
}
_NEXT = (
    "New here? Type: narrowgate demo. To see what could go from a network: narrowgate inspect torchvision/resnet18. "
    "All options of a command: narrowgate train --help."
)


def main() -> None:
    """Run the command line; a missing optional package ends it with the command that installs it."""
    try:
        build_app()(prog_name="narrowgate")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _INSTALL:
            raise
        print(f"narrowgate: {package} is not installed. Install it with: {_INSTALL[package]}", file=sys.stderr)
        sys.exit(1)


def build_app() -> "typer.Typer":
    """The commands. They are made here, and import what they need when they run, so that ``--help`` stays quick."""
    import typer

    from narrowgate.commands import add_commands

    app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, epilog=_NEXT)

    def show_version(wanted: bool) -> None:
        if wanted:
            from narrowgate._version import __version__

            typer.echo(f"narrowgate {__version__}")
            raise typer.Exit()

    @app.callback()
    def narrowgate(
        version: Annotated[
            bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
        ] = False,
    ) -> None:
        """Make PyTorch networks narrow while they train.

        Trainable gates learn which channels of a network matter; a closed gate makes its filter exactly zero.
        """

    @app.command()
    def demo(
        epochs: Annotated[int, typer.Option(min=1, metavar="N", help="Passes over the training images.")] = 80,
        seed: Annotated[int, typer.Option(min=0, metavar="N", help="The same seed gives the same run.")] = 0,
        penalty: Annotated[
            Literal["l1", "l2", "bounded-l1"], typer.Option(help="What pulls the gates to zero.")
        ] = "bounded-l1",
        strength: Annotated[float, typer.Option(min=0, metavar="X", help="How hard it pulls.")] = 0.02,
        placement: Annotated[
            Literal["after-norm", "before-norm"],
            typer.Option(help="Gate each BatchNorm, or the convolution before it."),
        ] = "after-norm",
    ) -> None:
        """Train a small network on handwritten digits until most of its channels are closed.

        The images come with scikit-learn: nothing is downloaded. On a CPU it takes about half a minute.
        """
        from narrowgate.demo import Settings, run

        outcome = run(Settings(epochs, seed, penalty, strength, placement))
        if outcome.closed == 0:
            typer.echo("No gate closed, so there is nothing to remove: raise --strength or --epochs.", err=True)
            raise typer.Exit(1)

    @app.command()
    def train(
        recipe: Annotated[Path, typer.Argument(help="A TOML file; recipes/ has one for each row of the paper.")],
        data: Annotated[str, typer.Option(metavar="PATH", help="Where the data is, if not as the recipe says.")] = "",
        out: Annotated[
            Path | None,
            typer.Option(metavar="FOLDER", help="Where the run goes.", show_default="runs/ and the recipe's name"),
        ] = None,
        settings: Annotated[
            list[str] | None,
            typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Change the recipe; can be given again."),
        ] = None,
        resume: Annotated[
            bool, typer.Option("--resume", help="Go on from the last checkpoint, if there is one.")
        ] = False,
        download: Annotated[bool, typer.Option("--download", help="Let torchvision fetch missing data.")] = False,
        accelerator: Annotated[str, typer.Option(metavar="NAME", help="cpu, cuda or auto.")] = "auto",
        devices: Annotated[int, typer.Option(min=1, metavar="N", help="Processes on each machine.")] = 1,
        num_nodes: Annotated[int, typer.Option(min=1, metavar="N", help="Machines.")] = 1,
    ) -> None:
        """Train, prune, verify and save the network that a recipe describes.

        A run that was killed goes on with --resume.
        """
        from narrowgate.train.engine import run
        from narrowgate.train.errors import EXPECTED
        from narrowgate.train.recipe import Recipe

        try:
            run(
                Recipe.load(recipe, settings or ()),
                out or Path("runs") / recipe.stem,
                data_path=data or None,
                resume=resume,
                download=download,
                accelerator=accelerator,
                devices=devices,
                num_nodes=num_nodes,
            )
        except EXPECTED as error:
            if os.environ.get("LOCAL_RANK", "0") == "0":  # of several processes that find the same, one says it
                typer.echo(f"narrowgate: {error}", err=True)
            raise typer.Exit(1) from None

    @app.command()
    def record(
        run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
        out: Annotated[Path, typer.Option(metavar="FILE", help="Where the record goes, such as results/NAME.json.")],
        recipe: Annotated[
            Path | None, typer.Option(metavar="FILE", help="The recipe file that was run, for the record's command.")
        ] = None,
        curve: Annotated[
            bool, typer.Option("--curve", help="Add size and accuracy by threshold; needs the data.")
        ] = False,
        data: Annotated[str, typer.Option(metavar="PATH", help="Where the data is, if not as the recipe says.")] = "",
        device: Annotated[str, typer.Option(metavar="NAME", help="Where --curve computes.")] = "cpu",
    ) -> None:
        """Keep a finished run as one small JSON file: recipe, course, architecture, accuracies."""
        from narrowgate.reproduce import command
        from narrowgate.reproduce.record import RecordError
        from narrowgate.train.errors import EXPECTED

        try:
            typer.echo(command.record(run, out, recipe, curve, data or None, device))
        except (RecordError, *EXPECTED) as error:
            typer.echo(f"narrowgate: {error}", err=True)
            raise typer.Exit(1) from None

    @app.command()
    def reproduce(
        what: Annotated[
            Literal["mnist", "cifar100", "imagenet", "method", "figures", "all"],
            typer.Argument(help="Which tables, or the figures."),
        ] = "all",
        results: Annotated[Path, typer.Option(metavar="FOLDER", help="The result files.")] = Path("results"),
        out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Where the figures go.")] = None,
        write: Annotated[Path | None, typer.Option(metavar="FILE", help="A page to put the tables into.")] = None,
    ) -> None:
        """Show the paper's tables with our own runs beside its numbers, and draw its figures.

        It reads result files and trains nothing; a row without a run says so.
        """
        from narrowgate.reproduce import command
        from narrowgate.reproduce.record import RecordError

        try:
            command.reproduce(what, results, out, write)
        except (RecordError, OSError) as error:
            typer.echo(f"narrowgate: {error}", err=True)
            raise typer.Exit(1) from None

    @app.command()
    def report(
        runs: Annotated[
            list[Path], typer.Argument(metavar="RUN", help="Folders of runs, finished or not, or files of record.")
        ],
        out: Annotated[Path, typer.Option(metavar="FILE", help="Where the page goes.")] = Path("report.html"),
    ) -> None:
        """Write a page that shows a run: accuracy, size, widths and gates; several runs are compared.

        The page is one HTML file that needs no network: open it in a browser, or send it to somebody.
        """
        from narrowgate.report import ReportError, write_report
        from narrowgate.train.recipe import RecipeError

        try:
            written = write_report(runs, out)
        except (ReportError, RecipeError, OSError) as error:
            typer.echo(f"narrowgate: {error}", err=True)
            raise typer.Exit(1) from None
        typer.echo(f"{written}: {written.stat().st_size / 1000:,.0f} kB, open it in a browser")

    add_commands(app)
    return app
