"""Prompts as tokens, for clients that count or cut them: /tokenize, /detokenize, /apply-template. No answer is made."""

from collections.abc import Callable
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from flashllm.api.fields import check_names
from flashllm.api.prompts import Unanswerable
from flashllm.api.requests import Request, parse_body
from flashllm.errors import FlashError
from flashllm.generate.sampling import SamplingOptions
from flashllm.serve.app import Api
from flashllm.serve.bodies import Asked, Kind, parse_object

_CHAT = frozenset(("messages", "tools", "chat_template_kwargs", "reasoning_effort"))
_PROMPTS = {"content": "prompt", "prompt": "prompt", "tokens": "prompt"}  # as clients name it -> as a completion does


class Tokens:
    """The endpoints, over those of completions and chat completions."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def routes(self) -> list[Route]:
        return [
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/apply-template", self.apply_template, methods=["POST"]),
        ]

    async def tokenize(self, request: HttpRequest) -> Response:
        """The token ids of a text, or of a conversation, as a request for an answer would have them."""
        ids, _ = await self._prompt(request, {"content", "prompt", *_CHAT}, lambda asked: "")
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": self._api.served.encoder.context})

    async def detokenize(self, request: HttpRequest) -> Response:
        ids, _ = await self._prompt(request, {"tokens"}, lambda asked: "")
        text = self._api.served.tokenizer.decode(ids)
        return JSONResponse({"content": text, "prompt": text})

    async def apply_template(self, request: HttpRequest) -> Response:
        """A conversation as the model's chat template writes it."""
        _, text = await self._prompt(request, _CHAT, self._api.served.encoder.conversation)
        return JSONResponse({"prompt": text})

    async def _prompt(
        self, request: HttpRequest, fields: "set[str] | frozenset[str]", tell: Callable[[Request], str]
    ) -> tuple[list[int], str]:
        """The ids of what the body has in some of `fields`, and what `tell` makes of its request."""
        told: list[str] = []

        def understand(raw: bytes, defaults: SamplingOptions) -> Asked:
            body: dict[str, Any] = parse_object(raw)
            model = body.pop("model", None)
            check_names(body, fields)
            named = {_PROMPTS.get(name, name): value for name, value in body.items()}
            kind: Kind = "chat" if fields == _CHAT or "messages" in named else "completion"
            asked = parse_body(named, kind, custom_id="tokens", defaults=defaults)
            try:
                told.append(tell(asked))
            except FlashError as error:
                raise Unanswerable(str(error)) from None
            return Asked.chat(asked, stream=False, model=None if model is None else str(model))

        _, [(_, ids)], _ = await self._api.understood(request, "chat", understand)
        return ids, told[0]
