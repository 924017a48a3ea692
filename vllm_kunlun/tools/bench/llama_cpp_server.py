"""Serves one sequence at a time with llama.cpp: the part of OpenAI's completions that a measurement asks for.

Run as a file by the interpreter of llama.cpp's own environment, which does not have this package:
`python llama_cpp_server.py MODEL.gguf PORT CONTEXT THREADS`. Prompts are token ids, decoding is greedy.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PATH = "/v1/completions"
DONE = b"data: [DONE]\n\n"


class Model:
    """A llama.cpp model that generates for one request at a time."""

    def __init__(self, path: str, context: int, threads: int) -> None:
        import llama_cpp  # type: ignore[import-not-found]

        self._llama = llama_cpp.Llama(
            path, n_ctx=context, n_batch=context, n_threads=threads, n_threads_batch=threads, verbose=False
        )
        self._lock = threading.Lock()

    def generate(self, prompt: Sequence[int], max_tokens: int) -> Iterator[int]:
        """Yield `max_tokens` greedy tokens, past any end token."""
        with self._lock:
            tokens = self._llama.generate(list(prompt), temp=0.0, reset=True)
            for _, token in zip(range(max_tokens), tokens):  # noqa: B905 -- the generator has no end
                yield int(token)


def event(content: dict[str, Any]) -> bytes:
    """Encode one server-sent event."""
    return b"data: " + json.dumps(content).encode() + b"\n\n"


class Handler(BaseHTTPRequestHandler):
    """Answers GET /health and POST /v1/completions (streamed)."""

    protocol_version = "HTTP/1.1"
    model: Model

    def do_GET(self) -> None:
        """Answer 200: the server listens only once the model is loaded."""
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        """Stream one chunk per token, then the number of tokens."""
        if self.path != PATH:
            self.send_error(404)
            return
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        count = 0
        for token in self.model.generate(asked["prompt"], asked["max_tokens"]):
            count += 1
            self.wfile.write(event({"choices": [{"index": 0, "text": "", "token_ids": [token]}]}))
        self.wfile.write(event({"choices": [], "usage": {"completion_tokens": count}}))
        self.wfile.write(DONE)
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing per request."""


def main(path: str, port: str, context: str, threads: str) -> None:
    """Load the model, then listen on the loopback address."""
    Handler.model = Model(path, int(context), int(threads))
    ThreadingHTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
