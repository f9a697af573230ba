"""`flashllm serve`: OpenAI's interface over HTTP, one model, one answer at a time. Needs the extra `serve`."""
