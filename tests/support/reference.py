"""Greedy decoding and logits from transformers in float32, the reference of every comparison of tokens."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

Adjust = Callable[[torch.Tensor, Sequence[int], Sequence[int]], torch.Tensor]
"""Changes one step's logits [vocab], given the prompt and the tokens generated so far."""


@dataclass(frozen=True)
class Greedy:
    """Greedy tokens, and how far the best logit lay above the second best at each step."""

    tokens: list[int]
    gaps: list[float]

    def first(self, count: int) -> Greedy:
        return Greedy(self.tokens[:count], self.gaps[:count])


class Reference:
    """A checkpoint in transformers, float32, with sdpa-free attention so that every structure is plain."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.model = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._known: dict[tuple[int, ...], Greedy] = {}

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits of every position, [num_tokens, vocab], float32."""
        return self.model(torch.tensor([list(tokens)])).logits[0].float()

    @torch.inference_mode()
    def last_hidden(self, tokens: Sequence[int]) -> torch.Tensor:
        """The final normed hidden states, [num_tokens, hidden], float32."""
        return self.model.model(torch.tensor([list(tokens)])).last_hidden_state[0].float()

    def _forward(self, step: torch.Tensor, cache: Any) -> Any:
        """One step with the KV cache; newer releases of transformers rename the argument and still take this name."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*past_key_values.*", category=FutureWarning)
            return self.model(step, past_key_values=cache, use_cache=True, logits_to_keep=1)

    def greedy(self, prompt: Sequence[int], num_tokens: int, adjust: Adjust | None = None) -> Greedy:
        """Decode `num_tokens` greedily, past any end token. What was decoded before is remembered."""
        if adjust is not None:
            return self._decode(prompt, num_tokens, adjust)
        known = self._known.get(tuple(prompt))
        if known is None or len(known.tokens) < num_tokens:
            known = self._known[tuple(prompt)] = self._decode(prompt, num_tokens, None)
        return known.first(num_tokens)

    @torch.inference_mode()
    def _decode(self, prompt: Sequence[int], num_tokens: int, adjust: Adjust | None) -> Greedy:
        cache, tokens, gaps = None, [], []
        step = torch.tensor([list(prompt)])
        while len(tokens) < num_tokens:
            output = self._forward(step, cache)
            cache, logits = output.past_key_values, output.logits[0, -1].float()
            if adjust is not None:
                logits = adjust(logits.clone(), prompt, tokens)
            best = logits.topk(2)
            gaps.append(float(best.values[0] - best.values[1]))
            tokens.append(int(best.indices[0]))
            step = torch.tensor([[tokens[-1]]])
        return Greedy(tokens, gaps)


class TextReference(Reference):
    """A reference with the checkpoint's tokenizer."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(checkpoint)
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text)["input_ids"])

    def chat(self, message: str) -> list[int]:
        """The prompt of one user message, with the checkpoint's chat template."""
        messages = [{"role": "user", "content": message}]
        encoded = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return list(encoded["input_ids"])

    def text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def until_end(self, prompt: Sequence[int], limit: int) -> list[int]:
        """Greedy tokens up to but without the end token, at most `limit`."""
        tokens = self.greedy(prompt, limit).tokens
        end = self.tokenizer.eos_token_id
        return tokens[: tokens.index(end)] if end in tokens else tokens
