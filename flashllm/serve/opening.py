"""From a model directory to the application that serves it: model, worker, endpoints, closed in turn at the end."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from starlette.applications import Starlette

from flashllm.api.pieces import Pieces
from flashllm.api.prompts import PromptEncoder
from flashllm.base.command_line import say, say_bug
from flashllm.base.machine import process_nbytes
from flashllm.config import MOST_TOGETHER, RunConfig
from flashllm.engine.model import Model
from flashllm.errors import BudgetError
from flashllm.generate.grammar import Grammars
from flashllm.generate.opening import opened_model
from flashllm.generate.sampling import SamplingOptions
from flashllm.generate.speculation import Speculation
from flashllm.generate.templates.chat_template import ChatTemplate
from flashllm.generate.tokenizer import Tokenizer
from flashllm.parked.file import identity
from flashllm.parked.folder import ParkingFolder
from flashllm.replies.formats import find
from flashllm.serve.app import Api, Served, make_app
from flashllm.serve.dialects.anthropic import Anthropic
from flashllm.serve.dialects.ollama import Ollama
from flashllm.serve.dialects.responses import Responses
from flashllm.serve.dialects.tokens import Tokens
from flashllm.serve.metrics import Metrics
from flashllm.serve.worker import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How a model is served."""

    name: str | None = None  # of the model; None: its hub id or its directory's name
    max_waiting: int = 32  # requests besides those that are answered
    parallel: int | None = None  # requests that are answered at once; None: as many as the memory plan has room for
    keep: int | None = None  # bytes of conversations in memory; None: as the model's plan says
    key: bytes | None = None  # that clients must send; None: none
    hosts: frozenset[str] | None = None  # names that the server goes by, besides addresses; None: any
    origins: frozenset[str] = frozenset()  # whose pages may use it
    parking: Path | None = None  # folder of the conversations that leave memory; None: they are forgotten
    parking_nbytes: int = 4 * 10**9  # that the folder may hold
    parking_daily_nbytes: int = 16 * 10**9  # that may be written into it a day
    tool_format: str | None = None  # in which the model writes reasoning and calls; None: as its files say
    defaults: SamplingOptions = dataclasses.field(default_factory=SamplingOptions)  # of requests that do not say

    def __post_init__(self) -> None:
        """UsageError for a tool format that there is not."""
        if self.tool_format is not None:
            find("", self.tool_format)


@contextmanager
def open_app(
    path: Path, config: RunConfig, options: ServerOptions, *, explain: Callable[[str], None] = lambda line: None
) -> Iterator[tuple[Starlette, Worker]]:
    """The application over the model directory `path`, and its worker. `explain` hears why the model is run as it is.
    Raises what `Model.open` raises."""
    tokenizer = Tokenizer.load(path)
    with opened_model(path, config, tokenizer, explain=explain) as (model, template, speculation):
        if template is None:
            say("no chat template: the model continues a conversation as one text")
        if options.name is None:
            options = dataclasses.replace(options, name=_name(path, model))
        limit = model.plan.memory.limit_nbytes
        parking = None
        if options.parking is not None:
            parking = ParkingFolder(
                options.parking,
                identity(path, model.arithmetic),
                max_nbytes=options.parking_nbytes,
                daily_nbytes=options.parking_daily_nbytes,
            )
        with app_of(
            model, tokenizer, template, options, limit=limit, speculation=speculation, parking=parking
        ) as opened:
            yield opened


@contextmanager
def app_of(
    model: Model,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    options: ServerOptions,
    *,
    limit: int,
    speculation: Speculation | None = None,
    parking: ParkingFolder | None = None,
) -> Iterator[tuple[Starlette, Worker]]:
    """The application over a loaded model. `limit`: bytes that the process may hold, to be told to clients."""
    keep = model.plan.memory.kept_nbytes if options.keep is None else options.keep

    def make_room(nbytes: int) -> None:
        """Let the model do without `nbytes` more. Conversations that are kept go before a request is refused."""
        while True:
            try:
                return model.keep_to(model.memory_limit - nbytes)
            except BudgetError:
                if not worker.make_room():
                    raise

    served = Served(
        name=options.name or "model",
        encoder=PromptEncoder(
            tokenizer=tokenizer,
            template=template,
            pieces=Pieces(tokenizer.backend),
            context=model.context,
            vocab=model.vocab_size,
            answers=find(tokenizer.says_of_answers, options.tool_format),
            grammars=Grammars(tokenizer.backend, tokenizer.end_ids, model.vocab_size, make_room=make_room),
            shares=keep > 0,
            plain_chat=True,
        ),
        tokenizer=tokenizer,
        nbytes=sum(entry.nbytes for entry in model.manifest.files.values()),
        defaults=options.defaults,
        memory=lambda: {"used": process_nbytes(), "limit": limit},
    )
    metrics = Metrics(
        waiting=lambda: worker.waiting, kept=lambda: worker.kept, memory=process_nbytes, memory_limit=limit
    )
    with Worker(
        model,
        tokenizer,
        max_waiting=options.max_waiting,
        keep=keep,
        parallel=options.parallel or MOST_TOGETHER,
        together=model.plan.memory.shared_tokens if options.parallel is None else None,
        on_event=metrics.see,
        speculation=speculation,
        parking=parking,
    ) as worker:
        api = Api(served, worker, metrics)
        app = make_app(
            [*api.routes(), *(route for one in (Responses, Anthropic, Ollama, Tokens) for route in one(api).routes())],
            metrics,
            key=options.key,
            hosts=options.hosts,
            origins=options.origins,
            report=say_bug,
        )
        yield app, worker


def _name(path: Path, model: Model) -> str:
    """A hub id where the model came from there, else its directory's name."""
    source = model.manifest.source.name
    return source if "/" in source else path.resolve().name
