"""Whether two tensors share memory, exactly: interleaved views of one buffer do not, although their extents do."""

from __future__ import annotations

from collections import defaultdict

from torch import Tensor

# A stride in bytes, and the least and the largest factor it may have.
Term = tuple[int, int, int]


def same_view(a: Tensor, b: Tensor) -> bool:
    """Whether both are the same elements in the same order."""
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether several indices of a tensor name one element, as in an expanded view."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether some byte belongs to both: whether a difference of two offsets is the distance between their starts."""
    if not a.numel() or not b.numel():
        return False
    factors: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for size, stride in _steps(a):
        factors[stride][1] += size - 1
    for size, stride in _steps(b):
        factors[stride][0] -= size - 1
    terms = [(stride, least, most) for stride, (least, most) in sorted(factors.items(), reverse=True)]
    return _reachable(tuple(terms), b.data_ptr() - a.data_ptr())


def _steps(tensor: Tensor) -> list[tuple[int, int]]:
    """Size and stride of each dimension in bytes; the bytes of an element are the last one."""
    width = tensor.element_size()
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    return [(size, stride * width) for size, stride in dims if size > 1 and stride] + [(width, 1)]


def _reachable(terms: tuple[Term, ...], target: int) -> bool:
    """Whether the strides, times factors in their ranges, can add up to `target`; larger strides are tried first."""
    if not terms:
        return target == 0
    (stride, least, most), rest = terms[0], terms[1:]
    rest_least = sum(other * low for other, low, _ in rest)
    rest_most = sum(other * high for other, _, high in rest)
    first = max(least, -((rest_most - target) // stride))
    last = min(most, (target - rest_least) // stride)
    return any(_reachable(rest, target - factor * stride) for factor in range(first, last + 1))
