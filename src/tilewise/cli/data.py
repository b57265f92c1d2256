"""`tilewise data preview`: shows what a training run would learn from its data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilewise.cli.before_work import before_work
from tilewise.cli.help import App
from tilewise.cli.options import make_console

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.text import Text
    from tokenizers import Tokenizer

    from tilewise.data import Batches
    from tilewise.train import TrainingData

__all__ = ["datasets"]

datasets = App(name="data", help="Look at training data.")

_COUNTED, _MASKED = "bold green", "dim"
_OPEN, _CLOSE = "\N{MATHEMATICAL LEFT DOUBLE ANGLE BRACKET}", "\N{MATHEMATICAL RIGHT DOUBLE ANGLE BRACKET}"


@datasets.command()
def preview(
    config: Annotated[
        Path, typer.Argument(help="A TOML file; examples/train.toml shows every key.", show_default=False)
    ],
    examples: Annotated[int, typer.Option(min=0, max=10_000, help="Number of sequences to show.")] = 5,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="SECTION.KEY=VALUE", help="Override a setting of the file; may be repeated."
        ),
    ] = None,
) -> None:
    """Show the first sequences that a training run would learn, and figures about its data.

    Reads and encodes the data as `tilewise train` does; trains nothing and writes nothing. Tokens
    whose labels the loss counts are green, or between double brackets where there are no colours;
    the others are only read. The figures are, per source, the numbers of documents, sequences,
    tokens and counted labels, and what was truncated, split or dropped.

    Example: `tilewise data preview train.toml`
    """
    from tilewise.data import PairBatches
    from tilewise.train import load_config, prepare_data
    from tilewise.train.training_data import describe_source

    output = make_console(stderr=False)
    with before_work():
        prepared = prepare_data(load_config(config, settings or []), make_console(stderr=True))
    for number in range(examples):
        for text in _sequence(prepared, number, output.color_system is not None):
            output.print(text, highlight=False, soft_wrap=True)
    for source in prepared.sources:
        output.print(describe_source(source), highlight=False, markup=False)
    batches = _batches(prepared)
    counted = sum(source.counts.counted for source in prepared.sources)
    tokens = sum(source.counts.tokens for source in prepared.sources)
    noun = "pairs" if isinstance(prepared.batches, PairBatches) else "sequences"
    output.print(
        f"{batches.num_windows:,} {noun}, {tokens:,} tokens, {counted / max(tokens, 1):.1%} of them counted; "
        f"{batches.num_windows / batches.batch:,.1f} steps per epoch",
        highlight=False,
        markup=False,
    )


def _batches(prepared: TrainingData) -> Batches:
    from tilewise.data import Batches

    batches = prepared.batches
    return batches if isinstance(batches, Batches) else batches.batches


def _sequence(prepared: TrainingData, number: int, has_colours: bool) -> Iterator[Text]:
    """A title and the text of the n-th sequence of a run, or of both sequences of the n-th pair."""
    from tilewise.data import PairBatches

    if isinstance(prepared.batches, PairBatches):
        source, pair = prepared.batches.place(number)
        for word, (tokens, labels) in zip(("chosen", "rejected"), pair):
            title = f"{word} sequence of pair {number + 1}"
            yield from _described(prepared, source, title, tokens, labels, has_colours)
        return
    source, tokens, labels = _batches(prepared).row(number)
    yield from _described(prepared, source, f"sequence {number + 1}", tokens, labels, has_colours)


def _described(
    prepared: TrainingData,
    source: int,
    name: str,
    tokens: NDArray[np.int32],
    labels: NDArray[np.int32],
    has_colours: bool,
) -> Iterator[Text]:
    """A title and the text of a sequence."""
    from rich.text import Text

    from tilewise.data import IGNORED

    # a label is that of the next token; the last one may be only predicted
    counted = [False, *(labels != IGNORED).tolist()]
    ids = [*tokens.tolist(), *labels[-1:][labels[-1:] != IGNORED].tolist()]
    num_counted = sum(counted)
    title = f"{name} of {prepared.sources[source].source.path}: {len(ids)} tokens, {num_counted} counted"
    yield Text(title, style="bold")
    text = Text()
    for piece, is_counted in _pieces(prepared.tokenizer, ids, counted):
        printable = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in piece)
        marked = f"{_OPEN}{printable}{_CLOSE}" if is_counted and not has_colours else printable
        text.append(marked, style=_COUNTED if is_counted else _MASKED)
    yield text
    yield Text()


def _pieces(tokenizer: Tokenizer, ids: list[int], counted: list[bool]) -> Iterator[tuple[str, bool]]:
    """The text of tokens, in pieces of counted and of other tokens."""
    before, begin = "", 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or counted[end] != counted[begin]:
            # decoded from the start, because a token's text may depend on those before it
            text = tokenizer.decode(ids[:end], skip_special_tokens=False)
            yield text[len(before) :], counted[begin]
            before, begin = text, end
