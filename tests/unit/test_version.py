"""Version ranges."""

import pytest

from vllm_kunlun.platforms import version
from vllm_kunlun.platforms.version import SUPPORTED_TRANSFORMERS, SUPPORTED_VLLM, VersionRange, release_numbers


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("2.13.0+cpu", (2, 13, 0)),
        ("0.25.1.dev0", (0, 25, 1)),
        ("5.5.3rc1", (5, 5, 3)),
        ("3.11.7", (3, 11, 7)),
        ("1", (1,)),
    ],
)
def test_release_numbers(text, numbers):
    assert release_numbers(text) == numbers


@pytest.mark.parametrize("text", ["", "unknown", "+cpu"])
def test_text_without_a_number_is_refused(text):
    with pytest.raises(ValueError, match="version number"):
        release_numbers(text)


@pytest.mark.parametrize(
    ("text", "contained"),
    [
        ("2.9", True),
        ("2.9.0", True),
        ("2.13.5+cu130", True),
        ("2.8.9", False),
        ("2.14", False),
        ("2.14.0", False),
        ("3", False),
    ],
)
def test_range_counts_missing_numbers_as_zero(text, contained):
    assert VersionRange("torch", "2.9", "2.14").contains(text) is contained


def test_own_version_is_of_the_vllm_series_it_is_made_for():
    assert SUPPORTED_VLLM.contains(version.__version__)
    assert set(SUPPORTED_TRANSFORMERS) == {SUPPORTED_VLLM.minimum}
