"""A server with the APIs of OpenAI and Anthropic over one engine: `dms-jax serve`.

The processes and threads of a server, and the way of a request (1 to 9):

    HTTP process (http_process.py)                  engine process (the command)
    ------------------------------                  ----------------------------
    event loop                                      main thread (server.py)
      uvicorn: connections                            starts and stops HTTP; signals
      app.py: endpoints, metrics
        access.py      1 allowed?
        apis.py        2 body -> prompts            receive thread (rpc.EngineServer)
        EngineClient   3 Submit      -- socket -->    4 Service.submit: checks, queues
                                                    engine thread (service.Service)
                                                      5 _poll: from the queue to Engine.serve
                                                      6 _notify: new tokens, as a Delta
                                                    send thread (rpc.EngineServer)
        EngineClient   8 listener  <-- socket --      7 Deltas: those of a chunk, one message
        a Formatter    9 JSON, events
    thread pool: parses bodies

HTTP runs in its own process because one thread at a time holds Python's lock, and writing the
events of hundreds of streams takes as long as the steps of a small model. 256 clients of a model of
half a billion parameters on an H100 received 21,000 to 22,000 tokens a second from one process, and
46,000 to 49,000 from two.

Only the engine's thread touches the engine. It polls the queue of the service between two chunks of
steps, and notifies listeners while the next programs run. A listener only appends to a list and the
send thread pickles, so the engine never waits for HTTP.

Cancelling takes the same path: a client disconnects, `app` calls `EngineClient.cancel`, the receive
thread calls `Service.cancel`, and the engine thread applies it at the next poll. So does replacing
an adapter: a separate thread reads the new one, and a poll at which no request runs with the old
one swaps it in.

    service.py         Service: submit, cancel, drain; knows nothing of HTTP
    rpc.py             the messages between the processes, EngineServer and EngineClient
    server.py          Server: the HTTP process, seen from the main thread; signals
    http_process.py    uvicorn
    app.py             the endpoints, the response to each error, metrics
    access.py          API keys, hosts, web pages

Each API is one file that translates requests and responses. Shared code lies beside it:

    apis.py            the endpoints, and the module of each
    chat_api.py  completions_api.py  responses_api.py  messages_api.py  tokens_api.py
    fields.py          fields that are served, refused, or left out
    requests.py        Asked, a parsed request -> GenerationRequest, with its grammar
    chats.py           a conversation and its tools -> a prompt, by the chat template
    tools.py           the tools of a request
    formatting.py      Formatter, usage, events
    refusals.py        RefusalError

`dms_jax.generation` separates thoughts, content and calls in the text of an answer, for the
commands too: `answers`, `answer_readers` and `call_formats`.

`Service` serves from Python too. The rest needs the extra `serve`.
"""

from dms_jax.serving.service import Delta, Service

__all__ = ["Delta", "Service"]
