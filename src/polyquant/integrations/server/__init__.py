"""An OpenAI-compatible HTTP server for one model (extra `serve`: starlette and uvicorn).

refusal.py   what a client gets instead of an answer: status, code, message
fields.py    typed access to a JSON body; a field that nobody asked for is refused
requests.py  the fields of /v1/completions and /v1/chat/completions -> GenerationRequest
engine.py    prompt tokens -> pieces of text; one session is kept and its common prefix used again
queue.py     the one worker thread, and the bounded line of those that wait for it
wire.py      OpenAI's JSON: completions, chunks, usage, errors
answer.py    one request to its end: whole, or streamed as server-sent events
app.py       routes, key, host and body limits
serving.py   the socket, timeouts, signals
"""
