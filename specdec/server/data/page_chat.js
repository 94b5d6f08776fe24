// The chat: one request a turn through the API, every token of the answer marked by how it came.
// Texts reach the page as text nodes only. Seeds in responses may be larger than 2^53 and are not read.
"use strict";

const KINDS = ["accepted", "recovered", "bonus", "plain"];
const messages = [];
let running = null;

const element = (id) => document.getElementById(id);

function say(text) {
  element("said").textContent = text;
}

function addTurn(role, name) {
  element("empty")?.remove();
  const turn = document.createElement("article");
  turn.className = `turn ${role}`;
  const head = document.createElement("h3");
  head.textContent = name;
  const text = document.createElement("div");
  text.className = "text";
  const counts = document.createElement("p");
  counts.className = "counts";
  turn.append(head, text, counts);
  element("log").append(turn);
  return { turn, text, counts };
}

// the end stays in sight, unless the reader has scrolled up
function following(change) {
  const log = element("log");
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 48;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

function addTokens(answer, entries) {
  for (const entry of entries) {
    const kind = KINDS.includes(entry.kind) ? entry.kind : "plain";
    answer.kinds[kind] += 1;
    if (!entry.text) continue;
    const span = document.createElement("span");
    span.className = `token ${kind}`;
    span.title = kind;
    span.textContent = entry.text;
    answer.text.append(span);
  }
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    // lines end at line feeds alone
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function problemOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered with status ${response.status}`;
  }
}

function request() {
  const speculate = element("speculate");
  const headers = { "content-type": "application/json" };
  if (element("key").value) headers.authorization = `Bearer ${element("key").value}`;
  const speculative = { token_kinds: true };
  if (!speculate.disabled) speculative.enabled = speculate.checked;
  const body = {
    messages,
    speculative,
    stream: true,
    stream_options: { include_usage: true },
    temperature: Number(element("temperature").value),
    max_tokens: Number(element("max-tokens").value),
  };
  return { method: "POST", headers, body: JSON.stringify(body) };
}

function summary(answer) {
  const parts = KINDS.filter((kind) => answer.kinds[kind]).map((kind) => `${answer.kinds[kind]} ${kind}`);
  const total = KINDS.reduce((sum, kind) => sum + answer.kinds[kind], 0);
  if (!total) return "";
  const length = answer.metrics?.mean_acceptance_length;
  const each = length ? `; ${length.toFixed(2)} tokens per target pass` : "";
  const cut = answer.reason === "length" ? "; ended at the limit of tokens" : "";
  return `${total} tokens: ${parts.join(", ")}${each}${cut}`;
}

function setRunning(controller) {
  running = controller;
  element("send").disabled = controller !== null;
  element("clear").disabled = controller !== null;
  element("stop").disabled = controller === null;
  // a screen reader reads an answer when it is whole
  element("log").setAttribute("aria-busy", String(controller !== null));
}

async function readAnswer(answer, signal) {
  const response = await fetch("v1/chat/completions", { ...request(), signal });
  if (!response.ok) throw new Error(await problemOf(response));
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    if (event.metrics) answer.metrics = event.metrics.speculative_decoding;
    const choice = event.choices?.[0];
    if (!choice) continue;
    answer.content += choice.delta?.content ?? "";
    if (choice.finish_reason) answer.reason = choice.finish_reason;
    following(() => addTokens(answer, choice.token_kinds ?? []));
  }
}

async function send() {
  const prompt = element("prompt").value;
  if (running || !prompt.trim()) return;
  const asked = addTurn("user", "You");
  asked.text.textContent = prompt;
  messages.push({ role: "user", content: prompt });
  element("prompt").value = "";
  const answer = { ...addTurn("assistant", "Model"), content: "", kinds: {}, metrics: null, reason: null };
  for (const kind of KINDS) answer.kinds[kind] = 0;
  element("log").scrollTop = element("log").scrollHeight;
  const controller = new AbortController();
  setRunning(controller);
  say("Answering");
  let ending = "The answer is complete.";
  try {
    await readAnswer(answer, controller.signal);
  } catch (error) {
    const stopped = controller.signal.aborted;
    ending = stopped ? "Stopped." : `No answer: ${error.message}`;
    if (!stopped) following(() => {
      const line = document.createElement("p");
      line.className = "error";
      line.textContent = ending;
      answer.turn.append(line);
    });
  }
  if (answer.content) {
    messages.push({ role: "assistant", content: answer.content });
  } else if (ending !== "The answer is complete.") {
    // a question without an answer is asked again, not kept
    messages.pop();
    element("prompt").value ||= prompt;
  }
  following(() => {
    answer.counts.textContent = summary(answer);
  });
  setRunning(null);
  say(ending);
  element("prompt").focus();
}

element("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
element("prompt").addEventListener("keydown", (event) => {
  // an input method's Enter chooses a word
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    element("ask").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.abort();
});
element("stop").addEventListener("click", () => running?.abort());
element("clear").addEventListener("click", () => {
  messages.length = 0;
  element("log").replaceChildren();
  say("A new chat.");
  element("prompt").focus();
});
