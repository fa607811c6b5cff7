"""The replacement task: one word of a sentence is to be replaced, all else is to stay.

After the tokenization-consistency probe of arXiv 2601.14658, whose sentences and wordings are not published; these are
ours. The sentences are chosen so that every phantom-edit class has words that can show it.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokentape.errors import InvalidRequest
from tokentape.types import Message

WORDINGS = {
    "another word": (
        'Replace the word "{target}" in the text below with another word of your choice. Change nothing else. Answer '
        "with the whole text only.\n\n{text}"
    ),
    "similar word": (
        'In the following text, put a different word with a similar meaning in place of "{target}", and keep every '
        "other character as it is. Write out the complete text and nothing besides.\n\n{text}"
    ),
}
"""How the task is put, by name."""

_TEXTS = """
The meeting was moved to the last week of [February] because of the snow.
We will publish the first results on [Saturday] if all goes well.
The bridge was closed. [However] the ferry was running all night.
She told an [unbelievable] story about a whale and a lighthouse.
He had [repaid] every coin that he ever borrowed from his brother.
The old [Dormer] house at the end of the lane was sold in spring.
Doctors in the clinic test for [HIV] before the treatment begins.
The new law protects the [rights] of people who work at night.
My neighbour [Katarzyna] plays the cello on the roof in summer.
The [NASA] engineers listened to the signal for eleven days.
Their [misunderstanding] about the key lasted for twenty years.
A small [preheated] oven is all you need for this bread.
The [children's] garden had more beans than anyone could eat.
All [passengers] must show a ticket before they leave the train.
The council will [reconsider] the plan for the harbour in May.
There was a [counterintuitive] reason for the missing apples.
It rained in [Reykjavik] on the day that the choir arrived.
The [UNESCO] list has a mill that still grinds by hand.
The river is [frozen] from the mill down to the second lock.
Please put the [envelope] on the table beside the blue lamp.
The teacher found [seventeen] mistakes in the printed timetable.
A [dishonest] merchant sold them water from the same well.
The report was [handwritten] and nobody could read the third page.
The [Montgomery] family has kept bees here since the war.
He measured the [thickness] of the ice with a wooden ruler.
The museum bought two [paintings] that had hung in a barn.
The [GDP] of the island fell when the cannery was closed.
The [overwhelming] smell of varnish filled the whole staircase.
She answered [immediately] although the letter had no stamp.
The cat slept on the [windowsill] until the sun had gone.
They crossed the [Atlantic] in a boat without an engine.
The [neighbourhood] was quiet after the tram stopped running.
In [November] the lamps along the canal are lit at four.
The [photographer] waited for the fog to lift from the field.
The soup needs [parsley] and a little more salt than that.
The judge called the contract [unenforceable] and went home.
""".strip()


@dataclass(frozen=True, slots=True)
class Trial:
    """One task."""

    name: str
    """Names it in the results: a digest of everything that it is made of."""
    before: str
    target: str
    after: str
    wording: str
    """One of `WORDINGS`."""
    repetition: int
    """Number of the sample; at temperature 0 there is one."""

    @property
    def text(self) -> str:
        """The sentence as it stands in the prompt."""
        return self.before + self.target + self.after

    @property
    def messages(self) -> tuple[Message, ...]:
        """What the model is asked."""
        asked = WORDINGS[self.wording].format(target=self.target, text=self.text)
        return ({"role": "user", "content": asked},)


def built_in() -> list[tuple[str, str, str]]:
    """The sentences that come with Tokentape: (before, target, after)."""
    return [_split(line) for line in _TEXTS.splitlines()]


def read_texts(path: str | Path, *, words: int = 1, seed: int = 0) -> list[tuple[str, str, str]]:
    """Sentences of a file, one a line: (before, target, after).

    A line has its target in square brackets, or is JSON with `text` and `target`; from any other line up to `words`
    words of four or more letters that occur once are drawn, the same ones for the same seed.

    Raises `InvalidRequest` if a line has a target that it does not hold, or no line has one, or it is not UTF-8.
    """
    found: list[tuple[str, str, str]] = []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise InvalidRequest(f"{path} is not UTF-8 text") from None
    for number, line in enumerate(lines, 1):
        line = line.strip()
        if not line:
            continue
        if line.startswith("{"):
            found.append(_of_json(line, f"{path}, line {number}"))
        elif re.search(r"\[[^\[\]\s]+\]", line):
            found.append(_split(line))
        else:
            found += _drawn(line, words, random.Random(f"{seed} {line}"))
    if not found:
        raise InvalidRequest(f"{path} has no sentence with a word to replace: write one a line, the word in [brackets]")
    return found


def trials(
    texts: Sequence[tuple[str, str, str]], *, wordings: Sequence[str] = tuple(WORDINGS), repetitions: int = 1
) -> Iterator[Trial]:
    """Every text in every wording, so many times."""
    for repetition in range(repetitions):
        for wording in wordings:
            for before, target, after in texts:
                parts = [before, target, after, WORDINGS[wording], repetition]
                name = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
                yield Trial(name, before, target, after, wording, repetition)


def _split(line: str) -> tuple[str, str, str]:
    before, _, rest = line.partition("[")
    target, _, after = rest.partition("]")
    return before, target, after


def _of_json(line: str, where: str) -> tuple[str, str, str]:
    try:
        fields = json.loads(line)
        text, target = fields["text"], fields["target"]
        before, found, after = text.partition(target)
    except (ValueError, LookupError, TypeError, AttributeError):
        raise InvalidRequest(f'{where} is not {{"text": …, "target": …}}') from None
    if not (target and found):
        raise InvalidRequest(f"{where}: the target is not in the text")
    return before, target, after


def _drawn(line: str, words: int, chance: random.Random) -> Iterator[tuple[str, str, str]]:
    matches = [
        match
        for match in re.finditer(r"(?<=\s)[^\W\d_]{4,}\b", line)
        if len(re.findall(re.escape(match[0]), line)) == 1
    ]
    for match in sorted(chance.sample(matches, min(words, len(matches))), key=lambda one: one.start()):
        yield line[: match.start()], match[0], line[match.end() :]
