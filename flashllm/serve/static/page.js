// The page: a conversation, kept in this tab alone, and the picture of its tokens. Text is only ever text.

import { Chart } from "./chart.js";
import { Answer, documentsOf, formatBytes } from "./events.js";

const STORED = "flashllm.conversation";
const NUMBERS = ["temperature", "top_p", "top_k", "repetition_penalty", "max_tokens", "seed"];
const $ = (id) => document.getElementById(id);

const chart = new Chart($("chart"), (line) => ($("token").textContent = line));
let messages = []; // {role, content, reasoning?, calls?, stopped?}
let running = null; // AbortController of the answer that comes now

function restore() {
  try {
    const stored = JSON.parse(sessionStorage.getItem(STORED)) ?? {};
    messages = Array.isArray(stored.messages) ? stored.messages : [];
    for (const name of ["system", "tools", ...NUMBERS]) $(name).value = stored.settings?.[name] ?? "";
  } catch {
    messages = [];
  }
  $("log").replaceChildren(...messages.map(turn));
  scroll(true);
}

/** Keeps the conversation for a reload. The API key is not kept. */
function store() {
  const settings = Object.fromEntries(["system", "tools", ...NUMBERS].map((name) => [name, $(name).value]));
  try {
    sessionStorage.setItem(STORED, JSON.stringify({ messages, settings }));
  } catch {
    // Full or forbidden: then a reload begins anew.
  }
}

function turn(message) {
  const element = document.createElement("div");
  element.className = `turn ${message.role}`;
  element.classList.toggle("stopped", Boolean(message.stopped));
  fill(element, message);
  return element;
}

/** Shows what a message says by now: its reasoning folded, its text, its calls. What is unfolded stays so. */
function fill(element, { content, reasoning = "", calls = [] }) {
  const parts = [
    ["thought", "details", reasoning],
    ["said", "span", content],
    ...calls.map(({ name, text }, index) => [`call call-${index}`, "code", `${name}(${text})`]),
  ];
  for (const [name, tag, text] of parts) {
    if (text === "") continue;
    let part = element.querySelector(`.${name.split(" ").at(-1)}`);
    if (part === null) {
      part = document.createElement(tag);
      part.className = name;
      if (tag === "details") part.append(Object.assign(document.createElement("summary"), { textContent: "Reasoning" }), "");
      element.append(part);
    }
    if (tag === "details") part.lastChild.data = text;
    else part.textContent = text;
  }
}

function scroll(always) {
  const log = $("log");
  if (always || log.scrollHeight - log.scrollTop - log.clientHeight < 120) log.scrollTop = log.scrollHeight;
}

function say(text, isError = false) {
  $("status").textContent = text;
  $("status").classList.toggle("error", isError);
}

function headers() {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

async function failure(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

function toolsOf(text) {
  try {
    return JSON.parse(text);
  } catch {
    throw new Error("The tools in Settings are not JSON.");
  }
}

function request() {
  const system = $("system").value.trim();
  const tools = $("tools").value.trim();
  const numbers = NUMBERS.filter((name) => $(name).value !== "").map((name) => [name, Number($(name).value)]);
  return JSON.stringify({
    messages: [
      ...(system ? [{ role: "system", content: system }] : []),
      ...messages.slice(0, -1).map(({ role, content }) => ({ role, content })),
    ],
    stream: true,
    stream_options: { include_usage: true, include_timings: true },
    return_progress: true,
    ...(tools && { tools: toolsOf(tools) }),
    ...Object.fromEntries(numbers),
  });
}

async function ask(text) {
  const reply = { role: "assistant", content: "" };
  messages.push({ role: "user", content: text }, reply);
  const element = turn(reply);
  $("log").append(turn(messages.at(-2)), element);
  scroll(true);
  const answer = new Answer();
  running = new AbortController();
  busy(true);
  say("The prompt is being read.");
  try {
    const options = { method: "POST", headers: headers(), body: request(), signal: running.signal };
    const response = await fetch("v1/chat/completions", options);
    if (!response.ok) throw new Error(await failure(response));
    for await (const document of documentsOf(response.body)) {
      answer.take(document);
      Object.assign(reply, { content: answer.text, reasoning: answer.reasoning, calls: answer.calls });
      fill(element, reply);
      if (answer.prompt !== null) say("");
      else if (answer.progress !== null) say(`The prompt is being read: ${answer.progress.processed} of ${answer.progress.total} tokens.`);
      show(answer);
      scroll(false);
    }
    if (answer.error !== null) throw new Error(answer.error);
    if (answer.finish === null) throw new Error("the connection was lost");
    if (answer.finish === "length") say("The answer reached its most tokens, or the end of the context.");
  } catch (error) {
    reply.stopped = true;
    if (error.name === "AbortError") say("");
    else say(error instanceof TypeError ? "The server does not answer." : error.message, true); // of fetch, in its words
  } finally {
    element.classList.toggle("stopped", Boolean(reply.stopped));
    if (reply.content === "" && !reply.calls?.length && reply.stopped) {
      messages.splice(-2);
      element.previousElementSibling.remove();
      element.remove();
      $("text").value ||= text; // nothing was answered: the question can be sent again
    }
    running = null;
    busy(false);
    store();
    show(answer);
  }
}

function show(answer) {
  const { prompt, summary, last } = answer;
  chart.draw(answer.tokens);
  if (prompt !== null) {
    $("prompt").textContent = `${prompt.prompt_tokens} new tokens, ${prompt.cached_tokens} kept from before`;
    if (answer.tokens.length > 0) $("first").textContent = `${Math.round(prompt.total_ms + answer.tokens[0].total_ms)} ms`;
  }
  if (summary !== null) {
    $("speed").textContent = `${summary.tokensPerSecond.toFixed(1)} tokens/s`;
    $("hits").textContent = summary.hitRate === null ? "–" : `${(100 * summary.hitRate).toFixed(1)} %`;
    $("read").textContent = formatBytes(summary.bytesPerToken);
  }
  if (last !== null) {
    $("memory").textContent = `${formatBytes(last.memory_bytes)} of ${formatBytes(last.memory_limit_bytes)}`;
    $("meter").value = last.memory_bytes / last.memory_limit_bytes;
  }
}

function busy(on) {
  $("send").hidden = on;
  $("stop").hidden = !on;
  $("new").disabled = on;
}

async function introduce() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (response.status === 401) say("The server asks for an API key: see Settings.", true);
    if (!response.ok) return;
    const [model] = (await response.json()).data;
    $("model").textContent = `${model.id}, ${model.context_length} tokens of context`;
    if ($("status").classList.contains("error")) say("");
  } catch {
    say("The server does not answer.", true);
  }
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("text").value.trim();
  if (text === "" || running !== null) return;
  $("text").value = "";
  ask(text);
});
$("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("ask").requestSubmit();
});
$("stop").addEventListener("click", () => running?.abort());
$("new").addEventListener("click", () => {
  messages = [];
  $("log").replaceChildren();
  say("");
  store();
});
addEventListener("pagehide", () => {
  if (running === null) return;
  messages.at(-1).stopped = true;
  store();
});
$("key").addEventListener("change", introduce);
for (const name of ["system", "tools", ...NUMBERS]) $(name).addEventListener("change", store);

restore();
introduce();
