// What the page makes of an event stream: `node --test`, also run by test_page.py.

import assert from "node:assert/strict";
import { test } from "node:test";
import { Answer, EventParser, documentsOf, formatBytes } from "../../flashllm/serve/static/events.js";

const chunk = (content, more = {}) => ({ choices: [{ delta: { content }, finish_reason: null }], ...more });
const timing = (total_ms, hits = 0, misses = 0, bytes_read = 0) => ({ total_ms, hits, misses, bytes_read });
const line = (document) => `data: ${JSON.stringify(document)}\n\n`;

function streamOf(...pieces) {
  return new ReadableStream({
    start(controller) {
      for (const piece of pieces) controller.enqueue(piece);
      controller.close();
    },
  });
}

test("documents come whole however the stream is cut", () => {
  const documents = [chunk("a\nb"), chunk("é🐕"), chunk('"}')];
  const text = `: still at work\n\n${documents.map(line).join("")}event: x\nid: 3\n\ndata: [DONE]\n\n`;
  for (let size = 1; size < 40; size++) {
    const parser = new EventParser();
    const found = [];
    for (let at = 0; at < text.length; at += size) found.push(...parser.push(text.slice(at, at + size)));
    assert.deepEqual(found, documents);
    assert.equal(parser.done, true);
  }
});

test("line ends of other systems, and data without a space", () => {
  assert.deepEqual(new EventParser().push('data:{"a":1}\r\n\r\ndata: {"b":2}\n'), [{ a: 1 }, { b: 2 }]);
});

test("what is no JSON is an error", () => {
  assert.throws(() => new EventParser().push("data: {oops\n"), SyntaxError);
});

test("characters cut between two pieces of the body stay whole", async () => {
  const bytes = new TextEncoder().encode(line(chunk("é🐕")) + "data: [DONE]\n\n");
  for (let cut = 0; cut < bytes.length; cut++) {
    const found = [];
    for await (const each of documentsOf(streamOf(bytes.slice(0, cut), bytes.slice(cut)))) found.push(each);
    assert.deepEqual(found, [chunk("é🐕")]);
  }
});

test("a stream that breaks off gives what came", async () => {
  const bytes = new TextEncoder().encode(line(chunk("a")) + 'data: {"choices": []}');
  const found = [];
  for await (const each of documentsOf(streamOf(bytes))) found.push(each);
  assert.deepEqual(found, [chunk("a"), { choices: [] }]);
});

test("an answer adds up", () => {
  const answer = new Answer();
  assert.equal(answer.last, null);
  answer.take({ choices: [{ delta: { role: "assistant", content: "" } }], timings: timing(100) });
  assert.equal(answer.summary, null);
  answer.take({ choices: [{ delta: { reasoning_content: "So" } }] });
  answer.take(chunk("The", { timings: timing(1) }));
  answer.take(chunk(" dog", { timings: timing(10, 3, 1, 1000) }));
  answer.take(chunk("", { timings: timing(30, 1, 3, 3000) }));
  answer.take({ choices: [{ delta: {}, finish_reason: "stop" }] });
  answer.take({ choices: [], usage: { completion_tokens: 3 } });
  assert.equal(answer.text, "The dog");
  assert.equal(answer.reasoning, "So");
  assert.equal(answer.finish, "stop");
  assert.equal(answer.tokens.length, 3);
  assert.deepEqual(answer.summary, { tokensPerSecond: 50, hitRate: 0.5, bytesPerToken: 2000 });
  assert.equal(answer.usage.completion_tokens, 3);
});

test("an error in the stream is kept", () => {
  const answer = new Answer();
  answer.take({ error: { message: "the server is stopping" } });
  assert.equal(answer.error, "the server is stopping");
});

test("bytes for people", () => {
  const shown = [0, 999, 999.6, 1500, 99950, 123456, 7e9].map(formatBytes);
  assert.deepEqual(shown, ["0 B", "999 B", "1.0 kB", "1.5 kB", "100 kB", "123 kB", "7.0 GB"]);
});

test("calls add up from their pieces", () => {
  const answer = new Answer();
  const piece = (index, said) => ({ choices: [{ delta: { tool_calls: [{ index, function: said }] } }] });
  answer.take(piece(0, { name: "now", arguments: "" }));
  for (const part of ["{", "}"]) answer.take(piece(0, { arguments: part }));
  answer.take(piece(1, { name: "write", arguments: "{}" }));
  assert.deepEqual(answer.calls, [{ name: "now", text: "{}" }, { name: "write", text: "{}" }]);
});
