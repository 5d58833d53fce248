"""The commands that keep runs and set them beside the paper's: record, reproduce."""

# No "from __future__ import annotations" here: typer reads the options' types of a function inside a function.
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

if TYPE_CHECKING:
    import typer

_TRAINED = ("mnist", "cifar100", "imagenet")


def add_reproduction(app: "typer.Typer") -> None:
    """Add the commands to the application; what is heavy is imported when one runs."""
    import typer

    from narrowgate.plain_help import Command

    def training(*names: str, **facts: Any) -> Any:
        return typer.Option(*names, rich_help_panel="Training what is missing", **facts)

    Data = Annotated[str, typer.Option(metavar="PATH", help="Where the data is, if not as the recipe says.")]

    @app.command(cls=Command)
    def record(
        run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
        out: Annotated[Path, typer.Option(metavar="FILE", help="Where the record goes, such as results/NAME.json.")],
        recipe: Annotated[
            Path | None, typer.Option(metavar="FILE", help="The recipe file that was run, for the record's command.")
        ] = None,
        dataset: Annotated[
            str, typer.Option(metavar="NAME", help="What an array file held, such as mnist or cifar100.")
        ] = "",
        curve: Annotated[
            bool, typer.Option("--curve", help="Add size and accuracy by threshold; needs the data.")
        ] = False,
        data: Data = "",
        device: Annotated[str, typer.Option(metavar="NAME", help="Where --curve computes.")] = "cpu",
    ) -> None:
        """Keep a finished run as one small JSON file: recipe, course, architecture, accuracies."""
        from narrowgate.reproduce import command

        typer.echo(command.record(run, out, recipe, dataset, curve, data or None, device))

    @app.command(cls=Command)
    def reproduce(
        what: Annotated[
            Literal["mnist", "cifar100", "imagenet", "method", "figures", "all"],
            typer.Argument(metavar="PART", help="mnist, cifar100, imagenet, method, figures, or all."),
        ] = "all",
        results: Annotated[Path, typer.Option(metavar="FOLDER", help="The result files.")] = Path("results"),
        out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Draw the figures here.")] = None,
        write: Annotated[
            Path | None, typer.Option(metavar="FILE", help="Put the tables between the markers of this page.")
        ] = None,
        train: Annotated[bool, training("--train", help="First train the rows that have no result file.")] = False,
        only: Annotated[
            list[str] | None,
            training(
                metavar="NAME",
                help="Only such rows, in this order: mobilenetv2-l1-exp, or 'resnet164-*'; can be given again.",
            ),
        ] = None,
        seeds: Annotated[int, training(min=1, metavar="N", help="Runs of each row: seeds 0 to N-1.")] = 1,
        data: Annotated[str, training(metavar="PATH", help="The data set of the rows.")] = "",
        download: Annotated[bool, training("--download", help="Let torchvision fetch missing data.")] = False,
        settings: Annotated[
            list[str] | None,
            training("--set", metavar="TABLE.KEY=VALUE", help="Change all of their recipes; can be given again."),
        ] = None,
        curve: Annotated[bool, training("--curve", help="Add the data of Figure 3 to each record.")] = False,
        runs: Annotated[Path, training(metavar="FOLDER", help="Where the runs go.")] = Path("runs/reproduce"),
        recipes: Annotated[Path, training(metavar="FOLDER", help="The paper's recipes.")] = Path("recipes"),
        accelerator: Annotated[
            Literal["auto", "cpu", "cuda"], training(help="Where to train; auto: on a GPU if there is one.")
        ] = "auto",
    ) -> None:
        """Show the paper's tables with our own runs beside its numbers, and draw its figures.

        It reads result files, and a row without one says so. With --train such rows are run first, one after the other.

        Stopped at any moment, the same command goes on with what was begun.
        """
        if what == "figures" and out is None:
            raise typer.BadParameter("say which folder the figures go to, such as --out figures", param_hint="--out")
        if out is not None and what not in ("figures", "all"):
            raise typer.BadParameter(f"the figures are drawn by figures or all, not {what}", param_hint="--out")
        if write is not None:  # now, not after the training
            from narrowgate.reproduce.page import check_page

            check_page(write)
        failed = []
        if train:
            if what not in _TRAINED:
                raise typer.BadParameter(f"say which rows: {', '.join(_TRAINED)}, not {what}", param_hint="--train")
            from narrowgate.console import table_console
            from narrowgate.reproduce.training import Options, train_missing

            options = Options(
                data or None, recipes, runs, seeds, only or (), settings or (), curve, download, accelerator
            )
            failed = train_missing(what, results, options, table_console())
        elif only or seeds > 1 or data or download or settings or curve:
            raise typer.BadParameter("nothing is trained without it", param_hint="--train")
        from narrowgate.reproduce import command

        command.reproduce(what, results, out, write)
        if failed:
            typer.echo(f"failed: {', '.join(failed)}", err=True)
            raise typer.Exit(1)
