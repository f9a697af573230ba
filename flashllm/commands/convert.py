"""`flashllm convert SRC DST`: from a Hugging Face folder, a GGUF file or a hub id to a model directory.

With --reorder TRACE the neurons are also written in the order in which they are best read; SRC may then be a model
directory itself, as a trace is recorded with one.
"""

import argparse
import dataclasses
from contextlib import ExitStack
from pathlib import Path

from flashllm.base.command_line import number, say
from flashllm.base.files import Progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument(
        "src",
        metavar="SRC",
        help="a Hugging Face folder, a GGUF file, a hub id or address, smollm2; with --reorder also a model directory",
    )
    parser.add_argument("dst", metavar="DST", type=Path, help="the directory to make; it must not exist")
    parser.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        help="of the result (default: the source's; beside quantised weights float16)",
    )
    parser.add_argument(
        "--bits",
        type=int,
        choices=(16, 12, 8, 4),
        help="of the neurons' weights (default: a quantised GGUF file or MXFP4 keeps its codes, others 16, the dtype "
        "as it is; 12: bfloat16 without loss; 8 and 4: in groups with a scale each)",
    )
    parser.add_argument(
        "--resident-bits",
        type=int,
        choices=(16, 12, 8, 4),
        help="of the weights that stay in memory: attention, embedding and head (default: 16, the dtype as it is, "
        "but for a quantised GGUF file without --bits)",
    )
    parser.add_argument(
        "--embedding-bits",
        type=int,
        choices=(12, 8, 4),
        help="of the embedding and the head alone, which lose most in 4 bits (default: as --resident-bits)",
    )
    parser.add_argument(
        "--group-size",
        type=int,
        choices=(32, 64),
        help="weights that share a scale where --bits or --resident-bits is 8 or 4 (default: 32)",
    )
    parser.add_argument(
        "--minimums",
        action="store_true",
        help="groups of 4 bits have a minimum beside their scale: closer to the weights, half a bit a weight more in "
        "groups of 32, a quarter in groups of 64",
    )
    parser.add_argument(
        "--calibrate",
        metavar="FILE",
        type=Path,
        help="choose codes of 8 and 4 bits by what the layers compute on this text, in UTF-8, of which up to 12,288 "
        "tokens are used: slower, and loses less. Some 10,000 tokens of the kind that the model will see are enough",
    )
    parser.add_argument(
        "--activations",
        choices=("float32", "int16", "int8"),
        help="what weights of 8 and 4 bits, and a quantised file's, are multiplied by, a token at a time, rounded in "
        "groups of 32. int16: those of 8 bits by 16, others by 8 (default). int8: all by 8, which loses more and is as "
        "fast. float32: exactly, at half the speed or less",
    )
    parser.add_argument(
        "--no-quality",
        action="store_true",
        help="do not measure what 8 and 4 bits cost (perplexity on a short sample, against the source), which inspect "
        "shows",
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
    parser.add_argument(
        "--reorder",
        metavar="TRACE",
        type=Path,
        help="also write the neurons in the order of this trace (tools/record_trace.py) in which they fire together, "
        "so that one read brings several; takes as much disk again as the neurons",
    )
    parser.add_argument(
        "--no-predictors",
        action="store_true",
        help="make no untrained predictors: the model then needs trained ones, or --mode dense",
    )


def main(args: argparse.Namespace) -> int:
    """Convert. Interrupted, the same command goes on where it stopped."""
    from flashllm.base.progress import ProgressBar
    from flashllm.commands.predictors.scripts import sample_text
    from flashllm.convert.choices import Choices
    from flashllm.convert.locate import find_checkpoint
    from flashllm.convert.reorder import reorder
    from flashllm.convert.run import convert
    from flashllm.convert.tokenizer import TOKENIZER
    from flashllm.errors import UsageError
    from flashllm.format.manifest import MANIFEST
    from flashllm.format.report.inspect import sparsity_line
    from flashllm.format.trace import Trace
    from flashllm.pack.calibrated import convert_calibrated
    from flashllm.pack.sparsified import convert_sparsified

    is_model = (Path(args.src) / MANIFEST).exists()
    keep = args.bits is None and args.resident_bits is None and args.embedding_bits is None
    row_bits, resident_bits = args.bits or 16, args.resident_bits or 16
    embedding_bits = resident_bits if args.embedding_bits is None else args.embedding_bits
    bits = {row_bits, resident_bits, embedding_bits}
    fewer_bits = bits != {16} or args.calibrate is not None
    of_conversion = args.no_predictors or any(
        choice is not None for choice in (args.dtype, args.gate, args.sparsify, args.activations)
    )
    if args.text is not None and args.sparsify is None:
        raise UsageError("--text is the text by which --sparsify chooses thresholds; give both, or neither")
    if is_model and args.reorder is not None and (of_conversion or fewer_bits):
        raise UsageError(
            f"{args.src}: is a model directory, which --reorder copies as it is: --dtype, --bits and its like, "
            "--activations, --gate, --sparsify and --no-predictors are for a Hugging Face folder"
        )
    if args.group_size is not None and not {8, 4} & bits:
        raise UsageError("--group-size is for weights of 8 or 4 bits: give --bits or --resident-bits")
    if args.minimums and 4 not in bits:
        raise UsageError("--minimums are for weights of 4 bits: add --bits 4 or --resident-bits 4")
    if args.calibrate is not None and args.sparsify is not None:
        raise UsageError("--calibrate and --sparsify do not go together yet; give one of them")
    measured = bool({8, 4} & bits) and not args.no_quality and args.sparsify is None
    try:
        with ExitStack() as stack:
            trace = None if args.reorder is None else stack.enter_context(Trace(args.reorder))
            if is_model and trace is not None:
                reorder(Path(args.src), args.dst, trace, stack.enter_context(ProgressBar("reorder")))
            else:
                source, name = find_checkpoint(args.src, say=say)
                bar = stack.enter_context(ProgressBar("convert"))
                choices: Choices = {
                    "dtype": args.dtype,
                    "encoding": _encoding(args, row_bits),
                    "resident_encoding": _encoding(args, resident_bits),
                    "table_encoding": _encoding(args, embedding_bits),
                    "activations": args.activations,
                    "reorder": trace,
                    "gate": args.gate or ("rows" if args.sparsify is None else "resident"),
                }
                if args.sparsify is not None:
                    manifest = convert_sparsified(
                        source,
                        args.dst,
                        args.sparsify,
                        args.text if args.text is not None else sample_text(),
                        source_name=name,
                        say=say,
                        progress=bar,
                        scoring=stack.enter_context(ProgressBar("sparsify", unit="windows")),
                        **choices,
                    )
                    assert manifest.sparsity is not None
                    say(sparsity_line(dataclasses.asdict(manifest.sparsity)))
                else:
                    choices["predictors"] = not args.no_predictors
                    if args.calibrate is None:
                        choices["keep"] = keep
                        manifest = convert(source, args.dst, source_name=name, say=say, progress=bar, **choices)
                    else:
                        calibrating = stack.enter_context(ProgressBar("calibrate", unit="layers"))
                        manifest = convert_calibrated(
                            source,
                            args.dst,
                            args.calibrate,
                            source_name=name,
                            say=say,
                            progress=bar,
                            calibrating=calibrating,
                            **choices,
                        )
                    if measured and TOKENIZER in manifest.files:
                        comparing = stack.enter_context(ProgressBar("compare", unit="layers"))
                        say(_compared(source, args.dst, comparing))
                    if args.gate is not None and not manifest.sparse:
                        say("no neuron of this model is ever zero, so its gates leave none out; --sparsify would")
                if TOKENIZER not in manifest.files:
                    say(f"{source} has no tokenizer: the model takes token ids alone, no text to chat with")
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt("interrupted; the same command goes on where it stopped") from stop
    print(args.dst)
    return 0


def _compared(source: Path, directory: Path, progress: Progress) -> str:
    """What the bits of a finished conversion cost, or why that is not known: the model is whole either way."""
    from flashllm.commands.predictors.scripts import sample_text
    from flashllm.errors import FlashError
    from flashllm.format.report.inspect import quality_line
    from flashllm.pack.quality import measure_quality

    try:
        manifest = measure_quality(source, directory, sample_text(), progress=progress)
    except FlashError as error:
        return f"what fewer bits cost was not measured: {error}"
    assert manifest.quality is not None
    return quality_line(dataclasses.asdict(manifest.quality))


def _encoding(args: argparse.Namespace, bits: int) -> str | None:
    """The encoding of weights of so many bits; None: the dtype."""
    from flashllm.base.bf12 import BF12
    from flashllm.base.group_codes import DEFAULT_GROUP, code_of

    if bits == 16:
        return None
    if bits == 12:
        return BF12.name
    return code_of(bits, args.group_size or DEFAULT_GROUP, has_minimum=args.minimums and bits == 4).name
