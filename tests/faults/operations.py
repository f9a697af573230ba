"""What is tried under faults: conversion, loading and generating, training, batch jobs, a server with requests.

An `Operations` lays files down under a folder; each of its methods works on them and returns what it came to, as text.
Those that go through the command line raise `CommandError` where that ends with its one line.
"""

import contextlib
import hashlib
import importlib
import json
import os
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from unittest import mock

TESTS = Path(__file__).parent.parent
BUG = "a bug in flashllm"
ON_DISK = {"wg": 0.0, "wc": 0.0, "wd": 1.0, "cg": 0.0, "cc": 0.0, "cd": 1.0, "hg": 0.0, "hc": 0.0, "hd": 1.0}
WORDS = ("The", "little", "dog", "ran", "to", "the", "big", "tree", "and", "looked", "up", "at", "red", "moon")


class CommandError(Exception):
    """A command ended as it should where it cannot do its work: status 1 or 2, and one line that says why."""


class UnforeseenError(Exception):
    """A command, or a server, ended in another way."""


def tree_hash(folder: Path) -> str:
    """Of names and bytes of a folder's files."""
    sha256 = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        sha256.update(f"{path.relative_to(folder)}\0".encode())
        if path.is_file():
            sha256.update(hashlib.sha256(path.read_bytes()).digest())
    return sha256.hexdigest()


@contextlib.contextmanager
def standard_error() -> Iterator[Callable[[], str]]:
    """What is written to descriptor 2 meanwhile."""
    before, memory = os.dup(2), os.memfd_create("stderr")
    sys.stderr.flush()
    os.dup2(memory, 2)
    try:
        yield lambda: os.pread(memory, 1 << 20, 0).decode("utf-8", "replace")
    finally:
        sys.stderr.flush()
        os.dup2(before, 2)
        os.close(before)
        os.close(memory)


def command(*words: object, program: str = "flashllm") -> None:
    """`PROGRAM WORDS` in this process: the command line, or a script of `predictors/`."""
    from flashllm.cli import main
    from flashllm.commands.predictors import scripts

    if program != "flashllm":
        main = scripts.load(program).main
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), standard_error() as said:
        status = main([str(word) for word in words])
        text = said()
    if status == 0:
        return
    last = text.splitlines()[-1] if text else ""
    if status not in (1, 2) or not last.startswith(f"{program}: error: ") or BUG in text or "Traceback" in text:
        raise UnforeseenError(f"status {status}: {text[-2000:]}")
    raise CommandError(last.removeprefix(f"{program}: error: "))


class Operations:
    """Work on files under `root`. `calm`: called once an answer is there, or refused: from then on nothing fails."""

    def __init__(self, root: Path, calm: Callable[[], None] = lambda: None) -> None:
        self.root, self.hf, self.model, self.calm = root, root / "hf", root / "model", calm
        self.without, self.training = root / "without", root / "training"  # predictors; a model that is trained
        self.right: str | None = None  # what the server must answer once nothing fails

    def lay_down(self) -> None:
        """Make the files, without faults. It takes libraries which the operations do not need."""
        sys.path.insert(0, str(TESTS))
        import predictor_files
        from tiny_models import make_tiny_opt

        from flashllm.convert.run import convert

        make_tiny_opt(self.hf)
        convert(self.hf, self.without)
        shutil.copytree(self.without, self.model)
        predictor_files.install("exact", self.hf, self.model, self.root)
        # Training and batch jobs.
        small = make_tiny_opt(self.root / "small", d_model=32, d_ff=64)
        convert(small, self.root / "bare")
        rng = random.Random(0)
        texts = (" ".join(rng.choices(WORDS, k=rng.randint(20, 80))) for _ in range(12))
        (self.root / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        lines = [{"custom_id": f"r{n}", "prompt": [5 + n, 6, 7 + n], "max_tokens": 3} for n in range(6)]
        (self.root / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def load(self, names: Iterable[str]) -> None:
        """Import what the operations `names` need, so that children need not."""
        import flashllm.cli
        import flashllm.convert.run

        if "train" in names:
            import torch

            from flashllm.commands.predictors import scripts

            importlib.import_module("torch._dynamo")  # by the first step of an optimizer, in seconds
            torch.set_num_threads(1)  # a forked child has none but its own
            scripts.load("train_predictor")
        if not {"offload", "offload run"}.isdisjoint(names):
            import flashllm.offload.cli_run
            import flashllm.offload.engine
        if "serve" in names:
            import flashllm.serve.opening
            import flashllm.serve.server
        import flashllm.engine.model
        import flashllm.format.report.verify
        import flashllm.generate.session  # noqa: F401

    def names(self) -> dict[str, Callable[[], str | Callable[[], str]]]:
        return {
            "convert": self.convert, "generate": self.generate, "verify": self.verify, "offload": self.offload,
            "offload run": self.offload_run, "train": self.train, "serve": self.serve,
        }  # fmt: skip

    def clear(self) -> None:
        """Nothing is left of the trial before."""
        for name in ("converted", "converted.partial", "scratch", "training", "training.predictors", "parked"):
            shutil.rmtree(self.root / name, ignore_errors=True)
        for path in self.root.glob("out.jsonl*"):
            path.unlink()
        shutil.copytree(self.root / "bare", self.training)

    def problem(self, name: str) -> str | None:
        """What is wrong with the files that operation `name` made; None: nothing."""
        from flashllm.format.report.verify import verify

        made = {"convert": self.root / "converted", "train": self.training}.get(name)
        if made is None:  # a batch job's lines were read already
            return None
        report = verify(made)
        return None if report.ok else "; ".join(each.message for each in report.problems)

    def convert(self) -> Callable[[], str]:
        from flashllm.convert.run import convert

        target = self.root / "converted"
        if not target.exists():  # else a run that failed at its very end has left it, and it must be whole
            convert(self.hf, target)
        return lambda: tree_hash(target)

    def generate(self) -> str:
        from flashllm.config import RunConfig
        from flashllm.engine.model import Model
        from flashllm.generate.sampling import SamplingOptions
        from flashllm.generate.session import Session
        from flashllm.generate.tokenizer import Tokenizer

        tokenizer = Tokenizer.load(self.model)
        with Model.open(self.model, RunConfig(io_threads=2, io_backend="threads", memory=2_000_000_000)) as model:
            session = Session(model, tokenizer, SamplingOptions(max_new_tokens=4, temperature=0.0))
            list(session.stream("The little dog ran to the big tree and looked up"))
            return json.dumps(list(session.tokens))

    def verify(self) -> str:
        from flashllm.format.report.verify import verify

        report = verify(self.model)
        return "ok" if report.ok else "; ".join(problem.message for problem in report.problems)

    def offload(self) -> str:
        from flashllm.offload.engine import OffloadEngine

        scratch = self.root / "scratch"
        scratch.mkdir(exist_ok=True)
        with OffloadEngine(self.hf, policy={"gpu_batch": 2, "num_batches": 1, **ON_DISK}, scratch=scratch) as engine:
            outputs = engine.generate([[5, 6, 7], list(range(5, 80))], max_new_tokens=3)
        return json.dumps([output.token_ids for output in outputs])

    def offload_run(self) -> Callable[[], str]:
        root = self.root
        from flashllm.offload import cli_run
        from flashllm.offload.policy import Policy

        policy = Policy(gpu_batch=2, num_batches=1, **ON_DISK)
        run = partial(cli_run.main, policy=policy, scratch=root / "scratch")
        with mock.patch.object(cli_run, "main", run):
            command("offload", "run", self.hf, "-i", root / "in.jsonl", "-o", root / "out.jsonl", "--resume")

        def answers() -> str:
            values = [json.loads(line) for line in (root / "out.jsonl").read_text().splitlines()]
            return json.dumps(sorted((value["custom_id"], value["text"]) for value in values))

        return answers

    def train(self) -> Callable[[], str]:
        command(self.training, "--data-files", self.root / "text.jsonl", "--samples", 12, "--tokens-per-sample", 16,
                "--epochs", 1, "--ranks", 4, "--threads", 1, "--resume", program="train_predictor")  # fmt: skip
        return lambda: tree_hash(self.training)

    def serve(self) -> str:
        """Three requests to a server that keeps one conversation in memory and parks the others."""
        from flashllm.config import RunConfig
        from flashllm.serve.opening import ServerOptions, open_app
        from flashllm.serve.server import Server, listen

        first, other = list(range(5, 75)), list(range(100, 175))
        bodies = [
            {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0}
            for prompt in (first, other, [*first, 9, 8, 7])
        ]
        options = ServerOptions(name="tiny", keep=1, parking=self.root / "parked")
        config = RunConfig(io_threads=2, io_backend="threads", memory=2_000_000_000, threads=1)
        with standard_error() as said, open_app(self.model, config, options) as (app, worker):
            sock = listen("127.0.0.1", 0)
            server = Server(app, stopping=worker.cancel_all)
            thread = threading.Thread(target=lambda: server.run(sockets=[sock]), daemon=True)
            thread.start()
            while not server.started:
                time.sleep(0.005)
            try:
                answers = [_ask(sock.getsockname()[1], body) for body in bodies]
                self.calm()
                after = [_ask(sock.getsockname()[1], body) for body in bodies]
            finally:
                server.stop()
                thread.join()
                sock.close()
            if BUG in said():
                raise UnforeseenError(said()[-2000:])
        refused = [answer for status, answer in answers if status != 200]
        if [status for status, _ in after] != [200] * 3:
            raise UnforeseenError(f"once nothing fails: {after}")
        texts = json.dumps([answer for _, answer in after])
        if self.right is not None and texts != self.right:
            raise UnforeseenError(f"once nothing fails, other answers: {texts}, not {self.right}")
        if refused:
            raise CommandError(refused[0])
        return json.dumps([answer for _, answer in answers])


def _ask(port: int, body: dict[str, Any]) -> tuple[int, str]:
    """(status, text of the answer or of the error)"""
    # No timeout: the harness notices what hangs, and not by the clock, since the machine may be stopped meanwhile.
    with contextlib.closing(HTTPConnection("127.0.0.1", port)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        value = json.loads(response.read())
    if response.status == 200:
        return 200, str(value["choices"][0]["text"])
    return response.status, str(value["error"]["message"])
