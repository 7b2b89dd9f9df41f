"""An OpenAI-compatible HTTP server for one model (extra `serve`: starlette and uvicorn).

refusal.py   errors sent to clients: status, code, message
fields.py    typed access to a JSON body; unknown fields are rejected
requests.py  the fields of /v1/completions and /v1/chat/completions -> GenerationRequest
engine.py    prompt tokens -> pieces of text; one session whose common prefix is reused
queue.py     the worker thread, and the bounded queue of waiting requests
wire.py      OpenAI's JSON: completions, chunks, usage, errors
answer.py    processing of one request, streamed or not
app.py       routes, API key, host and body limits
serving.py   the socket, timeouts, signals
"""
