// The numbers of the page: read once a second, rates made here of the server's counters.
"use strict";

const PERIOD_MS = 1000;
const KEPT = 120; // two minutes of lines
const WINDOW = 10; // seconds that a rate is made over
const SVG = "http://www.w3.org/2000/svg";

const seen = [];
const byId = (id) => document.getElementById(id);
const whole = new Intl.NumberFormat("en");

function show(id, text) {
  const element = byId(id);
  // an unchanged status must not be read aloud again
  if (element.textContent !== text) element.textContent = text;
}

// what grew between a sample and the one about `WINDOW` seconds before it
function growth(index) {
  const now = seen[index];
  let first = index;
  while (first > 0 && now.seconds - seen[first - 1].seconds <= WINDOW) first -= 1;
  const then = seen[first];
  return {
    seconds: now.seconds - then.seconds,
    tokens: now.completion_tokens - then.completion_tokens,
    steps: now.verify_steps - then.verify_steps,
    committed: now.committed - then.committed,
  };
}

function throughput(index) {
  const grown = growth(index);
  return grown.seconds > 0 ? grown.tokens / grown.seconds : null;
}

function acceptance(index) {
  const grown = growth(index);
  return grown.steps > 0 ? grown.committed / grown.steps : null;
}

// a line over time; gaps where there was nothing to divide by
function draw(id, values, most) {
  const svg = byId(id);
  const top = Math.max(most, ...values.map((value) => value ?? 0)) || 1;
  const parts = [];
  let open = false;
  values.forEach((value, index) => {
    if (value === null) {
      open = false;
      return;
    }
    const x = (KEPT - values.length + index).toFixed(1);
    const y = (29 - (28 * value) / top).toFixed(2);
    parts.push(`${open ? "L" : "M"}${x} ${y}`);
    if (!open) parts.push(`L${x} ${y}`);
    open = true;
  });
  if (!svg.firstChild) {
    svg.setAttribute("viewBox", `0 0 ${KEPT} 30`);
    svg.setAttribute("preserveAspectRatio", "none");
    for (const name of ["base", "line"]) {
      const path = document.createElementNS(SVG, "path");
      path.setAttribute("class", name);
      svg.append(path);
    }
    svg.firstChild.setAttribute("d", `M0 29.5H${KEPT}`);
  }
  svg.lastChild.setAttribute("d", parts.join(""));
}

function drawDepths(state) {
  byId("depths").hidden = !state.drafts;
  const list = byId("depth-list");
  state.accepted_per_depth.forEach((count, depth) => {
    let row = list.children[depth];
    if (!row) {
      row = document.createElement("li");
      const name = document.createElement("span");
      name.textContent = String(depth + 1);
      const svg = document.createElementNS(SVG, "svg");
      svg.setAttribute("viewBox", "0 0 100 10");
      svg.setAttribute("preserveAspectRatio", "none");
      svg.setAttribute("aria-hidden", "true");
      const bar = document.createElementNS(SVG, "rect");
      bar.setAttribute("height", "10");
      svg.append(bar);
      const share = document.createElement("span");
      share.className = "share";
      row.append(name, svg, share);
      list.append(row);
    }
    const percent = state.drafts ? (100 * count) / state.drafts : 0;
    row.querySelector("rect").setAttribute("width", percent.toFixed(1));
    row.lastChild.textContent = `${percent.toFixed(1)} %`;
  });
}

function showState(state) {
  const index = seen.length - 1;
  const draft = state.draft === null ? "no draft" : `draft ${state.draft}, verified by the ${state.rule} rule`;
  show("served", `${state.model}, ${draft} (${state.device})`);
  show("health", state.not_ready ? `Not ready: ${state.not_ready}` : "");

  const length = acceptance(index);
  const ever = state.verify_steps ? (state.committed / state.verify_steps).toFixed(2) : "\u2013";
  show("acceptance-value", length === null ? "\u2013" : length.toFixed(2));
  show("acceptance-note", `tokens per target pass, last ${WINDOW} s; ${ever} since the start`);
  const rate = throughput(index);
  show("throughput-value", rate === null ? "\u2013" : rate.toFixed(1));
  show("throughput-note", `tokens/s, last ${WINDOW} s; ${whole.format(state.completion_tokens)} written in all`);
  show("kv-value", `${(100 * state.kv_usage).toFixed(1)} %`);
  const found = state.prefix_queries ? ((100 * state.prefix_hits) / state.prefix_queries).toFixed(0) : null;
  show("kv-note", found === null ? "of its blocks" : `of its blocks; ${found} % of prompt tokens found in it`);
  show("requests-value", String(state.running));
  show("requests-note", `running, ${state.waiting} waiting, room for ${whole.format(state.capacity)}`);

  const all = seen.map((_, at) => at);
  draw("acceptance-line", all.map(acceptance), state.max_depth + 1);
  draw("throughput-line", all.map(throughput), 1);
  draw("kv-line", seen.map((one) => one.kv_usage), 1);
  draw("requests-line", seen.map((one) => one.running), 1);
  drawDepths(state);
  byId("key-label").hidden = !state.needs_key;
  byId("speculate").disabled = state.draft === null;
}

async function look() {
  // a page that nobody sees asks for nothing
  if (!document.hidden) {
    try {
      const answer = await fetch("page/state");
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      const state = await answer.json();
      // another process's counters begin anew
      if (seen.length && state.seconds < seen[seen.length - 1].seconds) seen.length = 0;
      if (seen.length && state.completion_tokens < seen[seen.length - 1].completion_tokens) seen.length = 0;
      seen.push(state);
      if (seen.length > KEPT) seen.shift();
      showState(state);
    } catch {
      show("health", "The server does not answer.");
    }
  }
  setTimeout(look, PERIOD_MS);
}

look();
