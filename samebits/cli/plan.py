"""`samebits plan`: which layouts of a model are admissible, what they take and cost."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from samebits.cli.output import show_json, show_table

app = typer.Typer()


@app.command()
def plan(
    target: Annotated[
        str,
        typer.Argument(help="Case, recipe.yaml, or published config.json.", metavar="CASE|FILE"),
    ],
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Expert-parallel ranks.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline stages.")] = 1,
    cp: Annotated[int, typer.Option(min=1, help="Context-parallel ranks.")] = 1,
    sp: Annotated[bool, typer.Option("--sp", help="Sequence parallelism.")] = False,
    length: Annotated[
        int, typer.Option("--length", min=1, help="Tokens of the sequences to plan for.")
    ] = 4096,
    text_only: Annotated[
        bool, typer.Option("--text-only", help="Of a config.json: its text model alone.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a layout needs and whether a contract can cover it.

    Memory is counted from shapes, without activations, optimizer and what an engine reserves.
    Refuses a model with regions that no operator covers (SB0916), and a layout that is not
    admissible (SB0919), after the report.
    """
    from samebits.casework import layouts

    if text_only and not layouts.is_config(target):
        raise typer.BadParameter("--text-only takes a model out of a config.json")
    model = layouts.find(target, text_only=text_only)
    layout = layouts.Layout(tp, ep, pp, cp, sp)
    found = layouts.report(model, layout, length)
    if as_json:
        show_json(found)
    else:
        show_table(("", ""), _lines(found), header=False)
    layouts.check(model, layout, target)


def _lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    missing = "\n".join(f"{g['region']} ({g['because']})" for g in found["regions"]["missing"])
    lines = [
        ("model", f"{found['model']}, {found['architecture']}"),
        *_text_lines(found["text_model"]),
        ("regions covered", ", ".join(found["regions"]["covered"]) or "-"),
        ("regions missing", missing or "-"),
    ]
    if found["tensor_parallel"] is not None:
        sizes = [
            f"{tp}: {'; '.join(why) or 'admissible'}"
            for tp, why in found["tensor_parallel"].items()
        ]
        lines.append(("tensor parallel", "\n".join(sizes)))
    refused = found["layout"]["refused"]
    axes = ", ".join(f"{axis} {found['layout'][axis]}" for axis in ("tp", "ep", "pp", "cp"))
    verdict = "not judged" if refused is None else "; ".join(refused) or "admissible"
    lines.append((f"layout {axes}", verdict))
    lines += _memory_lines(found["memory"])
    rows = [
        f"{row['work']}: {row['ratio']:.2f} of stock, "
        f"{row['hardware'].partition(' (')[0]}, {row['date']}"
        for row in found["overhead"]
    ]
    lines.append(("time", "\n".join(rows) or "not measured"))
    return lines


def _text_lines(text: dict[str, Any] | None) -> list[tuple[str, str]]:
    if text is None:
        return []
    left_out = ", ".join(text["taken_out"])
    judged = f"left out: {left_out}" if left_out else "judged as it stands inside"
    return [("text model", f"of {text['of']}; {judged}")]


def _memory_lines(memory: dict[str, Any] | None) -> list[tuple[str, str]]:
    if memory is None:
        return [("memory per rank", "not counted")]
    layers = f"{memory['layers']} layers"
    if memory["proved_layers"] not in (None, memory["layers"]):
        layers += f" ({memory['proved_layers']} in the case)"
    state, stock = memory["state_per_sequence"], memory["stock_state_per_sequence"]
    lines = [
        ("memory per rank", f"weights {_size(memory['weights_bf16'])} in bf16, {layers}; as stock"),
        (
            f"  {memory['sequence_length']:,} tokens",
            f"keys and values {_size(memory['kv_per_sequence'])} a sequence; as stock",
        ),
    ]
    if stock:
        lines.append(
            ("  state", f"{_size(state)} a sequence; stock {_size(stock)} ({state / stock:.2f})")
        )
    return lines


def _size(count: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count} B"
