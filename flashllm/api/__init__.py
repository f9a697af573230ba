"""OpenAI's interface without a transport: bodies of requests, prompts, and the forms of answers."""
