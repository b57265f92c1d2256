// Requests that both pages send. The key is stored only in this module's memory.

let key = "";

export function setKey(text) {
  key = text.trim();
}

export class Refused extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

function headers() {
  const fields = { "content-type": "application/json" };
  if (key) fields.authorization = `Bearer ${key}`;
  return fields;
}

async function checked(answer) {
  if (answer.ok) return answer;
  let text = `the server answered ${answer.status}`;
  try {
    text = (await answer.json()).error.message || text;
  } catch {
    // the body is not the server's: a proxy answered
  }
  throw new Refused(answer.status, text);
}

/** A GET. */
export async function look(path) {
  return checked(await fetch(path, { headers: headers(), cache: "no-store" }));
}

/** A POST whose answer is a stream of events: yields the data of each as it arrives. */
export async function* ask(path, body, signal) {
  const answer = await checked(
    await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(body), signal }),
  );
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let partial = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (partial + value).split("\n");
    partial = lines.pop();
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
