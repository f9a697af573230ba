// Server-sent events to documents, and an answer's documents to what the page shows. Knows no page and no network.

/** Takes the text of an event stream in pieces of any size; gives the documents that are whole. */
export class EventParser {
  #rest = "";
  done = false; // [DONE] was seen

  /** The documents that `text` completes. Throws SyntaxError for one that is not JSON. */
  push(text) {
    const documents = [];
    this.#rest += text;
    let end;
    while ((end = this.#rest.indexOf("\n")) >= 0) {
      const line = this.#rest.slice(0, end).replace(/\r$/, "");
      this.#rest = this.#rest.slice(end + 1);
      if (!line.startsWith("data:")) continue; // comments, blank lines, other fields
      const data = line.slice(5).trimStart();
      if (data === "[DONE]") this.done = true;
      else documents.push(JSON.parse(data));
    }
    return documents;
  }
}

/** The documents of a response's body (a ReadableStream of bytes), as they come. */
export async function* documentsOf(body) {
  const parser = new EventParser();
  const decoder = new TextDecoder();
  const reader = body.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      yield* parser.push(done ? decoder.decode() + "\n" : decoder.decode(value, { stream: true }));
      if (done || parser.done) return;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** What the documents of one answer add up to. */
export class Answer {
  text = "";
  reasoning = "";
  calls = []; // of tools, each {name, text}: its arguments as they come
  finish = null; // why it ended
  error = null; // a message
  progress = null; // of the prompt: {total, cache, processed, time_ms}
  prompt = null; // timings of the prompt
  tokens = []; // timings, one a token
  usage = null;

  take(document) {
    if (document.error) {
      this.error = String(document.error.message);
      return;
    }
    if (document.usage) this.usage = document.usage;
    this.progress = document.prompt_progress ?? this.progress;
    for (const choice of document.choices ?? []) {
      this.text += choice.delta?.content ?? "";
      this.reasoning += choice.delta?.reasoning_content ?? "";
      for (const { index, function: said } of choice.delta?.tool_calls ?? []) {
        this.calls[index] ??= { name: said.name, text: "" };
        this.calls[index].text += said.arguments;
      }
      this.finish = choice.finish_reason ?? this.finish;
    }
    if (document.timings === undefined) return;
    if (this.prompt === null) this.prompt = document.timings;
    else this.tokens.push(document.timings);
  }

  /** Timings of the newest record; null before the first. */
  get last() {
    return this.tokens.at(-1) ?? this.prompt;
  }

  /** Sums over the tokens after the first, whose pass is the prompt's; null before there is one. */
  get summary() {
    const later = this.tokens.slice(1);
    if (later.length === 0) return null;
    const sum = (name) => later.reduce((total, each) => total + each[name], 0);
    const wanted = sum("hits") + sum("misses");
    return {
      tokensPerSecond: (later.length * 1000) / sum("total_ms"),
      hitRate: wanted > 0 ? sum("hits") / wanted : null,
      bytesPerToken: sum("bytes_read") / later.length,
    };
  }
}

/** A number of bytes for a person. */
export function formatBytes(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (bytes >= 999.5 && at < units.length - 1) {
    bytes /= 1000;
    at += 1;
  }
  return `${at === 0 || bytes >= 100 ? Math.round(bytes) : bytes.toPrecision(bytes >= 10 ? 3 : 2)} ${units[at]}`;
}
