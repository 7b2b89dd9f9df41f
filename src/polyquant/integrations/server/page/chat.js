// The chat: its state, the form, the settings. Nothing is stored: the conversation and the key end with the page.

const NUMBERS = ["temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"];
const CONTINUED = 256; // tokens by which a model without a chat template continues a text
const ALTERNATIVES = 5; // tokens whose probabilities are known where two answers part
const state = { models: [], turns: [], views: [], running: null, key: "", drawing: false };

const selected = () => state.models.filter((model) => model.box?.checked ?? true);

function shared(a, b) {
  const [x, y] = [a, b].map((id) => state.models.find((model) => model.id === id).polyquant.tokenizer);
  return x !== null && x === y;
}

function draw() {
  if (state.drawing) return;
  state.drawing = true;
  requestAnimationFrame(() => {
    state.drawing = false;
    const log = byId("log");
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    state.views.forEach((view, i) => {
      const last = i === state.views.length - 1;
      if (last || !view.settled || view.formatted !== byId("formatted").checked) {
        view.draw({ formatted: byId("formatted").checked, shared, last, running: state.running !== null });
        view.settled = !last;
        view.formatted = byId("formatted").checked;
      }
    });
    byId("send").hidden = state.running !== null;
    byId("stop").hidden = state.running === null;
    byId("export").disabled = byId("new").disabled = !state.turns.length;
    if (atEnd) log.scrollTop = log.scrollHeight;
  });
}

function say(text) {
  byId("status").textContent = text;
}

// The sampling fields that are set. turn.seed: for the same draws in all models, and others when regenerating.
function sampling(turn, several) {
  const fields = {};
  for (const id of NUMBERS) if (byId(id).value !== "") fields[id] = byId(id).valueAsNumber;
  if (fields.seed !== undefined) fields.seed += turn.attempts;
  else if (several) fields.seed = turn.seed;
  return fields;
}

function history(turn, model) {
  const messages = [];
  if (byId("system").value.trim()) messages.push({ role: "system", content: byId("system").value });
  for (const earlier of state.turns) {
    if (earlier === turn) break;
    const cell = earlier.cells.find((c) => c.model === model && c.text);
    if (cell) messages.push({ role: "user", content: earlier.user }, { role: "assistant", content: cell.text });
  }
  return [...messages, { role: "user", content: turn.user }];
}

function body(turn, cell, model) {
  const several = turn.cells.length > 1;
  const limit = byId("max_tokens").value === "" ? null : byId("max_tokens").valueAsNumber;
  const common = {
    model: cell.model, stream: true, stream_options: { include_usage: true }, return_token_ids: true,
    ...sampling(turn, several),
  };
  if (!model.polyquant.chat) {
    return { ...common, prompt: turn.user, max_tokens: limit ?? CONTINUED, ...(several && { logprobs: ALTERNATIVES }) };
  }
  const compared = several && { logprobs: true, top_logprobs: ALTERNATIVES };
  return { ...common, messages: history(turn, cell.model), ...(limit && { max_tokens: limit }), ...compared };
}

// Add the tokens of a chunk to its cell.
function take(cell, chunk, seconds) {
  if (chunk.usage) cell.usage = chunk.usage;
  const choice = chunk.choices[0];
  if (!choice) return;
  cell.finish = choice.finish_reason ?? cell.finish;
  const text = choice.delta?.content ?? choice.text ?? "";
  const logprobs = choice.logprobs?.content?.map((entry) => entry.logprob) ?? choice.logprobs?.token_logprobs ?? [];
  const tops = choice.logprobs?.content?.map((entry) => new Map(entry.top_logprobs.map((top) => [top.token, top.logprob])))
    ?? choice.logprobs?.top_logprobs?.map((top) => new Map(Object.entries(top))) ?? [];
  (choice.token_ids ?? []).forEach((id, i) => {
    cell.first ??= seconds;
    cell.last = seconds;
    const own = i ? "" : text;
    const shown = own.replaceAll("\n", "⏎").replace(/^ /, "␣") || "…";
    cell.tokens.push({ id, text: own, shown, logprob: logprobs[i], top: tops[i] });
  });
  cell.text += text;
  const after = cell.tokens.length - 1;
  cell.rate = after > 0 && cell.last > cell.first ? after / (cell.last - cell.first) : null;
}

async function answer(turn, cell, signal) {
  const model = state.models.find((m) => m.id === cell.model);
  const began = performance.now();
  try {
    const path = model.polyquant.chat ? "v1/chat/completions" : "v1/completions";
    for await (const chunk of chunks(path, body(turn, cell, model), state.key, signal)) {
      take(cell, chunk, (performance.now() - began) / 1000);
      draw();
    }
  } catch (problem) {
    if (problem.name === "AbortError") cell.stopped = true;
    else if (problem instanceof Refused) cell.error = problem.message;
    else throw problem;
  } finally {
    cell.done = true;
    draw();
  }
}

const blank = (model) => ({
  model, text: "", tokens: [], first: null, last: null, rate: null, usage: null, finish: null, error: null, stopped: false,
  done: false,
});

async function run(turn) {
  state.running = new AbortController();
  draw();
  say("Answering");
  await Promise.all(turn.cells.map((cell) => answer(turn, cell, state.running.signal)));
  state.running = null;
  const failed = turn.cells.some((cell) => cell.error);
  say(failed ? "Failed" : turn.cells.some((cell) => cell.stopped) ? "Stopped" : "Complete");
  draw();
}

function show(turn) {
  const view = new TurnView(turn, state.turns.length, () => regenerate());
  state.views.push(view);
  byId("log").append(view.node);
  byId("log").scrollTop = byId("log").scrollHeight;
}

const randomSeed = () => Math.floor(Math.random() * 2 ** 31);

function send() {
  const prompt = byId("prompt");
  const chosenModels = selected();
  if (state.running || !prompt.value.trim()) return;
  if (!chosenModels.length) return say("Select a model first.");
  const invalid = document.querySelector("#settings :invalid");
  if (invalid) {
    byId("settings").classList.add("open");
    return invalid.reportValidity();
  }
  if (!state.turns.length) byId("log").replaceChildren();
  const turn = { user: prompt.value, attempts: 0, seed: randomSeed(), cells: chosenModels.map((model) => blank(model.id)) };
  state.turns.push(turn);
  show(turn);
  prompt.value = "";
  grow();
  run(turn);
}

function regenerate() {
  const turn = state.turns.at(-1);
  if (state.running || !turn) return;
  Object.assign(turn, { attempts: turn.attempts + 1, seed: randomSeed(), cells: turn.cells.map((cell) => blank(cell.model)) });
  state.views.pop().node.remove();
  show(turn);
  byId("prompt").focus();
  run(turn);
}

function stop() {
  state.running?.abort();
}

function restart() {
  stop();
  state.turns = [];
  state.views = [];
  byId("log").replaceChildren(greeting());
  say("New chat");
  byId("prompt").focus();
  draw();
}

function save() {
  const settings = Object.fromEntries([...NUMBERS, "max_tokens"].map((id) => [id, byId(id).value]).filter(([, value]) => value));
  const turns = state.turns.map(({ user, cells }) => ({
    user,
    answers: cells.map((cell) => ({
      model: cell.model, text: cell.text, token_ids: cell.tokens.map((token) => token.id), finish_reason: cell.finish,
      first_token_seconds: cell.first, tokens_per_second: cell.rate, error: cell.error,
    })),
  }));
  const text = JSON.stringify({ exported: new Date().toISOString(), system: byId("system").value, settings, turns }, null, 1);
  const link = element("a", { href: URL.createObjectURL(new Blob([text], { type: "application/json" })), download: "chat.json" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function grow() {
  const prompt = byId("prompt");
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

function greeting() {
  const continued = state.models.filter((model) => !model.polyquant.chat).map((model) => model.id);
  let text = "Write a message to begin.";
  if (!state.models.length) text = "This server has no model that generates text; its embeddings are at /v1/embeddings.";
  else if (continued.length) text = `Write a text to begin. Without a chat template: ${continued.join(", ")} (continues the text).`;
  else if (state.models.length > 1) text = "Write a message to begin. All selected models answer it.";
  return element("p", { className: "start", textContent: text });
}

function keyButton() {
  const button = element("button", { type: "button", textContent: "Enter the API key" });
  button.addEventListener("click", () => byId("key").showModal());
  return element("p", { className: "start" }, button);
}

function listModels() {
  if (state.models.length === 1) return byId("models").replaceChildren(element("span", { textContent: state.models[0].id }));
  byId("models").replaceChildren(...state.models.map((model) => {
    model.box = element("input", { type: "checkbox", checked: true });
    return element("label", {}, model.box, ` ${model.id}`);
  }));
}

function placeholders() {
  const defaults = { temperature: 1, top_k: 0, top_p: 1, min_p: 0, repetition_penalty: 1, ...state.models[0]?.polyquant.sampling };
  const same = new Set(state.models.map((model) => JSON.stringify(model.polyquant.sampling))).size < 2;
  for (const id of NUMBERS.slice(0, -1)) byId(id).placeholder = same ? String(defaults[id]) : "default";
}

async function begin() {
  try {
    state.models = (await models(state.key)).filter((model) => model.polyquant.completions);
    if (byId("key").open) byId("key").close();
    listModels();
    placeholders();
    byId("log").replaceChildren(greeting());
    byId("prompt").focus();
  } catch (problem) {
    if (!(problem instanceof Refused)) throw problem;
    if (problem.status !== 401) return byId("log").replaceChildren(element("p", { className: "start error", textContent: problem.message }));
    byId("log").replaceChildren(keyButton()); // for a dialog that was closed
    byId("key-error").textContent = state.key ? "The server does not accept this key." : "";
    if (!byId("key").open) byId("key").showModal();
    byId("key-value").select();
  }
}

byId("ask").addEventListener("submit", (event) => { event.preventDefault(); send(); });
byId("prompt").addEventListener("input", grow);
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") stop(); });
byId("stop").addEventListener("click", () => { stop(); byId("prompt").focus(); });
byId("new").addEventListener("click", restart);
byId("export").addEventListener("click", save);
byId("formatted").addEventListener("change", draw);
byId("toggle").addEventListener("click", () => {
  byId("toggle").setAttribute("aria-expanded", String(byId("settings").classList.toggle("open")));
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  state.key = byId("key-value").value;
  begin();
});
begin();
