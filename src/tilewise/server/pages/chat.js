// The chat page: conversations in this browser's storage, answers as they are written.

import { $, Refused, ask, element, model, setKey } from "./server.js";

const STORE = "tilewise.conversations";
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const REASONING = ["reasoning_content", "reasoning"];

let conversations = read();
let current = null;
let name = "";
let running = null; // AbortController of the answer in progress

// ---- storage -------------------------------------------------------------------------------------------

function read() {
  try {
    const stored = JSON.parse(localStorage.getItem(STORE) || "[]");
    return Array.isArray(stored) ? stored.filter((one) => Array.isArray(one.messages)) : [];
  } catch {
    return [];
  }
}

function keep() {
  try {
    localStorage.setItem(STORE, JSON.stringify(conversations));
  } catch {
    tell("This browser cannot store more conversations: delete some.");
  }
}

function tell(text) {
  $("problem").textContent = text;
  $("problem").hidden = !text;
}

// ---- conversations ---------------------------------------------------------------------------------------

function begin() {
  if (current && !current.messages.length) return show(current);
  const made = { id: crypto.getRandomValues(new Uint32Array(2)).join("-"), title: "", messages: [] };
  conversations.unshift(made);
  show(made);
}

function show(conversation) {
  stop();
  tell("");
  current = conversation;
  $("speed").textContent = "";
  $("messages").replaceChildren(...current.messages.map((message, place) => drawn(message, place)));
  list();
  bottom();
  $("prompt").focus();
}

function list() {
  const rows = conversations.map((one) => {
    const row = element("li");
    const open = element("button", one.title || "New conversation");
    open.type = "button";
    open.setAttribute("aria-current", one === current ? "true" : "false");
    open.onclick = () => (show(one), fold(false));
    const remove = element("button", "✕");
    remove.type = "button";
    remove.setAttribute("aria-label", `Delete ${one.title || "New conversation"}`);
    remove.onclick = () => forget(one);
    row.append(open, remove);
    return row;
  });
  $("list").replaceChildren(...rows);
}

function forget(one) {
  conversations = conversations.filter((other) => other !== one);
  keep();
  if (one !== current) return list();
  current = null;
  conversations.length ? show(conversations[0]) : begin();
}

// ---- messages --------------------------------------------------------------------------------------------

function drawn(message, place) {
  const box = element("article", "", message.role);
  box.append(element("h2", message.role === "user" ? "You" : name || "Answer"));
  const thoughts = element("details");
  thoughts.append(element("summary", "Thoughts"), element("div", message.thoughts || "", "thoughts"));
  thoughts.hidden = !message.thoughts;
  const body = element("div", "", "body");
  fill(body, message);
  box.append(thoughts, body);
  if (message.role === "assistant") {
    const acts = element("div", "", "acts");
    const again = element("button", "Again");
    again.type = "button";
    again.onclick = () => rewrite(place);
    const copy = element("button", "Copy");
    copy.type = "button";
    copy.onclick = () => navigator.clipboard.writeText(message.content);
    acts.append(again, copy);
    box.append(acts);
  }
  return box;
}

function fill(body, message) {
  if (message.tokens) body.replaceChildren(...message.tokens.map(token_of));
  else if (message.role === "user") body.replaceChildren(message.content); // unformatted
  else body.replaceChildren(...blocks_of(message.content));
}

const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(?=\S)/;
const INLINE = /(`+)(?!`)(.+?)(?<!`)\1(?!`)|\*\*(?=\S)((?:`[^`]+`|[^`])+?)(?<=\S)\*\*/g; // code, bold

/** An answer as blocks: code between lines of three backticks, lists, and other text, with bold and code within lines.
 * Marks such as ** stay in the page as hidden text. */
function blocks_of(content) {
  const blocks = [];
  let code = null;
  let lists = []; // open lists, outermost first: indentation, element
  for (const line of content.split(/(?<=\n)/)) {
    const item = ITEM.exec(line);
    const blanks = /^\s*/.exec(line)[0];
    const entry_of = lists.filter(({ indent }) => indent < blanks.length); // the entry that the line continues
    if (/^\s*```/.test(line)) {
      blocks.push(element("span", line, "mark"));
      code = code ? null : element("code");
      if (code) blocks.push(code);
      lists = [];
    } else if (code) code.append(line);
    else if (item) {
      lists = list_of(item, lists, blocks);
      const entry = element("li");
      if (lists.at(-1).node.tagName === "OL") entry.value = parseInt(item[2], 10);
      entry.append(element("span", item[0], "mark"));
      lists.at(-1).node.append(inline(entry, line.slice(item[0].length)));
    } else if (lists.length && !line.trim()) lists.at(-1).node.lastElementChild.append(element("span", line, "mark"));
    else if (entry_of.length) {
      lists = entry_of;
      const entry = lists.at(-1).node.lastElementChild;
      entry.append(element("span", blanks, "mark"));
      inline(entry, line.slice(blanks.length));
    } else {
      lists = [];
      if (blocks.at(-1)?.tagName !== "SPAN" || blocks.at(-1).className) blocks.push(element("span"));
      inline(blocks.at(-1), line);
    }
  }
  return blocks;
}

/** The open lists after an item: its list comes last and is an open one, or a new one within their last entry. */
function list_of([, blanks, mark], lists, blocks) {
  const kind = /\d/.test(mark) ? "OL" : "UL";
  const open = lists.filter(({ indent }) => indent <= blanks.length);
  const last = open.at(-1);
  if (last && blanks.length < last.indent + 2 && last.node.tagName === kind) return open;
  const outer = last && blanks.length < last.indent + 2 ? open.slice(0, -1) : open;
  const made = { indent: blanks.length, node: element(kind.toLowerCase()) };
  if (outer.length) outer.at(-1).node.lastElementChild.append(made.node);
  else blocks.push(made.node);
  return [...outer, made];
}

/** An element with a line of text added, with elements for bold text and code. */
function inline(node, text) {
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    const [whole, ticks, code, bold] = match;
    const made = ticks ? element("code", code, "inline") : inline(element("strong"), bold);
    const marks = [0, 1].map(() => element("span", ticks || "**", "mark"));
    node.append(text.slice(end, match.index), marks[0], made, marks[1]);
    end = match.index + whole.length;
  }
  node.append(text.slice(end));
  return node;
}

/** An element for a token. If its probability is known, it is shaded and has a tooltip. */
function token_of({ text, choices }) {
  const made = element("span", text);
  if (!choices) return made;
  made.className = "token";
  made.tabIndex = -1;
  const share = Math.exp(choices[0].logprob);
  made.style.backgroundColor = `hsl(${Math.round(120 * share)} 70% 50% / ${(0.35 * (1 - share)).toFixed(2)})`;
  const lines = choices.map(({ token, logprob }) => `${percent(logprob)}  ${JSON.stringify(token)}`);
  made.dataset.tip = lines.join("\n");
  made.setAttribute("aria-label", `${text}, ${percent(choices[0].logprob).trim()}`);
  return made;
}

function percent(logprob) {
  return `${(100 * Math.exp(logprob)).toFixed(1)} %`.padStart(7);
}

function bottom() {
  $("messages").scrollTop = $("messages").scrollHeight;
}

// ---- asking ----------------------------------------------------------------------------------------------

function body_of(messages) {
  const system = $("system").value.trim();
  const sent = messages.map(({ role, content }) => ({ role, content }));
  const body = { model: name, stream: true, stream_options: { include_usage: true } };
  body.messages = system ? [{ role: "system", content: system }, ...sent] : sent;
  for (const field of NUMBERS) {
    if ($(field).value !== "") body[field] = Number($(field).value);
  }
  if ($("logprobs").checked) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  return body;
}

/** The chosen token, then the most likely others. */
function choices_of({ token, logprob, top_logprobs }) {
  const others = (top_logprobs || []).filter((one) => one.token !== token || one.logprob !== logprob);
  return [{ token, logprob }, ...others.map(({ token, logprob }) => ({ token, logprob }))];
}

/** The tokens of a delta, with their probabilities if requested. */
function tokens_of(text, entries) {
  if (!entries.length) return [{ text }];
  if (entries.length > 1 && entries.map(({ token }) => token).join("") === text)
    return entries.map((entry) => ({ text: entry.token, choices: choices_of(entry) }));
  return [{ text, choices: choices_of(entries[0]) }];
}

async function write(conversation) {
  tell("");
  const request = body_of(conversation.messages);
  const message = { role: "assistant", content: "", tokens: [] };
  conversation.messages.push(message);
  const box = drawn(message, conversation.messages.length - 1);
  const [body, thoughts] = [box.querySelector(":scope > .body"), box.querySelector("details")];
  $("messages").append(box);
  bottom();
  const abort = (running = new AbortController());
  busy(true);
  const [sent, times] = [performance.now(), []];
  let written = 0;
  try {
    for await (const { choices, usage } of ask("v1/chat/completions", request, abort.signal)) {
      if (usage) written = usage.completion_tokens;
      if (!choices.length) continue;
      const { delta, logprobs } = choices[0];
      const thought = REASONING.map((field) => delta[field]).find(Boolean);
      if (thought) {
        message.thoughts = (message.thoughts || "") + thought;
        thoughts.hidden = false;
        thoughts.querySelector(".thoughts").textContent = message.thoughts;
      }
      if (delta.content || thought) times.push(performance.now());
      if (!delta.content) continue;
      const tokens = tokens_of(delta.content, (logprobs && logprobs.content) || []);
      message.content += delta.content;
      message.tokens.push(...tokens);
      const near = $("messages").scrollHeight - $("messages").scrollTop - $("messages").clientHeight < 80;
      if (tokens[0].choices) body.append(...tokens.map(token_of));
      else body.replaceChildren(...blocks_of(message.content));
      if (near) bottom();
      speed(sent, times, Math.max(written, times.length));
    }
    speed(sent, times, Math.max(written, times.length));
  } catch (error) {
    if (error.name !== "AbortError") tell(error.message);
    if (error instanceof Refused && error.status === 401) ask_key();
    if (!message.content && !message.thoughts) {
      conversation.messages.pop();
      box.remove();
    }
  }
  if (message.tokens.every((token) => !token.choices)) delete message.tokens;
  if (running === abort) busy(false);
  keep();
}

function speed(sent, times, written) {
  if (!times.length) return;
  const seconds = (times.at(-1) - times[0]) / 1000;
  const rate = times.length > 1 ? `, ${((written - 1) / seconds).toFixed(1)} tokens/s` : "";
  $("speed").textContent = `first token after ${((times[0] - sent) / 1000).toFixed(2)} s, ${written} tokens${rate}`;
}

function busy(is_busy) {
  if (!is_busy) running = null;
  $("send").hidden = is_busy;
  $("stop").hidden = !is_busy;
}

function stop() {
  if (running) running.abort();
  busy(false);
}

function send() {
  const text = $("prompt").value.trim();
  if (!text || running) return;
  $("prompt").value = "";
  const message = { role: "user", content: text };
  current.messages.push(message);
  current.title ||= text.slice(0, 60);
  $("messages").append(drawn(message));
  list();
  keep();
  write(current);
}

function rewrite(place) {
  if (running) return;
  current.messages.splice(place);
  while ($("messages").childElementCount > place) $("messages").lastElementChild.remove();
  write(current);
}

function ask_key() {
  $("settings").open = true;
  $("key-label").hidden = false;
  $("key").focus();
}

// ---- the page --------------------------------------------------------------------------------------------

function fold(is_open) {
  $("side").classList.toggle("open", is_open);
  $("toggle").setAttribute("aria-expanded", String(is_open));
}

function tip(event) {
  const at = event.target instanceof Element ? event.target.closest("[data-tip]") : null;
  $("tip").hidden = !at;
  if (!at) return;
  $("tip").textContent = at.dataset.tip;
  const box = at.getBoundingClientRect();
  const { offsetWidth, offsetHeight } = $("tip");
  $("tip").style.left = `${Math.max(4, Math.min(box.left, innerWidth - offsetWidth - 4))}px`;
  $("tip").style.top = `${box.top > offsetHeight + 8 ? box.top - offsetHeight - 6 : box.bottom + 6}px`;
}

/** Arrow keys move from token to token; the text is one stop of the Tab key. */
function step(event) {
  const at = event.target.closest(".token");
  const way = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
  if (!at || !way || !at[way]) return;
  event.preventDefault();
  at[way].focus();
}

async function greet() {
  try {
    const served = await model();
    name = served.id;
    $("model").textContent = `${name}, ${served.max_model_len.toLocaleString()} tokens of context`;
    document.title = `${name}: chat`;
    if ($("key-label").hidden === false) tell("");
  } catch (error) {
    $("model").textContent = error.status === 503 ? "the model is being loaded" : error.message;
    if (error.status === 401) ask_key();
    else setTimeout(greet, 1000);
  }
}

$("form").onsubmit = (event) => (event.preventDefault(), send());
$("prompt").onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
};
$("stop").onclick = stop;
$("new").onclick = () => (begin(), fold(false));
$("toggle").onclick = () => fold(!$("side").classList.contains("open"));
$("key").onchange = () => (setKey($("key").value), greet());
for (const kind of ["pointerover", "focusin"]) $("messages").addEventListener(kind, tip);
for (const kind of ["pointerleave", "focusout"]) $("messages").addEventListener(kind, () => ($("tip").hidden = true));
$("messages").addEventListener("keydown", step);
$("messages").addEventListener("focusin", ({ target }) => {
  const body = target.closest(".body");
  if (body) for (const token of body.querySelectorAll(".token")) token.tabIndex = token === target ? 0 : -1;
});
document.addEventListener("keydown", ({ key }) => key === "Escape" && running && stop());

conversations.length ? show(conversations[0]) : begin();
greet();
