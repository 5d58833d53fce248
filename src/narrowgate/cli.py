"""The ``narrowgate`` command: parse, call the library, print."""

# No "from __future__ import annotations" here: typer reads the options' types of a function inside a function.
import io
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from narrowgate.trouble import tell_own_warnings_in_one_line, told_in_one_line

if TYPE_CHECKING:
    import typer

_NEXT = (
    "New here? Type: narrowgate demo. To see what could go from a network: narrowgate inspect torchvision/resnet18. "
    "All options of a command: narrowgate train --help."
)

_STOPPED = dict.fromkeys(("train", "sweep"), "stopped; go on with the same command and --resume")
_STOPPED["reproduce"] = "stopped; the same command goes on with what was begun"


def main() -> None:
    """Run the command line: status 0, 2 for what was typed wrong, 1 for what failed, 130 after Ctrl-C."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # letters that an old locale lacks become question marks
        sys.stdout.reconfigure(errors="replace")
    tell_own_warnings_in_one_line()
    with told_in_one_line():
        build_app()(prog_name="narrowgate")


def build_app() -> "typer.Typer":
    """The commands. They are made here, and import what they need when they run, so that ``--help`` stays quick."""
    import typer

    from narrowgate.commands import add_commands
    from narrowgate.plain_help import Command, Group
    from narrowgate.reproduce.options import add_reproduction

    class Commands(Group):
        def invoke(self, ctx: Any) -> Any:
            with told_in_one_line(lambda: _STOPPED.get(ctx.invoked_subcommand, "stopped")):
                return super().invoke(ctx)

    app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False, epilog=_NEXT)

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

        Trainable gates learn which channels of a network matter. A closed gate makes its filter exactly zero.

        What is zero is removed without changing what the network computes.
        """

    @app.command(cls=Command)
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

        if math.isinf(strength):
            raise typer.BadParameter("must be a finite number", param_hint="--strength")
        outcome = run(Settings(epochs, seed, penalty, strength, placement))
        if outcome.closed == 0:
            typer.echo("No gate closed, so there is nothing to remove: raise --strength or --epochs.", err=True)
            raise typer.Exit(1)

    @app.command(cls=Command)
    def train(
        recipe: Annotated[
            Path, typer.Argument(metavar="RECIPE", help="A TOML file, such as recipes/digits-small.toml.")
        ],
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
        accelerator: Annotated[
            Literal["auto", "cpu", "cuda"], typer.Option(help="Where to train; auto: on a GPU if there is one.")
        ] = "auto",
        devices: Annotated[
            int, typer.Option(min=1, metavar="N", help="Processes on each machine; each takes train.batch images.")
        ] = 1,
        num_nodes: Annotated[int, typer.Option(min=1, metavar="N", help="How many machines.")] = 1,
    ) -> None:
        """Train, prune, verify and save the network that a recipe describes.

        Logs, checkpoints and the small network go to one folder. A run that was killed goes on with --resume.
        """
        from narrowgate.train.engine import run
        from narrowgate.train.recipe import Recipe
        from narrowgate.train.run_folder import folder_of

        run(
            Recipe.load(recipe, settings or ()),
            out or folder_of(recipe),
            data_path=data or None,
            resume=resume,
            download=download,
            accelerator=accelerator,
            devices=devices,
            num_nodes=num_nodes,
        )

    @app.command(cls=Command)
    def sweep(
        recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="The TOML file that all trials start from.")],
        over: Annotated[
            list[str],
            typer.Option(
                metavar="TABLE.KEY=A,B,C",
                help="Values to try, or LOW..HIGH to draw from; can be given again. seed is short for train.seed.",
            ),
        ],
        samples: Annotated[int, typer.Option(min=0, metavar="N", help="How many points to draw from ranges.")] = 0,
        settings: Annotated[
            list[str] | None,
            typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Change the recipe; can be given again."),
        ] = None,
        data: Annotated[str, typer.Option(metavar="PATH", help="Where the data is, if not as the recipe says.")] = "",
        out: Annotated[
            Path | None,
            typer.Option(metavar="FOLDER", help="Where it goes.", show_default="runs/sweep- and the recipe's name"),
        ] = None,
        resume: Annotated[bool, typer.Option("--resume", help="Go on with a sweep that was killed.")] = False,
        download: Annotated[bool, typer.Option("--download", help="Let torchvision fetch missing data.")] = False,
        workers: Annotated[
            int, typer.Option(min=0, metavar="N", help="Trials at once, at most.", show_default="as many as fit")
        ] = 0,
        cpus_per_trial: Annotated[float, typer.Option(min=0.01, metavar="X", help="Cores for each trial.")] = 1.0,
        gpus_per_trial: Annotated[
            float | None,
            typer.Option(min=0, metavar="X", help="GPUs for each, such as 0.5 or 2.", show_default="1 if there is one"),
        ] = None,
        address: Annotated[
            str, typer.Option(metavar="HOST:PORT", help="A Ray cluster that runs already.", show_default="this machine")
        ] = "",
    ) -> None:
        """Run a recipe over a grid of values, or over points drawn from ranges, many trials at once.

        Each trial is an ordinary run in a folder of its own. At the end comes one page that compares them all.
        """
        from narrowgate.sweep import command

        options = command.Options(data, resume, download, workers, cpus_per_trial, gpus_per_trial, address)
        folder = out or Path("runs") / f"sweep-{recipe.stem}"
        found = command.sweep(recipe, over, folder, samples=samples, settings=settings or (), options=options)
        if any(outcome.result is None for outcome in found):
            raise typer.Exit(1)

    @app.command(cls=Command)
    def report(
        runs: Annotated[
            list[Path],
            typer.Argument(
                metavar="RUN",
                help="Folders of runs, finished or not, a folder of such folders, or files of narrowgate record.",
            ),
        ],
        out: Annotated[Path, typer.Option(metavar="FILE", help="Where the page goes.")] = Path("report.html"),
    ) -> None:
        """Write a page that shows a run: accuracy, size, widths and gates; several runs are compared.

        The page is one HTML file that needs no network: open it in a browser, or send it to somebody.
        """
        from narrowgate.report import write_report

        written = write_report(runs, out)
        typer.echo(f"{written}: {written.stat().st_size / 1000:,.0f} kB, open it in a browser")

    add_reproduction(app)
    add_commands(app)
    return app
