// The page of draftwood serve: a chat over the same routes that every client has, and the trees of its steps.
"use strict";
const by = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const MOST_BARS = 60;
let messages = [];
let abort = null;

function headers() {
  const key = by("key").value.trim();
  return { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
}

function state(text) {
  if (by("state").textContent !== text) by("state").textContent = text;  // what is set is read aloud
}

async function models() {
  const answer = await fetch("v1/models", { headers: headers() });
  if (answer.status === 401) {
    by("key-label").hidden = false;
    state("this server asks for a key");
    return;
  }
  if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
  const chosen = by("model").value;
  const names = (await answer.json()).data.map((model) => model.id);
  by("model").replaceChildren(...names.map((name) => new Option(name)));
  if (names.includes(chosen)) by("model").value = chosen;
  state("ready");
}

async function occupancy() {
  try {
    const found = await (await fetch("health")).json();
    const model = found.models[by("model").value] ?? Object.values(found.models)[0];
    by("occupancy").textContent = `${model.running}, ${model.waiting}`;
    if (found.status !== "ok") state(found.status);
    else if (by("model").options.length) state(abort ? "answering" : "ready");
    else if (!by("key").value) await models();
  } catch {
    state("the server does not answer");
  }
}

function line(who, cls) {
  const item = document.createElement("li");
  const name = Object.assign(document.createElement("span"), { className: "who", textContent: who });
  const text = Object.assign(document.createElement("span"), { className: cls ?? "" });
  item.append(name, text);
  return { item, text };
}

function show(item) {
  by("log").append(item);
  by("log").scrollTop = by("log").scrollHeight;
}

// Server-sent events of one answer, as objects.
async function* events(body, signal) {
  const answer = await fetch("v1/chat/completions", { method: "POST", headers: headers(), body: JSON.stringify(body), signal });
  if (!answer.ok) throw new Error((await answer.json().catch(() => null))?.error?.message ?? `the server answers ${answer.status}`);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

// Decodes one answer; returns its text and how many tokens a second it had. An error has the text that was there.
async function answer(asked, policy, sampling, target, signal, onStep) {
  const body = { model: by("model").value, messages: asked, stream: true, stream_options: { include_usage: true },
    draftwood: { policy, steps: Boolean(onStep) }, ...sampling };
  let text = "", reasoning = "", began = 0, usage = null;
  try {
    for await (const event of events(body, signal)) {
      const delta = event.choices[0]?.delta;
      if (delta?.content || delta?.reasoning_content) {
        began ||= performance.now();
        reasoning += delta.reasoning_content ?? "";
        text += delta.content ?? "";
        target.textContent = reasoning && text ? `${reasoning}\n\n${text}` : reasoning + text;
        by("log").scrollTop = by("log").scrollHeight;
      }
      if (onStep) for (const step of event.draftwood ?? []) onStep(step);
      usage = event.usage ?? usage;
    }
  } catch (error) {
    throw Object.assign(error, { text });
  }
  const seconds = (performance.now() - began) / 1000;
  return { text, reasoning, usage, rate: began && usage && seconds > 0 ? (usage.completion_tokens - 1) / seconds : 0 };
}

function watcher() {
  const gained = [];
  let tokens = 0, ms = 0;
  return (step) => {
    gained.push(step.accepted.length);
    tokens += step.accepted.length;
    ms += step.ms;
    by("accept").textContent = (tokens / gained.length).toFixed(2);
    by("rate").textContent = ((tokens / ms) * 1000).toFixed(0);
    by("gear").textContent = step.gear;
    drawTree(step);
    drawBars(gained.slice(-MOST_BARS));
  };
}

function make(name, attributes, parent) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  parent.append(made);
  return made;
}

const shown = (text) => {
  const plain = [...(text.replaceAll("\n", "⏎").replaceAll(" ", "␣") || "∅")];
  return plain.length > 9 ? `${plain.slice(0, 8).join("")}…` : plain.join("");
};

// Rows by depth from left to right; a leaf has a line of its own, a parent stands level with its first child.
function layout(parents) {
  const children = parents.map(() => []);
  parents.forEach((parent, row) => row && children[parent].push(row));
  const at = parents.map(() => ({ x: 0, y: 0 }));
  let lines = 0;
  const place = (row, depth) => {
    at[row].x = depth;
    children[row].forEach((child) => place(child, depth + 1));
    at[row].y = children[row].length ? at[children[row][0]].y : lines++;
  };
  place(0, 0);
  return { at, lines, depth: Math.max(...at.map((one) => one.x)) };
}

function drawTree(step) {
  const parents = [...step.parents], tokens = [...step.tokens], last = step.accepted.at(-1);
  const bonus = parents.length;
  parents.push(last);
  tokens.push(step.bonus);
  const { at, lines, depth } = layout(parents), lit = new Set(step.accepted);
  const wide = 98, high = 34, x = (row) => at[row].x * wide + 50, y = (row) => at[row].y * high + 22;
  const tree = by("tree");
  tree.replaceChildren();
  tree.setAttribute("width", (depth + 1) * wide + 4);
  tree.setAttribute("height", Math.max(lines * high + 10, 224));
  parents.forEach((parent, row) => {
    if (!row) return;
    const on = lit.has(row) || row === bonus ? " lit" : "";
    const half = (x(row) + x(parent)) / 2;
    make("path", { class: `edge${on}`, d: `M${x(parent) + 40} ${y(parent)}C${half} ${y(parent)} ${half} ${y(row)} ${x(row) - 40} ${y(row)}` }, tree);
  });
  parents.forEach((_, row) => {
    const group = make("g", { class: row === bonus ? "bonus" : lit.has(row) ? "lit" : "" }, tree);
    make("rect", { x: x(row) - 40, y: y(row) - 13, width: 80, height: 26, rx: 6 }, group);
    make("text", { x: x(row), y: y(row) }, group).textContent = shown(tokens[row]);
  });
  const kept = step.accepted.slice(1).map((row) => step.tokens[row]).join("");
  by("tree-text").textContent =
    `${step.parents.length - 1} drafted, ${step.accepted.length - 1} kept${kept ? ` (${shown(kept)})` : ""}; dashed: the model's own next token. ${step.ms.toFixed(1)} ms`;
}

function drawBars(gained) {
  const most = Math.max(...gained, 4), wide = 300 / MOST_BARS;
  by("bars").replaceChildren();
  gained.forEach((tokens, at) => {
    const height = (tokens / most) * 58;
    const x = 300 - (gained.length - at) * wide;
    make("rect", { x, y: 60 - height, width: wide * 0.8, height }, by("bars"));
  });
}

async function send() {
  const prompt = by("prompt").value.trim(), chat = messages;  // "New chat" begins another one meanwhile
  if (!prompt || abort) return;
  abort = new AbortController();
  busy(true);
  by("prompt").value = "";
  const mine = line("you");
  mine.text.textContent = prompt;
  show(mine.item);
  chat.push({ role: "user", content: prompt });
  const sampling = { temperature: Number(by("temperature").value), max_tokens: Number(by("tokens").value),
    seed: Math.floor(Math.random() * 2 ** 31) };
  const pair = Object.assign(document.createElement("div"), { className: "pair" });
  const item = document.createElement("li");
  item.append(pair);
  show(item);
  const drafted = line("with drafts"), besides = by("plain").checked ? line("plain") : null;
  const wrap = (one) => { const box = document.createElement("div"); box.append(...one.item.childNodes); pair.append(box); };
  wrap(drafted);
  if (besides) wrap(besides);
  by("same").textContent = "";
  by("plain-rate").textContent = "–";
  try {
    // One after the other: side by side they would slow each other down.
    const asked = [...chat];
    const first = await answer(asked, "adaptive", sampling, drafted.text, abort.signal, watcher());
    by("rate").textContent = first.rate.toFixed(0);
    chat.push({ role: "assistant", content: first.text });
    if (besides) {
      const second = await answer(asked, "plain", sampling, besides.text, abort.signal, null);
      by("plain-rate").textContent = second.rate.toFixed(0);
      by("same").textContent = second.text === first.text && second.reasoning === first.reasoning ? "Both texts are the same." : "The texts differ.";
    }
  } catch (error) {
    // What is shown of an answer stays in the conversation; a message without an answer does not.
    if (chat.at(-1).role === "user" && error.text) chat.push({ role: "assistant", content: error.text });
    else if (chat.at(-1).role === "user") chat.pop();
    const told = line("server", "error");
    told.text.textContent = error.name === "AbortError" ? "stopped" : error.message;
    if (chat === messages) show(told.item);
  }
  abort = null;
  state("ready");
  busy(false);
}

function busy(on) {
  by("log").setAttribute("aria-busy", on);
  by("send").disabled = on;
  by("stop").disabled = !on;
  if (on) state("answering");
  else by("prompt").focus();
}

by("ask").addEventListener("submit", (event) => { event.preventDefault(); send(); });
by("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
by("stop").addEventListener("click", () => abort?.abort());
by("new").addEventListener("click", () => { abort?.abort(); messages = []; by("log").replaceChildren(); by("prompt").focus(); });
by("key").addEventListener("change", () => models().catch((error) => state(error.message)));
models().catch(() => state("the server does not answer"));
setInterval(occupancy, 1000);
