"""Twenty prompts of all lengths; several share a beginning, so that cached prefixes are used."""

from __future__ import annotations

SHORT = (
    "The capital of France is",
    "Once upon a time",
    "2 + 2 =",
    "def fibonacci(n):",
    "Dear Sir or Madam,",
    "The three laws of thermodynamics are",
    "SELECT name FROM",
    "Roses are red,",
    "In 1969, the first man",
    "To make bread you need",
    "Hello",
    "The opposite of hot is",
)
STORY = (
    "The old lighthouse keeper had lived on the rock for forty years. Every evening he climbed the spiral stairs, "
    "trimmed the lamp and wrote the weather in a book. One night a ship came so close that he could hear the crew. "
)
LONG = (
    STORY,
    STORY + "He shouted to them",
    STORY + "In the morning the sea was calm and",
    STORY * 2 + "The captain said:",
    STORY * 3 + "And then",
    "A list of numbers: " + ", ".join(str(number) for number in range(60)) + ",",
    "A list of numbers: " + ", ".join(str(number) for number in range(60)) + ", and so on. The next list is of",
    "word " * 150 + "end",
)
PROMPTS = (*SHORT, *LONG)
