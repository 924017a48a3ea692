"""A generative model converted to an embedding model gives its own hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.reference import TextReference
from tests.support.server import LiveServer

TEXTS = ["The sea is calm today.", "A calm sea.", "word " * 300]


@pytest.fixture(scope="module")
def pooling_server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    flags = ["--runner", "pooling", "--convert", "embed", "--dtype", "float32", "--max-model-len", "1024"]
    batching = ["--max-num-batched-tokens", "1024", "--kv-cache-memory-bytes", str(256 << 20)]
    live = LiveServer(checkpoint, [*flags, *batching], tmp_path_factory.mktemp("pooling") / "log")
    yield live
    live.stop_cleanly()


def relative_l2(given: torch.Tensor, expected: torch.Tensor) -> float:
    return float((given - expected).norm() / expected.norm())


def test_embeddings_are_the_last_tokens_normalized_hidden_states(
    pooling_server: LiveServer, reference: TextReference
) -> None:
    answer = pooling_server.client.embeddings.create(model="model", input=TEXTS, encoding_format="float")
    assert [item.index for item in answer.data] == [0, 1, 2]
    for text, item in zip(TEXTS, answer.data, strict=True):
        hidden = reference.last_hidden(reference.encode(text))[-1]
        assert relative_l2(torch.tensor(item.embedding), hidden / hidden.norm()) < 1e-4, text[:20]


def test_embeddings_in_base64_are_the_same(pooling_server: LiveServer) -> None:
    plain = pooling_server.client.embeddings.create(model="model", input=TEXTS[0], encoding_format="float")
    packed = pooling_server.client.embeddings.create(model="model", input=TEXTS[0])
    torch.testing.assert_close(
        torch.tensor(packed.data[0].embedding), torch.tensor(plain.data[0].embedding), atol=1e-6, rtol=0
    )


def test_similar_texts_score_higher(pooling_server: LiveServer) -> None:
    answer = pooling_server.client.embeddings.create(model="model", input=TEXTS, encoding_format="float")
    first, similar, other = (torch.tensor(item.embedding) for item in answer.data)
    assert first @ similar > first @ other


def test_a_text_longer_than_the_model_is_400(pooling_server: LiveServer) -> None:
    response = pooling_server.post("/v1/embeddings", {"model": "model", "input": "word " * 4000})
    assert response.status_code == 400, response.text
    assert pooling_server.post("/v1/embeddings", {"model": "model", "input": "short"}).status_code == 200
