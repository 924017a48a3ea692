"""Comparison of generated tokens with a float32 reference."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from tests.support.reference import Greedy, Reference

TIE = 1e-4
"""Where the reference's two best logits are closer than this, either token is right."""


def assert_greedy(generated: Sequence[int], reference: Greedy, what: str) -> None:
    """Require the reference's tokens, one by one; the comparison ends, with a warning, at a tie.

    After a tie that was broken the other way the two texts differ for good reason, so nothing past it is compared.
    """
    assert len(generated) == len(reference.tokens), f"{what}: {len(generated)} tokens for {len(reference.tokens)}"
    for step, (token, expected) in enumerate(zip(generated, reference.tokens, strict=True)):
        if token == expected:
            continue
        gap = reference.gaps[step]
        assert gap <= TIE, f"{what}: token {step} is {token}, not {expected}, which leads by {gap:.2e}"
        warnings.warn(f"{what}: a tie of {gap:.1e} at token {step} was broken the other way", stacklevel=2)
        return


def assert_replay(
    reference: Reference, prompt: Sequence[int], generated: Sequence[int], what: str, tie: float = TIE
) -> None:
    """Require every generated token to be the reference's best after the prompt and the tokens before it.

    By induction that is the reference's own greedy text, found in one forward pass. Ties, which half precision breaks
    at wider gaps, are reported as warnings.
    """
    logits = reference.logits([*prompt, *generated])[len(prompt) - 1 : -1]
    best = logits.max(-1)
    gaps = best.values - logits.gather(1, torch.tensor(generated)[:, None])[:, 0]
    for step in torch.nonzero(best.indices != torch.tensor(generated))[:, 0].tolist():
        wanted, gap = int(best.indices[step]), float(gaps[step])
        assert gap <= tie, f"{what}: token {step} is {generated[step]}, not {wanted}, which leads by {gap:.2e}"
        warnings.warn(f"{what}: a tie of {gap:.1e} at token {step} was broken the other way", stacklevel=2)
