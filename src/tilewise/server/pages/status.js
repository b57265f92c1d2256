// The status page: the server's current load, from its metrics and its last steps.

import { $, element, look, model, setKey } from "./server.js";

const PERIOD_MS = 1000;
const KEPT = 120; // seconds that the server keeps
const FIGURES = [
  ["Texts being generated", "vllm:num_requests_running", 0],
  ["Texts waiting", "vllm:num_requests_waiting", 0],
  ["Cache in use", "vllm:kv_cache_usage_perc", "%"],
  ["Tokens generated", "vllm:generation_tokens_total", 0],
  ["Tokens of prompts", "vllm:prompt_tokens_total", 0],
  ["Texts preempted", "vllm:num_preemptions_total", 0],
];
const SVG = "http://www.w3.org/2000/svg";
let timer = 0;

/** Values by name, of metrics without labels except the model's. */
function figures_of(text) {
  const figures = new Map();
  for (const line of text.split("\n")) {
    const match = /^([\w:]+)\{[^{}]*\} (\S+)$/.exec(line);
    if (match) figures.set(match[1], Number(match[2]));
  }
  return figures;
}

function write(figures, rates) {
  const rows = [["Tokens a second", rates.length ? rates.at(-1).toLocaleString() : "–"]];
  for (const [label, name, kind] of FIGURES) {
    const value = figures.get(name);
    if (value === undefined) continue;
    rows.push([label, kind === "%" ? `${(100 * value).toFixed(1)} %` : value.toLocaleString()]);
  }
  $("figures").replaceChildren(
    ...rows.map(([label, value]) => {
      const box = element("div");
      box.append(element("dt", label), element("dd", value));
      return box;
    }),
  );
  line(rates);
}

/** Tokens written in each of the last seconds; the server counts them even while no page is open. */
function line(rates) {
  const most = Math.max(...rates, 1);
  const points = rates.map((rate, n) => `${(300 * n) / (KEPT - 1)},${58 - (56 * rate) / most}`);
  const made = document.createElementNS(SVG, "polyline");
  made.setAttribute("points", points.join(" "));
  $("rates").replaceChildren(made);
  const summary = `${rates.length} s, at most ${most.toFixed(0)}`;
  $("rates-most").textContent = summary;
  $("rates").setAttribute("aria-label", `Tokens a second: ${summary}`);
}

/** The place of each step, in order of time; a pause is at most a twentieth of the total time of steps. */
function places_of(steps) {
  const longest = steps.reduce((sum, [, seconds]) => sum + seconds, 0) / 20;
  let place = 0;
  let end = steps[0][0];
  return steps.map(([at, seconds]) => {
    place += Math.min(Math.max(at - end, 0), longest);
    end = at + seconds;
    place += seconds;
    return place - seconds;
  });
}

/** Draw a box per step: start, seconds, tokens of prompts, tokens of texts. */
function draw(steps) {
  if (!steps.length) return $("steps").replaceChildren();
  const places = places_of(steps);
  const width = Math.max(places.at(-1) + steps.at(-1)[1], 1e-6);
  const span = steps.at(-1)[0] + steps.at(-1)[1] - steps[0][0];
  const most = Math.max(...steps.map(([, , prompt, text]) => prompt + text), 1);
  const boxes = steps.flatMap(([, seconds, prompt, text], n) => {
    const label = `${(seconds * 1000).toFixed(1)} ms, ${prompt} tokens of prompts, ${text} of texts`;
    let top = 60;
    return [["text", text], ["prompt", prompt]].map(([kind, count]) => {
      const box = document.createElementNS(SVG, "rect");
      const height = (58 * count) / most;
      top -= height;
      const at_x = (300 * places[n]) / width;
      const values = { x: at_x, y: top, width: Math.max((300 * seconds) / width - 0.15, 0.3), height, class: kind };
      for (const [name, value] of Object.entries(values)) box.setAttribute(name, value);
      box.append(document.createElementNS(SVG, "title"));
      box.firstChild.textContent = label;
      return box;
    });
  });
  $("steps").replaceChildren(...boxes);
  const summary = `${steps.length} in ${span.toFixed(1)} s, at most ${most} tokens`;
  $("steps-most").textContent = summary;
  $("steps").setAttribute("aria-label", `The last steps: ${summary}`);
}

async function update() {
  clearTimeout(timer);
  try {
    if (!document.title.includes(":")) document.title = "Tilewise: status";
    const [served, figures, status] = await Promise.all([model(), look("metrics"), look("status.json")]);
    const { steps, rates } = await status.json();
    $("model").textContent = served.id;
    write(figures_of(await figures.text()), rates);
    draw(steps);
    $("problem").hidden = $("key-form").hidden = true;
  } catch (error) {
    $("problem").textContent = error.status === 503 ? "the model is being loaded" : error.message;
    $("problem").hidden = false;
    $("key-form").hidden = error.status !== 401;
    if (error.status === 401) return;
  }
  timer = setTimeout(update, PERIOD_MS);
}

$("key-form").onsubmit = (event) => {
  event.preventDefault();
  setKey($("key").value);
  update();
};
document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : update()));
update();
