"""An OpenAI-compatible HTTP server (extra `serve`: starlette, uvicorn, prometheus-client, llguidance).

refusal.py    errors sent to clients: status, code, message
fields.py     typed access to a JSON body; unknown fields are rejected
requests.py   the fields of /v1/completions and /v1/chat/completions -> GenerationRequest
engine.py     prompt tokens -> pieces of text, in a batch with other requests
queue.py      the worker thread, and the bounded queue of waiting requests
wire.py       OpenAI's JSON: completions, chunks, usage, errors
served.py     the models by name
answer.py     processing of one request, streamed or not
embeddings.py the same for /v1/embeddings
record.py     the record of a request at its end: metrics, request log
chat_page.py  the page of /, from the files in page/
app.py        routes, API key, host and body limits
serving.py    the socket, timeouts, signals
"""
