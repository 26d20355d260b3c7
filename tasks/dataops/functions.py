"""Small Python functions with one bug, or without a body: the material of `fix-function` and `add-function`.

Each is a whole function with what it should do; `wrong` replaces `right` in the buggy version. Wanted results come
from running the right version here, on arguments that the visible test does not use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Function:
    """`cases` are lists of arguments; the first is in the visible test, all are in the verifier."""

    name: str
    doc: str
    source: str
    right: str
    wrong: str
    cases: Sequence[Sequence[Any]]

    @property
    def buggy(self) -> str:
        """The source with its bug."""
        return self.source.replace(self.right, self.wrong, 1)

    def results(self) -> list[Any]:
        """What the right version returns for each case."""
        space: dict[str, Any] = {}
        exec(self.source, space)
        return [space[self.name](*case) for case in self.cases]


BROKEN = (
    Function(
        "mean",
        "The average of the values; 0 for an empty list.",
        "def mean(values):\n    if not values:\n        return 0\n    return sum(values) / len(values)\n",
        "sum(values) / len(values)",
        "sum(values) / (len(values) - 1)",
        [[[2, 4, 9]], [[1, 2, 3, 4]], [[]], [[10, 20]]],
    ),
    Function(
        "count_words",
        "How many words the text has.",
        "def count_words(text):\n    return len(text.split())\n",
        "text.split()",
        'text.split(" ")',
        [["one  two"], [" a b  c "], [""], ["x\ny z"]],
    ),
    Function(
        "is_leap",
        "Whether the year is a leap year.",
        "def is_leap(year):\n    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)\n",
        "year % 400 == 0",
        "year % 400 != 0",
        [[1900], [2000], [2024], [2023], [2100]],
    ),
    Function(
        "last_items",
        "The last n items; an empty list for n = 0.",
        "def last_items(items, n):\n    return items[len(items) - n :]\n",
        "items[len(items) - n :]",
        "items[-n:]",
        [[[1, 2, 3], 0], [[1, 2, 3], 2], [["a", "b"], 1], [["a"], 0]],
    ),
    Function(
        "clamp",
        "The value, but at least low and at most high.",
        "def clamp(value, low, high):\n    return max(low, min(value, high))\n",
        "max(low, min(value, high))",
        "min(low, max(value, high))",
        [[5, 1, 10], [-3, 0, 8], [99, 0, 8], [4, 4, 4]],
    ),
    Function(
        "count_pairs",
        "How often two neighbours are equal.",
        "def count_pairs(items):\n    total = 0\n    for i in range(len(items) - 1):\n"
        "        if items[i] == items[i + 1]:\n            total += 1\n    return total\n",
        "range(len(items) - 1)",
        "range(len(items) - 2)",
        [[[1, 2, 2]], [[7, 7, 7]], [[1, 2, 3, 3, 5, 5]], [[]]],
    ),
    Function(
        "initials",
        "The first letters of all words, in capitals.",
        'def initials(name):\n    return "".join(word[0].upper() for word in name.split())\n',
        "word[0].upper()",
        "word[0]",
        [["ada lovelace"], ["Grace b hopper"], [""], ["x y z"]],
    ),
    Function(
        "reverse_words",
        "The words in reverse order, joined by one space.",
        'def reverse_words(text):\n    return " ".join(text.split()[::-1])\n',
        "text.split()[::-1]",
        "text[::-1].split()",
        [["red green"], ["one two three"], ["alone"], ["a  b"]],
    ),
    Function(
        "discount",
        "The price less so many percent, rounded to 2 digits.",
        "def discount(price, percent):\n    return round(price * (100 - percent) / 100, 2)\n",
        "(100 - percent) / 100",
        "percent / 100",
        [[50, 10], [80, 25], [19.99, 0], [200, 75]],
    ),
    Function(
        "tally",
        "A dict from item to how often it occurs.",
        "def tally(items):\n    counts = {}\n    for item in items:\n        counts[item] = counts.get(item, 0) + 1\n"
        "    return counts\n",
        "counts.get(item, 0) + 1",
        "counts.get(item, 1) + 1",
        [[["a", "b", "a"]], [[]], [["x"]], [["p", "q", "q", "q"]]],
    ),
    Function(
        "median",
        "The middle value; for an even count the average of the two in the middle.",
        "def median(values):\n    ordered = sorted(values)\n    half = len(ordered) // 2\n    if len(ordered) % 2:\n"
        "        return ordered[half]\n    return (ordered[half - 1] + ordered[half]) / 2\n",
        "ordered[half - 1] + ordered[half]",
        "ordered[half] + ordered[half + 1]",
        [[[4, 1, 3, 2]], [[1, 3, 2]], [[9, 7, 8, 6, 5, 4]], [[2, 8, 4, 6]]],
    ),
)
"""One for each task number of `fix-function`; the last is held out."""

MISSING = (
    Function(
        "double_all",
        "Return a list with every number doubled.",
        "def double_all(numbers):\n    return [2 * number for number in numbers]\n",
        "return [2 * number for number in numbers]",
        "...",
        [[[1, 5]], [[0, -3, 7]], [[]], [[2.5]]],
    ),
    Function(
        "only_even",
        "Return the even numbers of the list, in order.",
        "def only_even(numbers):\n    return [number for number in numbers if number % 2 == 0]\n",
        "return [number for number in numbers if number % 2 == 0]",
        "...",
        [[[1, 2, 4]], [[3, 5]], [[10, 0, 7, 8]], [[]]],
    ),
    Function(
        "shout",
        "Return the text in capitals with an exclamation mark at its end.",
        'def shout(text):\n    return text.upper() + "!"\n',
        'return text.upper() + "!"',
        "...",
        [["hi"], ["good Morning"], [""], ["x1"]],
    ),
    Function(
        "count_vowels",
        "Return how many letters of the lower-case text are a, e, i, o or u.",
        'def count_vowels(text):\n    return sum(letter in "aeiou" for letter in text)\n',
        'return sum(letter in "aeiou" for letter in text)',
        "...",
        [["banana"], ["sky"], ["education"], [""]],
    ),
    Function(
        "to_celsius",
        "Return the Fahrenheit temperature in Celsius, rounded to 1 digit.",
        "def to_celsius(fahrenheit):\n    return round((fahrenheit - 32) * 5 / 9, 1)\n",
        "return round((fahrenheit - 32) * 5 / 9, 1)",
        "...",
        [[212], [32], [100], [-40]],
    ),
    Function(
        "is_palindrome",
        "Return True if the word reads the same backwards, else False.",
        "def is_palindrome(word):\n    return word == word[::-1]\n",
        "return word == word[::-1]",
        "...",
        [["level"], ["house"], ["noon"], ["ab"]],
    ),
    Function(
        "longest",
        "Return the longest word of the list; the first one if several are longest.",
        "def longest(words):\n    return max(words, key=len)\n",
        "return max(words, key=len)",
        "...",
        [[["a", "ccc", "bb"]], [["one", "two"]], [["x"]], [["ab", "abcd", "wxyz"]]],
    ),
    Function(
        "invert",
        "Return a dict with keys and values exchanged.",
        "def invert(mapping):\n    return {value: key for key, value in mapping.items()}\n",
        "return {value: key for key, value in mapping.items()}",
        "...",
        [[{"a": "x"}], [{"k": "v", "m": "n"}], [{}], [{"p": "q", "r": "s", "t": "u"}]],
    ),
    Function(
        "factorial",
        "Return n! for n >= 0.",
        "def factorial(n):\n    result = 1\n    for i in range(2, n + 1):\n        result *= i\n    return result\n",
        "result = 1\n    for i in range(2, n + 1):\n        result *= i\n    return result",
        "...",
        [[5], [0], [1], [9]],
    ),
    Function(
        "without_duplicates",
        "Return the items without repetitions, in the order of their first occurrence.",
        "def without_duplicates(items):\n    return list(dict.fromkeys(items))\n",
        "return list(dict.fromkeys(items))",
        "...",
        [[[3, 1, 3, 2]], [["b", "a", "b"]], [[]], [[5, 5, 5]]],
    ),
    Function(
        "second_largest",
        "Return the second largest of the different numbers.",
        "def second_largest(numbers):\n    return sorted(set(numbers))[-2]\n",
        "return sorted(set(numbers))[-2]",
        "...",
        [[[4, 9, 7]], [[1, 2]], [[5, 5, 3, 1]], [[-1, -2, -3]]],
    ),
)
"""One for each task number of `add-function`; the last is held out."""
