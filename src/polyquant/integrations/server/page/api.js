// Requests to this server: the models, and answers as streams of server-sent events.

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function request(path, key, options) {
  const headers = { ...(options?.body && { "Content-Type": "application/json" }), ...(key && { Authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (problem) {
    if (problem.name === "AbortError") throw problem;
    throw new Refused(0, "The server cannot be reached.");
  }
  if (response.ok) return response;
  let message = `The server answered with status ${response.status}.`;
  try {
    message = (await response.json()).error.message;
  } catch { /* not JSON: the status says enough */ }
  throw new Refused(response.status, message);
}

async function models(key) {
  return (await (await request("v1/models", key)).json()).data;
}

// The chunks of an answer. Throws Refused for an error in the stream.
async function* chunks(path, body, key, signal) {
  const response = await request(path, key, { method: "POST", body: JSON.stringify(body), signal });
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + decoder.decode(value, { stream: true })).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue;
      const data = event.slice(6);
      if (data === "[DONE]") continue; // the end of the response follows
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refused(chunk.error.code, chunk.error.message);
      yield chunk;
    }
  }
}
