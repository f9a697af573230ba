"""`flashllm offload run MODEL -i IN -o OUT`: a batch file through the throughput engine, resumable at any moment.

Reads arguments, shows progress, prints what was measured. The job runs in a thread of its own, so that ctrl-C is heard
at once whatever the native code is doing.
"""

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashllm.base.command_line import print_json, say, size, whole
from flashllm.base.text import is_terminal, one_line
from flashllm.base.units import format_size
from flashllm.errors import INTERRUPTED
from flashllm.offload import cli_pipeline
from flashllm.offload.accelerators import DEVICES

if TYPE_CHECKING:
    from flashllm.offload.jobs.job import Job
    from flashllm.offload.jobs.lines import BatchFile
    from flashllm.offload.jobs.measures import Totals
    from flashllm.offload.jobs.results import Results
    from flashllm.offload.launch import Launch, LaunchOptions
    from flashllm.offload.model_text import ModelText
    from flashllm.offload.pipeline.ring import Ring

_POLL_S = 0.05  # how often the main thread looks up
_PATIENCE_S = 0.7  # for an interrupted block to end; then the process does. The output file is whole at every moment
_PLAIN_S = 5.0  # between two lines of progress where nobody sees them appear
_TERMINAL_S = 0.2


def add_compress(parser: argparse._ActionsContainer, *, default: str) -> None:
    """`--compress`, as `policy.compression` takes it; None where it is not given."""
    parser.add_argument(
        "--compress",
        metavar="WHAT",
        type=lambda text: frozenset(() if text == "none" else text.split(",")),
        help=f"packed in 4 bits: weights, cache, weights,cache or none (default: {default})",
    )


def add_arguments(verbs: Any) -> None:
    run = verbs.add_parser(
        "run",
        help="a file of prompts through a model larger than the accelerator, or than memory",
        description="Answers every line of a batch file: OpenAI batch lines for /v1/chat/completions and "
        '/v1/completions, {"prompt": ...} lines, or a .txt file with a prompt a line. Answers are appended as blocks '
        "of lines finish, in no promised order; match them by custom_id.",
    )
    run.add_argument(
        "model", metavar="MODEL", help="a Hugging Face folder, a flashllm directory, a GGUF file, a hub id"
    )
    run.add_argument("-i", "--input", required=True, type=Path, metavar="IN", help="the batch file")
    run.add_argument("-o", "--output", required=True, type=Path, metavar="OUT", help="the file of answers")
    run.add_argument("--resume", action="store_true", help="go on with an OUT that exists: what it answers is skipped")
    run.add_argument(
        "--max-new-tokens",
        type=whole(1),
        default=256,
        metavar="N",
        help="new tokens for a line that does not say (default: %(default)s)",
    )
    run.add_argument("--memory", type=size, metavar="SIZE", help="limit of everything the process holds, like 7GB")
    run.add_argument(
        "--device",
        choices=DEVICES,
        default="auto",
        help="of the device tier: a GPU by torch, or the CPU by our own products (default: a GPU where torch has one)",
    )
    add_compress(run, default="none")
    run.add_argument("--no-profile", action="store_true", help="do not measure the drive before a job that reads it")
    run.add_argument("--json", action="store_true", help="one JSON document as the last line of standard output")
    cli_pipeline.add_arguments(run)
    run.set_defaults(offload_main=main)


def main(args: argparse.Namespace, **fields: Any) -> int:
    """Run the job, or be a stage of a pipeline that does. Lines that fail are counted and do not fail it. `fields` of
    LaunchOptions hold besides the command line's."""
    from flashllm.offload.launch import LaunchOptions
    from flashllm.offload.pipeline.place import Place

    place = Place.from_torchrun()
    fields |= {"memory": args.memory, "device": args.device, "compress": args.compress}
    options = LaunchOptions(**fields, processes=1 if place is None else place.local)
    if place is None:
        return _answer_file(args, options, None)
    return cli_pipeline.run(args, place, options, lambda ring: _answer_file(args, options, ring))


def _answer_file(args: argparse.Namespace, options: "LaunchOptions", ring: "Ring | None") -> int:
    from flashllm.base.progress import ProgressBar
    from flashllm.offload.jobs.lines import BatchFile
    from flashllm.offload.jobs.results import Results, check_output
    from flashllm.offload.model_text import ModelText

    check_output(args.output, source=args.input, resume=args.resume)
    with ProgressBar("convert") as bar:
        model = ModelText.load(args.model, say=say, progress=bar)
    settings = {"model": model.name, "config": model.fingerprint, **options.answers_depend_on(model.shape)}
    # The last two were options once: files that were begun then go on.
    settings |= {"max_new": args.max_new_tokens, "temperature": 0.0, "seed": 0}
    with ProgressBar("check") as bar:
        batch = BatchFile.read(
            args.input,
            model.encoder,
            max_new_tokens=args.max_new_tokens,
            settings=json.dumps(settings, sort_keys=True),
            progress=lambda done, total: bar(args.input.name, done, total),
        )
    with batch, Results.open(args.output, batch.lines, source=args.input, resume=args.resume) as results:
        if results.cut_nbytes:
            say(f"{args.output}: its last line was torn and is cut off ({format_size(results.cut_nbytes)})")
        if results.done:
            say(f"{len(results.done)} of {len(batch.lines)} lines are answered already")
        check_room(batch, results)
        task = _Task(
            options=options, model=model, batch=batch, results=results, ring=ring, profiles=not args.no_profile
        )
        return task.run(as_json=args.json)


def check_room(batch: "BatchFile", results: "Results") -> None:
    """FlashIOError where the disk cannot hold even the emptiest answers; a warning where long ones may fill it."""
    import shutil

    from flashllm.errors import FlashIOError
    from flashllm.offload.jobs.results import expected_nbytes

    done = set(results.done)
    least, most = expected_nbytes([line for index, line in enumerate(batch.lines) if index not in done])
    free = shutil.disk_usage(results.path.absolute().parent).free
    if free < least:
        raise FlashIOError(
            f"{results.path}: the answers take {format_size(least)} at least, and the disk has {format_size(free)} free"
        )
    if free < most:
        say(f"the answers may take {format_size(most)}, and the disk has {format_size(free)} free; --resume goes on")


@dataclass(slots=True, kw_only=True)
class _Task:
    """The job in its thread, and the main thread that waits for it."""

    options: "LaunchOptions"
    model: "ModelText"
    batch: "BatchFile"
    results: "Results"
    ring: "Ring | None"
    profiles: bool  # measures the drive before, where the job reads from it
    _stop: Callable[[], None] = lambda: None
    _job: "Job | None" = None
    _launch: "Launch | None" = None
    _peak_nbytes: int = 0
    _peak_device_nbytes: int | None = None  # of a GPU
    _error: BaseException | None = None

    def run(self, *, as_json: bool) -> int:
        worker = threading.Thread(target=self._work, name="offload run", daemon=True)
        worker.start()
        progress = _Progress(lambda: self._job)
        try:
            while worker.is_alive():
                worker.join(_POLL_S)
                progress.show()
        except KeyboardInterrupt:
            progress.clear()
            self._stop()
            worker.join(_PATIENCE_S)
            message = (
                f"interrupted; {self.results.num_answers} of {len(self.batch.lines)} lines are answered in "
                f"{self.results.path}: run the same command with --resume to go on"
            )
            if any(thread.daemon for thread in threading.enumerate()):
                # A load or a product takes longer than a user waits, and an interpreter that ends under a thread in
                # native code aborts. Scratch files have no names and go with the process; the output is whole, or
                # --resume cuts a torn line off.
                print(f"flashllm: {one_line(message)}", file=sys.stderr, flush=True)
                os._exit(INTERRUPTED)
            raise KeyboardInterrupt(message) from None
        progress.clear()
        if self._error is not None:
            raise self._error
        self._report(as_json=as_json)
        return 0

    def _work(self) -> None:
        try:
            self._answer()
        except BaseException as error:
            self._error = error

    def _answer(self) -> None:
        from flashllm.base.machine import peak_process_nbytes
        from flashllm.offload.jobs.job import Job
        from flashllm.offload.launch import prepare
        from flashllm.offload.runtime.run import Runner

        ring, stages = self.ring, 1 if self.ring is None else self.ring.place.world
        job = Job(self.batch, self.results, model=self.model.name, token_text=self.model.token_text)
        sizes = job.sizes
        if sizes:
            model, profiles = self.model, self.profiles and ring is None
            self._launch = prepare(
                model.path, model.shape, sizes, self.options, stages=stages, profiles=profiles, report=say
            )
        job.answer_problems()
        if (launch := self._launch) is not None:
            with (
                Runner(self.model.path, launch.policy, launch.options)
                if ring is None
                else cli_pipeline.open_pipeline(ring, self.model, launch, sizes)
            ) as runner:
                for notice in runner.notices:
                    say(notice)
                self._stop, self._job = runner.stop, job
                job.run(runner, launch.blocks)
                self._peak_device_nbytes = runner.peak_device_nbytes
        self._job = job
        self._peak_nbytes = peak_process_nbytes()

    def _report(self, *, as_json: bool) -> None:
        from flashllm.errors import FlashError
        from flashllm.offload.launch import workloads
        from flashllm.offload.planner.local import predict_job

        job, launch = self._job, self._launch
        if job is None:
            raise RuntimeError("the job ended without a word")
        totals = job.totals
        predicted: dict[str, Any] | None = None
        if launch is not None and self.ring is None:  # the model prices a process, not one of several on a machine
            try:
                blocks = workloads(job.sizes, launch.blocks)
                predicted = predict_job(self.model.shape, launch.options, launch.policy, blocks)
            except (FlashError, ValueError) as error:
                say(f"no prediction: {error}")
        document = {
            "policy": None if launch is None else launch.policy.to_json(),
            "measured": {
                **asdict(totals),
                "throughput": totals.throughput,
                "peak_rss_bytes": self._peak_nbytes,
                "peak_device_bytes": self._peak_device_nbytes,
            },
            "predicted": predicted,
            "requests": {
                "lines": len(self.batch.lines),
                "answered_now": totals.requests,
                "failed": self.results.num_failures,
            },
            "output": str(self.results.path),
        }
        if as_json:
            print_json(document)
        else:
            print("\n".join(_table(document, totals, launch)))


def _table(document: dict[str, Any], totals: "Totals", launch: "Launch | None") -> list[str]:
    from flashllm.offload.launch import describe

    requests = document["requests"]
    failed = f", {requests['failed']} of them errors" if requests["failed"] else ""
    lines = [
        f"{document['output']}: all {requests['lines']} lines are answered{failed}",
        f"  {'now':12s}{totals.requests} requests in {totals.blocks} blocks, {totals.prompt_tokens} prompt tokens, "
        f"{totals.new_tokens} new",
    ]
    if launch is None or not totals.blocks:
        return lines
    predicted = document["predicted"]
    lines.append(f"  {'policy':12s}{describe(launch.policy)}")
    lines.append(f"  {'':12s}{'measured':>34s}{'predicted':>34s}")
    for name, key, tokens in (
        ("prefill", "prefill_s", totals.prompt_tokens),
        ("decoding", "decode_s", totals.new_tokens - totals.requests),  # the prompt's pass gives the first
    ):
        cells = "".join(
            f"{_seconds(each[key], tokens):>34s}" for each in (document["measured"], predicted) if each is not None
        )
        lines.append(f"  {name:12s}{cells}")
    rates = [document["measured"]["throughput"], *([] if predicted is None else [predicted["throughput"]])]
    lines.append(f"  {'throughput':12s}" + "".join(f"{f'{rate:.4g} tokens/s':>34s}" for rate in rates))
    busy = sorted(totals.busy.items(), key=lambda item: -item[1])
    lines.append(f"  {'busy':12s}" + ", ".join(f"{name} {seconds:.3g} s" for name, seconds in busy if seconds > 0))
    lines.append(f"  {'disk':12s}{format_size(totals.bytes_read)} read, {format_size(totals.bytes_written)} written")
    peak = document["measured"]["peak_rss_bytes"]
    lines.append(f"  {'memory':12s}{format_size(peak)} at most, of {format_size(launch.limit)}")
    lines.append(f"  {'tiers':12s}{_tiers(document, accelerated=launch.options.accelerator is not None)}")
    if predicted is not None:
        lines.append(f"  {'predicted':12s}from {predicted['source']}")
    return lines


def _tiers(document: dict[str, Any], *, accelerated: bool) -> str:
    """Bytes that each tier held, as they were counted beforehand, and the cost model's figure."""
    used, predicted = document["measured"]["tiers"], document["predicted"]
    planned = None if predicted is None else predicted["tiers"]
    rows = [(name, used[name], planned and planned[name]) for name in ("device", "cpu", "disk")]
    if not accelerated:  # one memory is both tiers, and what is on disk in the model's own files is not counted
        memory = planned and planned["device"] + planned["cpu"]
        rows = [
            ("memory", used["device"] + used["cpu"], memory),
            ("scratch", used["scratch"], planned and planned["disk"]),
        ]
    return ", ".join(
        f"{name} {format_size(nbytes)}" + ("" if plan is None else f" (planned {format_size(plan)})")
        for name, nbytes, plan in rows
    )


def _seconds(seconds: float, tokens: int) -> str:
    rate = f", {tokens / seconds:.4g} tokens/s" if seconds > 0 else ""
    return f"{seconds:.4g} s{rate}"


class _Progress:
    """Lines on standard error: rewritten at a terminal, else a new one every few seconds."""

    def __init__(self, job: "Callable[[], Job | None]") -> None:
        self._job = job
        self._terminal = is_terminal(sys.stderr)
        self._shown_s = self._began_s = time.monotonic()
        self._began_share: float | None = None
        self._drawn = False

    def show(self) -> None:
        job, now = self._job(), time.monotonic()
        if job is None or not job.blocks:
            return
        if self._began_share is None:  # loading is over
            self._began_s = self._shown_s = now
            self._began_share = job.done_share
        if now - self._shown_s < (_TERMINAL_S if self._terminal else _PLAIN_S):
            return
        self._shown_s = now
        line = one_line(self._line(job, now - self._began_s))
        if self._terminal:
            sys.stderr.write(f"\r\x1b[K{line[: _width() - 1]}")
            self._drawn = True
        else:
            sys.stderr.write(f"flashllm: {line}\n")
        sys.stderr.flush()

    def clear(self) -> None:
        if self._drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def _line(self, job: "Job", seconds: float) -> str:
        tokens, share = job.done_tokens, job.done_share
        block = min(job.totals.blocks + 1, len(job.blocks))
        parts = [f"block {block} of {len(job.blocks)}", f"{share:.0%}", f"{tokens} new tokens"]
        if seconds > 0:
            parts.append(f"{tokens / seconds:.3g} tokens/s")
        if share > 0:
            parts.append(f"about {_duration(seconds * (1 - share) / share)} left")
        return ", ".join(parts)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def _width() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except OSError:
        return 80
