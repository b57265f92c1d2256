// What both pages ask of the server. The key lives in this module's memory and nowhere else.

let key = "";

export function setKey(given) {
  key = given.trim();
}

export class Refused extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

function headers() {
  const found = { "content-type": "application/json" };
  if (key) found.authorization = `Bearer ${key}`;
  return found;
}

async function checked(answer) {
  if (answer.ok) return answer;
  let text = `the server answered ${answer.status}`;
  try {
    text = (await answer.json()).error.message || text;
  } catch {
    // no body of ours: a proxy's
  }
  throw new Refused(answer.status, text);
}

/** A GET. */
export async function look(path) {
  return checked(await fetch(path, { headers: headers(), cache: "no-store" }));
}

/** A POST whose answer is a stream of events: yields the data of each, as it comes. */
export async function* ask(path, body, signal) {
  const answer = await checked(
    await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(body), signal }),
  );
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Refused(event.error.code, event.error.message);
      yield event;
    }
  }
}

/** The name of the model and its context, once it is loaded. */
export async function model() {
  const { data } = await (await look("v1/models")).json();
  return data[0];
}

/** An element with its text, never markup. */
export function element(kind, text = "", kinds = "") {
  const made = document.createElement(kind);
  if (text) made.textContent = text;
  if (kinds) made.className = kinds;
  return made;
}

export const $ = (id) => document.getElementById(id);
