"""What rows of per-layer embeddings cost that lie on flash: a token's wait by how many of them stay in memory.

    python bench/cache/token_rows.py FOLDER
    python bench/cache/token_rows.py FOLDER --rows 262144 --encoding int8_32

Makes a model in FOLDER, which it leaves there, whose rows are as long as Gemma 4 E4B's (42 layers of 256 numbers) and
whose layers are narrow, with random weights. Ids are drawn by Zipf's law. Reads are direct. `wait` is what is left of a
row's read behind the embedding and the projection that go on with it; `alone` is one direct read of a row's bytes from
a random place, the roof. The ways take turns. The last line is one JSON document.
"""

import argparse
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gate_reads import Drive, Round

from flashllm.arch.registry import source_shapes
from flashllm.base.machine import available_nbytes, process_nbytes
from flashllm.config import RunConfig
from flashllm.convert.run import convert
from flashllm.engine.model import Model
from flashllm.format.model_dir import ModelDir
from flashllm.format.model_files import CONFIG, TABLE
from flashllm.format.safetensors import encode_header
from flashllm.plan.resolve import resolve

_CHUNK = 1 << 22  # numbers written at a time
_PAGE = 4096


def write_checkpoint(folder: Path, rows: int, layers: int) -> None:
    """A Hugging Face folder of random weights, in bf16."""
    folder.mkdir(parents=True)
    config: dict[str, Any] = {
        "model_type": "gemma4_text",
        "vocab_size": rows,
        "vocab_size_per_layer_input": rows,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "per_layer_config": {},
        "num_kv_shared_layers": 18 * layers // 42,
        "dtype": "bfloat16",
    }
    (folder / CONFIG).write_text(json.dumps(config))
    shapes = source_shapes(config)
    random = np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(encode_header([(name, "BF16", shape) for name, shape in shapes.items()], {"format": "pt"}))
        for name, shape in shapes.items():
            left = int(np.prod(shape))
            while left:
                count = min(left, _CHUNK)
                values = random.standard_normal(count, np.float32) * 0.02 + ("norm" in name)
                file.write((values.view(np.uint32) >> 16).astype("<u2").data)
                left -= count


class Way:
    """A model with so many rows in memory."""

    def __init__(self, directory: Path, kept: int) -> None:
        config = RunConfig(threads=1, mode="dense", memory=4 << 30)
        found = ModelDir.open(directory)
        plan = resolve(config, found, available=available_nbytes(), process=process_nbytes())
        self.kept = kept
        self._model = Model(found, replace(plan, memory=replace(plan.memory, table_rows=kept)), config)
        self._sequence = self._model.new_sequence()
        self.waits: list[float] = []
        self.totals: list[float] = []
        self.read = self.requests = 0

    def pass_by(self, ids: list[int], *, counted: bool) -> None:
        """Tokens, one after the other; the conversation begins anew."""
        self._sequence.keep(0)
        for token in ids:
            self._model.meter.restart()
            self._model.step([(self._sequence, [token])])
            times = self._model.meter.take()
            if counted:
                self.waits.append(times.io_ms)
                self.totals.append(times.total_ms)
                self.read += times.bytes_read
                self.requests += times.requests

    def close(self) -> None:
        self._sequence.close()
        self._model.close()

    def result(self) -> dict[str, Any]:
        """Of a token, in milliseconds; of its wait [median, ninth decile, mean]."""
        count = len(self.waits)
        deciles = statistics.quantiles(self.waits, n=10, method="inclusive")
        return {
            "rows_kept": self.kept,
            "hit_rate": 1 - self.requests / count,
            "requests_a_token": self.requests / count,
            "bytes_a_token": self.read / count,
            "wait_ms": [deciles[4], deciles[8], statistics.fmean(self.waits)],
            "token_ms": statistics.median(self.totals),
        }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=65_536)
    parser.add_argument("--layers", type=int, default=42)
    parser.add_argument("--encoding", default=None, help="of the rows, as int8_32; bf16 without it")
    parser.add_argument("--kept", type=int, nargs="*", default=[1, 1024, 8192], help="rows that stay, by way")
    parser.add_argument("--tokens", type=int, default=100, help="in a turn")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--warm", type=int, default=600, help="tokens before anything is counted")
    args = parser.parse_args(argv)
    directory = args.folder / f"model-{args.encoding or 'bfloat16'}"
    if not (args.folder / "hf").exists():
        write_checkpoint(args.folder / "hf", args.rows, args.layers)
    if not directory.exists():
        convert(args.folder / "hf", directory, table_encoding=args.encoding)
    table = ModelDir.open(directory).table
    assert table is not None
    random = np.random.default_rng(1)
    chances = 1 / np.arange(1, table.rows + 1)
    ranked = random.permutation(table.rows)

    def draw(count: int) -> list[int]:
        return list(map(int, ranked[random.choice(table.rows, count, p=chances / chances.sum())]))

    ways = [Way(directory, min(kept, table.rows)) for kept in args.kept]
    try:
        for first in range(0, args.warm, args.tokens):
            ids = draw(min(args.tokens, args.warm - first))
            for way in ways:
                way.pass_by(ids, counted=False)
        for _ in range(args.turns):
            ids = draw(args.tokens)
            for way in ways:
                way.pass_by(ids, counted=True)
    finally:
        for way in ways:
            way.close()
    nbytes = -(-table.stride // _PAGE) * _PAGE + _PAGE  # a row begins within a page
    alone = [1e3 * s for s in Drive(directory / TABLE).quartiles_of([[Round(1, nbytes)]])[0]]
    results = [way.result() for way in ways]
    for each in results:
        print(
            f"{each['rows_kept']:7d} rows stay: {100 * each['hit_rate']:5.1f} % found, "
            f"{each['bytes_a_token'] / 1e3:6.1f} kB read and {each['wait_ms'][0]:.3f} ms waited for a token (ninth "
            f"decile {each['wait_ms'][1]:.3f}), which takes {each['token_ms']:.2f} ms"
        )
    print(f"a row of {table.stride} bytes; alone {alone[1]:.3f} ms ({alone[0]:.3f} to {alone[2]:.3f})")
    print(json.dumps({"rows": table.rows, "stride": table.stride, "alone_ms": alone, "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
