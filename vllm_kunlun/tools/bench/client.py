"""A streaming client for OpenAI completions that keeps the time of every chunk.

It costs as little as it can, because on a small machine the client takes processor time from the server that it
measures: one connection per request, prompts as token ids, and only the chunks' arrival times are kept.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

DATA = b"data: "
DONE = b"[DONE]"


class BenchError(RuntimeError):
    """A measurement that could not be made; the message says what was asked and what to do."""


@dataclass(frozen=True)
class Stream:
    """One streamed completion: when it was sent, when each chunk came (seconds, one clock) and how many tokens."""

    sent: float
    chunks: tuple[float, ...]
    tokens: int

    @property
    def first_token_s(self) -> float:
        """Seconds from sending the request to its first token."""
        return self.chunks[0] - self.sent

    @property
    def seconds_per_token(self) -> float:
        """Seconds per token after the first one."""
        return (self.chunks[-1] - self.chunks[0]) / (self.tokens - 1)

    @property
    def gaps(self) -> tuple[float, ...]:
        """Seconds between each two chunks."""
        return tuple(later - earlier for earlier, later in zip(self.chunks, self.chunks[1:], strict=False))


def request_body(model: str, prompt: Sequence[int], max_tokens: int) -> bytes:
    """Encode a greedy completion request that runs to exactly `max_tokens`."""
    return json.dumps(
        {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()


def _is_token_chunk(payload: bytes) -> bool:
    """Whether a chunk carries a token: the usage chunk at the end has no choices, the other servers' last no text."""
    return b'"choices":[]' not in payload and b'"choices": []' not in payload


async def _read(response: aiohttp.ClientResponse, sent: float, expected: int) -> Stream:
    """Collect the chunks' times until the stream ends; `expected` tokens must have come."""
    times: list[float] = []
    tokens = 0
    async for line in response.content:
        if not line.startswith(DATA):
            continue
        payload = line[len(DATA) :].strip()
        if payload == DONE:
            break
        if _is_token_chunk(payload):
            times.append(time.perf_counter())
        else:
            tokens = int(json.loads(payload)["usage"]["completion_tokens"])
    if tokens != expected or not times:
        raise BenchError(f"The server streamed {tokens} tokens in {len(times)} chunks where {expected} were asked for.")
    return Stream(sent, tuple(times), tokens)


async def complete(session: aiohttp.ClientSession, url: str, body: bytes, expected: int) -> Stream:
    """Send one streaming completion and return its timestamps.

    Raises:
        BenchError: the server answered with an error, or with another number of tokens than was asked for.
    """
    sent = time.perf_counter()
    async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as response:
        if response.status != 200:
            raise BenchError(f"{url} answered {response.status}: {(await response.text())[:500]}")
        return await _read(response, sent, expected)


async def _complete_all(url: str, bodies: Sequence[bytes], max_tokens: int, timeout_s: float) -> list[Stream]:
    """Send every body at once, each on its own connection."""
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        return list(await asyncio.gather(*(complete(session, url, body, max_tokens) for body in bodies)))


def run_streams(
    base_url: str, model: str, prompts: Sequence[Sequence[int]], max_tokens: int, timeout_s: float = 300
) -> list[Stream]:
    """Stream one completion per prompt, all at once.

    Raises:
        BenchError: a request failed or took longer than `timeout_s`.
    """
    bodies = [request_body(model, prompt, max_tokens) for prompt in prompts]
    try:
        return asyncio.run(_complete_all(f"{base_url}/v1/completions", bodies, max_tokens, timeout_s))
    except (aiohttp.ClientError, asyncio.TimeoutError) as error:
        raise BenchError(f"{base_url} broke off {len(prompts)} streams: {error!r}. See the server's log.") from error
