"""Run one reader under atheris: `python with_atheris.py READER FOLDER [libFuzzer options]`; exit
status 0 if nothing was found.

Coverage of our modules and of Python's TOML parser guides the search. Half of the inputs come from
mutate.py, half from libFuzzer's own mutations. Seeds are written to FOLDER/corpus, findings to
FOLDER. `make soak` runs it; it can be run by hand.
"""

from __future__ import annotations

import logging
import random
import sys
import tempfile
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[1]))

with atheris.instrument_imports(include=["tilewise", "tomllib"]):
    import tomllib  # noqa: F401  the reader of configurations, before something else loads it as it is

    from fuzz.readers import PLANTED, READERS, attempt


def main() -> None:
    """Fuzz until libFuzzer's options end it."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    reader = PLANTED if name == "planted" else READERS[name]
    seeds, corpus, scratch = reader.seeds(), folder / "corpus", Path(tempfile.mkdtemp(dir=folder))
    corpus.mkdir()
    for number, seed in enumerate(seeds):
        (corpus / f"seed-{number}").write_bytes(seed)

    def change(data: bytes, max_bytes: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.5:
            return bytes(atheris.Mutate(data, max_bytes))
        return reader.mutation(rng, data, seeds)[:max_bytes]

    logging.disable(logging.CRITICAL)  # what readers leave out they say aloud
    options = [
        "-timeout=20",
        "-rss_limit_mb=3072",
        "-max_len=32768",
        f"-artifact_prefix={folder}/",
        *sys.argv[3:],
    ]
    atheris.Setup(
        [sys.argv[0], *options, str(corpus)],
        lambda data: attempt(reader, scratch, data),
        custom_mutator=change,
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main()
