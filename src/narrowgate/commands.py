"""The commands that look at one network: inspect, measure, export."""

# No "from __future__ import annotations" here: typer reads the options' types of a function inside a function.
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

if TYPE_CHECKING:
    import typer

_WHAT = "A run's folder, a saved network's folder, or a name: lenet5, torchvision/resnet50, timm/NAME, module:function."
_MODEL = "For a saved network: what it was at full size, a name as above."
# As narrowgate.models has them; written here again because a shell asks at each press of TAB, and torch takes a second.
NAMES = ("lenet5", "resnet164", "resnet", "densenet40", "mobilenetv2", "torchvision/", "timm/")
_CLASSES = "Outputs of the network, where neither folder nor name tells."
_SHAPE = "Channels, height and width of its images, where neither tells; for module:function any shape of an input."


def add_commands(app: "typer.Typer") -> None:
    """Add the commands to the application; what is heavy is imported when one runs."""
    import typer

    from narrowgate.plain_help import Command

    What = Annotated[str, typer.Argument(metavar="NETWORK", help=_WHAT, show_default=False, autocompletion=_names)]
    Model = Annotated[str, typer.Option(metavar="NAME", help=_MODEL, show_default=False, autocompletion=_names)]
    Classes = Annotated[int | None, typer.Option(min=1, metavar="N", help=_CLASSES)]
    ImageShape = Annotated[str, typer.Option(metavar="C,H,W", help=_SHAPE, show_default=False)]

    @app.command(cls=Command)
    def inspect(
        what: What,
        model: Model = "",
        classes: Classes = None,
        image_shape: ImageShape = "",
    ) -> None:
        """Show a network's layers: what each costs, its gates, what goes together, and what stays at full width."""
        from narrowgate.console import table_console
        from narrowgate.inspect_model import inspect_model
        from narrowgate.printing import print_inspection

        source = _open(what, model, classes, image_shape)
        found = inspect_model(source.network, source.example(), made_by=source.plan)
        print_inspection(found, table_console())

    @app.command(cls=Command)
    def measure(
        what: What,
        model: Model = "",
        classes: Classes = None,
        image_shape: ImageShape = "",
        zero: Annotated[
            float | None,
            typer.Option(
                min=0,
                max=0.99,
                metavar="SHARE",
                help="For a name: time it against a copy without this share of each layer's channels.",
            ),
        ] = None,
        layout: Annotated[
            Literal["aligned", "scatter", "auto"], typer.Option(help="With --zero: the copy's layout.")
        ] = "aligned",
        round_to: Annotated[int, typer.Option(min=1, metavar="N", help="With --zero: widths in multiples of N.")] = 1,
        devices: Annotated[str, typer.Option(metavar="LIST", help="Where to time.")] = "cpu,cuda",
        modes: Annotated[
            str,
            typer.Option(metavar="LIST", help="Some of eager, compiled, onnx (CPU), graph (GPU).", show_default="all"),
        ] = "",
        batches: Annotated[str, typer.Option(metavar="LIST", help="Batch sizes.")] = "1,8,64",
        precision: Annotated[
            Literal["32", "bf16"] | None,
            typer.Option(help="float32, or bfloat16.", show_default="32 on a CPU, bf16 on a GPU"),
        ] = None,
        rounds: Annotated[int, typer.Option(min=2, metavar="N", help="How often each network is timed, at most.")] = 30,
        seconds: Annotated[
            float, typer.Option(min=0, metavar="X", help="Time for each mode and batch size, at most.")
        ] = 5.0,
        json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the numbers too.")] = None,
    ) -> None:
        """Time a network before and after pruning, in turns, and say where the smaller one is not faster.

        Compiling takes up to a minute for each network and batch size: leave it out with --modes eager,onnx,graph.
        """
        from narrowgate.atomic import replace_file
        from narrowgate.console import table_console
        from narrowgate.measure.latency import ChoiceError, latency
        from narrowgate.printing import print_latency

        sizes = _numbers(batches, "--batches", "batch sizes, such as 1,8,64")
        if json is not None:  # now, not after minutes of measuring
            if json.is_dir():
                raise typer.BadParameter(f"{json} is a folder; give the name of a file", param_hint="--json")
            json.parent.mkdir(parents=True, exist_ok=True)
        source = _open(what, model, classes, image_shape)
        if zero is not None:
            source = source.zeroed(zero, layout=layout, round_to=round_to)
        if source.small is None:
            raise typer.BadParameter(
                f"{what} is a whole network: add --zero 0.5 to time it against a copy that lacks half of each "
                "layer's channels, or give the folder of a run",
                param_hint="NETWORK",
            )
        try:
            result = latency(
                source.full,
                source.small,
                source.example(),
                devices=_words(devices),
                modes=_words(modes) if modes else None,
                batches=sizes,
                precision=precision,
                rounds=rounds,
                seconds=seconds,
            )
        except ChoiceError as error:
            raise typer.BadParameter(str(error)) from None
        print_latency(result, table_console())
        if not result.timings:
            raise typer.Exit(1)
        if json is not None:
            replace_file(json, result.to_json().encode())

    @app.command(cls=Command)
    def export(
        what: What,
        out: Annotated[Path, typer.Option(metavar="FILE", help="Where it goes, such as model.onnx or model.pt2.")],
        format: Annotated[
            Literal["onnx", "torch"] | None,
            typer.Option(help="ONNX, or torch.export.", show_default="by the end of FILE"),
        ] = None,
        model: Model = "",
        classes: Classes = None,
        image_shape: ImageShape = "",
    ) -> None:
        """Write a run's small network, or any other, as ONNX or for torch.export, and check the file by running it.

        The batch size stays free, the image size is fixed.
        """
        chosen = format or {".onnx": "onnx", ".pt2": "torch"}.get(out.suffix)
        if chosen is None:
            raise typer.BadParameter(
                f"{out} does not end in .onnx or .pt2: add --format onnx or torch", param_hint="--out"
            )
        from narrowgate.export import export as write

        source = _open(what, model, classes, image_shape)
        typer.echo(str(write(source.network, source.example(), out, format=chosen)))


def _names(incomplete: str) -> list[str]:
    """For the shell: networks whose names begin like this; none makes it offer files and folders."""
    return [name for name in NAMES if name.startswith(incomplete)]


def _open(what: str, model: str, classes: int | None, image_shape: str) -> Any:
    from narrowgate.source import open_source

    shape = None
    if image_shape and ":" in (model or what):
        shape = _numbers(image_shape, "--image-shape", "the shape of one input, such as 3,224,224 or 1,16000")
    elif image_shape:
        shape = _numbers(image_shape, "--image-shape", "channels, height and width, such as 3,224,224", 3)
    return open_source(what, model=model, classes=classes, image_shape=shape)


def _numbers(text: str, option: str, wanted: str, count: int | None = None) -> tuple[int, ...]:
    """Whole numbers between commas; anything else is a usage error."""
    import typer

    words = _words(text)
    if not words or not all(word.isdecimal() and int(word) > 0 for word in words) or count not in (None, len(words)):
        raise typer.BadParameter(f"{text!r} is not {wanted}", param_hint=option)
    return tuple(int(word) for word in words)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
