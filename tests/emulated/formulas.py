"""Float32 formulas that share nothing with the emulator: loops over requests, heads and queries."""

import math

import torch

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
DTYPES = list(TOLERANCES)


def relative_l2(actual, expected):
    """|actual - expected| / |expected|; NaN in the result makes it NaN."""
    actual, expected = actual.double(), expected.double()
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-30))


def close(actual, expected, dtype=torch.float32):
    return relative_l2(actual, expected) <= TOLERANCES[dtype]


def visible(query_place, key_place, causal=True, window=None):
    """Whether a query sees a key; a window of W shows W keys, the query's own included."""
    if causal and key_place > query_place:
        return False
    return window is None or query_place - key_place < window


def attention(query, key, value, scale, causal=True, window=None, slopes=None, sink=None):
    """One request: query [n, H, D], key and value [m, Hk, D]; the last query stands at the last key."""
    n, heads, _ = query.shape
    m, kv_heads, width = value.shape
    out = torch.zeros(n, heads, width)
    lse = torch.zeros(heads, n)
    for i in range(n):
        place = m - n + i
        seen = [j for j in range(m) if visible(place, j, causal, window)]
        for head in range(heads):
            kv = head * kv_heads // heads
            logits = torch.stack([scale * torch.dot(query[i, head], key[j, kv]) for j in seen])
            if slopes is not None:
                logits = logits - slopes[head] * torch.tensor([float(place - j) for j in seen])
            total = torch.exp(logits).sum() + (torch.exp(sink[head]) if sink is not None else 0)
            out[i, head] = sum(torch.exp(logit) / total * value[j, kv] for logit, j in zip(logits, seen, strict=True))
            lse[head, i] = torch.log(total)
    return out, lse


def rotated(heads, positions, inverse_frequencies, is_neox):
    """heads [T, H, D] turned as complex numbers; the frequencies [R/2] give how many dimensions turn."""
    half = inverse_frequencies.numel()
    angle = positions.float()[:, None, None] * inverse_frequencies
    turn = torch.polar(torch.ones_like(angle), angle)
    part, rest = heads[..., : 2 * half].float(), heads[..., 2 * half :].float()
    if is_neox:
        numbers = torch.complex(part[..., :half].contiguous(), part[..., half:].contiguous()) * turn
        return torch.cat((numbers.real, numbers.imag, rest), -1)
    numbers = torch.view_as_complex(part.unflatten(-1, (half, 2)).contiguous()) * turn
    return torch.cat((torch.view_as_real(numbers).flatten(-2), rest), -1)


def frequencies(rotary_dim, base=10000.0):
    return 1.0 / base ** (torch.arange(0, rotary_dim, 2).float() / rotary_dim)


def cos_sin_cache(inverse_frequencies, positions, dtype=torch.float32):
    angle = torch.arange(positions).float()[:, None] * inverse_frequencies
    return torch.cat((angle.cos(), angle.sin()), -1).to(dtype)


def rms(x, epsilon):
    """RMS norm by rows in float64."""
    x = x.double()
    rows = [row / math.sqrt(float((row * row).mean()) + epsilon) for row in x.reshape(-1, x.shape[-1])]
    return torch.stack(rows).reshape(x.shape).float() if rows else x.float()
