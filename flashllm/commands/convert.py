"""`flashllm convert SRC DST`: from a Hugging Face folder, a GGUF file or a hub id to a model directory."""

import argparse
import dataclasses
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from flashllm.base.command_line import number, say
from flashllm.base.files import Progress

if TYPE_CHECKING:
    from flashllm.convert.choices import Choices
    from flashllm.format.manifest import Manifest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("src", metavar="SRC", help="a Hugging Face folder, a GGUF file, a hub id or address, smollm2")
    parser.add_argument("dst", metavar="DST", type=Path, help="the directory to make; it must not exist")
    parser.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        help="of the result (default: the source's; with quantised weights float16)",
    )
    parser.add_argument(
        "--bits",
        type=int,
        choices=(16, 12, 8, 4),
        help="of the neurons' weights (default: a quantised GGUF file or MXFP4 keeps its codes, unless --sparsify or "
        "--calibrate is given; others 16, the dtype as it is; 12: bfloat16 without loss; 8 and 4: in groups with a "
        "scale each)",
    )
    parser.add_argument(
        "--resident-bits",
        type=int,
        choices=(16, 12, 8, 4),
        help="of the weights that stay in memory: attention, embedding and head (default: 16, the dtype as it is, "
        "but for a quantised GGUF file without --bits)",
    )
    parser.add_argument(
        "--calibrate",
        metavar="FILE",
        type=Path,
        help="choose codes of 8 and 4 bits by what the layers compute on this text, in UTF-8, of which up to 12,288 "
        "tokens are used: slower, and loses less. Some 10,000 tokens of the kind that the model will see are enough",
    )
    parser.add_argument(
        "--in-place",
        action="store_true",
        help="leave the experts of a GGUF file, of gpt-oss's folder, or of safetensors that are not in codes, where "
        "they are, and read them there: DST holds the rest, and the files must stay as they are",
    )
    parser.add_argument(
        "--gate",
        choices=("rows", "resident", "4bit"),
        help="where the gates of a gated FFN go. rows: to flash, with the neurons (default). resident: into memory, a "
        "third of the FFN's bytes; their product names the active neurons exactly, without predictors. 4bit: to flash, "
        "and in 4 bits into memory as predictors, about a twelfth of the bytes of a 16-bit FFN",
    )
    parser.add_argument(
        "--sparsify",
        metavar="SHARE",
        type=number(0, 0.99, low_allowed=False),
        help="leave out this share of the neurons of a gated model, those whose gate lets least through. Thresholds "
        "are chosen on a text, and the perplexity they cost is measured on it and printed. --gate is then resident or "
        "4bit",
    )
    parser.add_argument(
        "--text",
        metavar="FILE",
        type=Path,
        help="the text that --sparsify uses, in UTF-8: up to 8,192 tokens of it (default: a short sample)",
    )


def main(args: argparse.Namespace) -> int:
    """Convert. Interrupted, the same command goes on where it stopped."""
    from flashllm.commands.asked import check_text, warn_of_garbage
    from flashllm.convert.locate import find_checkpoint
    from flashllm.convert.tokenizer import TOKENIZER
    from flashllm.errors import UsageError
    from flashllm.format.manifest import MANIFEST

    if args.text is not None and args.sparsify is None:
        raise UsageError("--text is the text by which --sparsify chooses thresholds; give both, or neither")
    if args.in_place and (args.calibrate, args.sparsify, args.bits, args.resident_bits) != (None,) * 4:
        raise UsageError("--in-place leaves experts as the file has them: it does not go with options for other codes")
    if args.calibrate is not None and args.sparsify is not None:
        raise UsageError("--calibrate and --sparsify do not go together yet; give one of them")
    try:
        source, name = find_checkpoint(args.src, say=say)
        check_text(source)
        with ExitStack() as bars:
            manifest = _convert(args, source, name, bars)
        if TOKENIZER not in manifest.files:
            say(f"{source} has no tokenizer: the model takes token ids alone, no text to chat with")
        else:
            warn_of_garbage(args.dst, always=_of_fewer_bits(args) and manifest.quality is None)
    except KeyboardInterrupt as stop:
        if (args.dst / MANIFEST).exists():
            raise KeyboardInterrupt(f"interrupted; {args.dst} is whole, but was not compared or checked") from stop
        raise KeyboardInterrupt("interrupted; the same command goes on where it stopped") from stop
    print(args.dst)
    return 0


def _convert(args: argparse.Namespace, source: Path, name: str | None, bars: ExitStack) -> "Manifest":
    """The finished model's manifest, after what it cost was said. Progress is shown until `bars` is closed."""
    from flashllm.base.progress import ProgressBar
    from flashllm.commands.predictors.scripts import sample_text
    from flashllm.convert.choices import encoding_of
    from flashllm.convert.run import convert
    from flashllm.convert.tokenizer import TOKENIZER
    from flashllm.format.report.inspect import sparsity_line
    from flashllm.pack.calibrated import convert_calibrated
    from flashllm.pack.sparsified import convert_sparsified

    def bar(what: str, unit: str) -> Progress:
        return bars.enter_context(ProgressBar(what, unit=unit))

    choices: Choices = {
        "dtype": args.dtype,
        "encoding": encoding_of(args.bits),
        "resident_encoding": encoding_of(args.resident_bits),
        "gate": args.gate or ("rows" if args.sparsify is None else "resident"),
    }
    progress = bars.enter_context(ProgressBar("convert"))
    if args.sparsify is not None:
        text, scoring = args.text if args.text is not None else sample_text(), bar("sparsify", "windows")
        manifest = convert_sparsified(
            source,
            args.dst,
            args.sparsify,
            text,
            source_name=name,
            say=say,
            progress=progress,
            scoring=scoring,
            **choices,
        )
        assert manifest.sparsity is not None
        say(sparsity_line(dataclasses.asdict(manifest.sparsity)))
        return manifest
    choices["predictors"] = True
    if args.calibrate is None:
        choices["keep"] = args.bits is None
        choices["in_place"] = args.in_place
        manifest = convert(source, args.dst, source_name=name, say=say, progress=progress, **choices)
    else:
        calibrating = bar("calibrate", "layers")
        manifest = convert_calibrated(
            source,
            args.dst,
            args.calibrate,
            source_name=name,
            say=say,
            progress=progress,
            calibrating=calibrating,
            **choices,
        )
    if _of_fewer_bits(args) and TOKENIZER in manifest.files:
        manifest = _compared(source, args.dst, bar("compare", "layers")) or manifest
    if args.gate is not None and not manifest.sparse:
        say("no neuron of this model is ever zero, so its gates leave none out; --sparsify would")
    return manifest


def _of_fewer_bits(args: argparse.Namespace) -> bool:
    return not {8, 4}.isdisjoint((args.bits, args.resident_bits))


def _compared(source: Path, directory: Path, progress: Progress) -> "Manifest | None":
    """Say what the bits of a finished conversion cost, or why that is not known: the model is whole either way. Its
    manifest where that was measured."""
    from flashllm.commands.predictors.scripts import sample_text
    from flashllm.errors import FlashError
    from flashllm.format.report.inspect import quality_line
    from flashllm.pack.quality import measure_quality

    try:
        manifest = measure_quality(source, directory, sample_text(), progress=progress)
    except FlashError as error:
        say(f"what fewer bits cost was not measured: {error}")
        return None
    assert manifest.quality is not None
    say(quality_line(dataclasses.asdict(manifest.quality)))
    return manifest
