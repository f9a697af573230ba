"""Jobs of many prompts: the file of requests, each request's sequence, the file of answers. Knows no model."""
