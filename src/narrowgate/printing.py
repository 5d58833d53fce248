"""What a person sees of a measurement and of an inspection: rich tables and trees."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from narrowgate.flow.plan import walls_by_kind
from narrowgate.inspect_model import InspectedLayer, Inspection
from narrowgate.measure.advice import advice
from narrowgate.measure.tables import share, short
from narrowgate.measure.timings import Latency, Spread

_COLOURS = {"faster": "green", "slower": "red", "no clear difference": "yellow"}
_NUMBERS = {"32": "float32", "bf16": "bfloat16"}
_FEW = 6


def print_latency(result: Latency, console: Console) -> None:
    """A table of times before and after, what could not be timed, and what to do where the small one is not faster."""
    (was, now), (many, few) = result.multiply_adds, result.parameters
    console.print(
        f"{result.model}, inputs {result.inputs}: {share(was, now)} of {short(was)} multiply-adds, "
        f"{share(many, few)} of {short(many)} parameters",
        highlight=False,
    )
    for device, name in result.devices.items():
        threads = f", threads: {result.threads}" if device == "cpu" else ""
        console.print(f"{device}: {name}, {_NUMBERS[result.precisions[device]]}{threads}", highlight=False)
    table = Table(
        caption=escape("milliseconds for one batch, median above quartiles; time left: after / before, by rounds")
    )
    table.add_column("how")  # in a narrow terminal cells take more lines: with no_wrap, columns would vanish
    for name in ("batch", "before", "after", "time left"):
        table.add_column(name, justify="right")
    table.add_column("")
    to = "-" if console.width >= 80 else " - "  # where a narrow terminal may end a line
    for timing in result.timings:
        verdict = Text(timing.verdict, style=_COLOURS[timing.verdict])
        left = f"{timing.ratio.median:.0%}\n{timing.ratio.q1:.0%}{to}{timing.ratio.q3:.0%}"
        how = f"{timing.device} {timing.mode}"
        cells = how, str(timing.batch), _ms(timing.before, to), _ms(timing.after, to), left
        table.add_row(*cells, verdict)
    if result.timings:
        console.print(table)
    _print_missing(result, console)
    for line in advice(result):
        console.print(f"- {escape(line)}", highlight=False)


def _print_missing(result: Latency, console: Console) -> None:
    modes: dict[tuple[str, str], list[str]] = {}
    for missing in result.missing:
        modes.setdefault((missing.device, missing.why), []).append(missing.mode)
    for (device, why), names in modes.items():
        console.print(f"not timed: {device} {', '.join(names)}: {escape(why)}", highlight=False)


def _ms(spread: Spread, to: str) -> str:
    digits = 1 if spread.median > 0.1 else 2 if spread.median > 0.01 else 3
    median, q1, q3 = (f"{value * 1e3:.{digits}f}" for value in (spread.median, spread.q1, spread.q3))
    return f"{median}\n{q1}{to}{q3}"


def print_inspection(result: Inspection, console: Console) -> None:
    """The network as a tree of its modules, then what is coupled, what is a wall and what gets no gate."""
    head = (
        f"[bold]{escape(result.model)}[/], inputs {result.inputs}: {short(result.parameters)} parameters, "
        f"{short(result.multiply_adds)} multiply-adds, {result.gates:,} gates"
    )
    tree = Tree(head, highlight=False)
    _grow(tree, {layer.name: layer for layer in result.layers}, "")
    console.print(tree)
    console.print("of each layer: channels in -> out; parameters; multiply-adds; gates", style="dim", highlight=False)
    _print_groups(result, console)
    _print_walls(result, console)
    if result.uncounted:
        console.print(f"\nNot counted, for want of a formula: {', '.join(result.uncounted)}", highlight=False)


def _grow(tree: Tree, layers: dict[str, InspectedLayer], prefix: str) -> None:
    """Add the layers below a module, branch by branch; a module with a single layer shares its line."""
    parts: dict[str, dict[str, InspectedLayer]] = {}
    for name, layer in layers.items():
        parts.setdefault(name.removeprefix(prefix).partition(".")[0], {})[name] = layer
    for part, below in parts.items():
        if len(below) == 1:
            ((name, layer),) = below.items()
            tree.add(_line(layer, name.removeprefix(prefix)))
        else:
            _grow(tree.add(f"[bold]{escape(part)}[/]"), below, f"{prefix}{part}.")


def _line(layer: InspectedLayer, name: str) -> Text:
    line = Text(f"{name or '(the model itself)'}  ")
    line.append(f"{layer.kind} {layer.inputs} -> {layer.outputs}", style="dim")
    if layer.was is not None and layer.was != layer.outputs:
        line.append(f" of {layer.was}", style="dim")
    line.append(f"; {short(layer.parameters)}; {short(layer.multiply_adds)}; ", style="dim")
    if layer.gates:
        line.append(f"{layer.gates} gates", style="green")
    else:
        line.append(f"no gates: {layer.why_not}", style="yellow")
    if layer.input_gates:
        line.append(f" and {layer.input_gates} on its inputs", style="green")
    if layer.group is not None:
        line.append(f"; group {layer.group}", style="cyan")
    if layer.held and layer.gates:
        line.append(f"; stays whole {layer.held}", style="red")
    elif layer.gates and layer.parts < layer.outputs:
        line.append(f"; goes in {layer.parts} parts", style="magenta")
    return line


def _print_groups(result: Inspection, console: Console) -> None:
    if result.groups:
        console.print("\n[bold]Coupled[/]: a channel of a group goes from all of its layers, or stays in all")
    widths = {layer.name: layer.outputs for layer in result.layers}
    for group in result.groups:
        more = f" and {len(group.layers) - _FEW} more" if len(group.layers) > _FEW else ""
        names = ", ".join(group.layers[:_FEW])
        unit = "channels" if group.parts == max(widths[name] for name in group.layers) else "parts"
        _print_item(f"[cyan]group {group.number}[/], {group.parts} {unit}: {escape(names)}{more}", console)


def _print_walls(result: Inspection, console: Console) -> None:
    kinds = walls_by_kind(result.walls)
    console.print("\n[bold]Walls[/], where channels stay at full width" + ("" if kinds else ": none"))
    for (op, why), layers in kinds.items():
        more = f" and {len(layers) - 3} more" if len(layers) > 3 else ""
        _print_item(f"[red]{escape(op)}[/] ({escape(why)}): {escape(', '.join(layers[:3]))}{more}", console)


def _print_item(text: str, console: Console) -> None:
    """A line of a list; what it goes on with in a narrow terminal is as far in."""
    console.print(Padding.indent(Text.from_markup(text), 2))
