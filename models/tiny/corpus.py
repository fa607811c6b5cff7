"""The text that the tokenizer is trained on: all written for this model, by hand or by the functions below.

Words and prose are ours, so the vocabulary can be published under the project's licence. The prose is there to
make a vocabulary that looks like a real one (common English words, JSON, code), not to teach the model anything.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator


def _words(text: str) -> list[str]:
    return text.split()


VERBS = _words(
    """
accept act add agree allow answer appear apply argue arrange arrive ask attach avoid bake balance behave
believe belong blend boil borrow bounce brush build burn call care carry catch change charge check choose
claim clean clear climb close collect colour compare complain complete connect consider contain continue cook
copy correct cost count cover crack create cross cut dance decide deliver depend describe design destroy
develop discover discuss divide doubt draw dream dress drink drive drop earn eat encourage end enjoy enter
escape exchange exist expect explain explore face fail fall feed feel fetch fight fill find finish fit fix
float flow fold follow force forget form gather give grow guard guess guide handle hang happen hear help hide
hire hold hope hunt hurry imagine improve include increase inform insist intend introduce invent invite join
judge jump keep kick kiss knock know land last laugh lead learn leave lend lift light like limit link listen
live load lock look lose love make manage mark match matter mean measure meet melt mend mention mind miss mix
move multiply name need notice obey observe offer open order owe own pack paint park pass pay perform pick
plan plant play point polish pour practise prefer prepare present press pretend prevent produce promise
protect prove provide pull push put question quote raise reach read realise reason receive reckon record
reduce refuse remember remind remove rent repair repeat replace reply report request rescue rest return ride
ring rise roll rush sail save say scatter search seem sell send separate serve set settle shake share shine
shop shout show shut sign sing sit sleep slide slip smell smile solve sort sound speak spell spend spill split
spread stand start stay steal step stick stir stop store stretch study subtract succeed suffer suggest suit
supply support suppose surprise surround swim switch take talk taste teach tear tell test thank think throw
tie touch train translate travel treat trust try turn type understand use value visit wait wake walk want warn
wash waste watch wear weigh welcome whisper win wish wonder work worry wrap write yield
"""
)

NOUNS = _words(
    """
account address afternoon age air amount angle animal apple area argument arm autumn baby back bag baker ball
bank bar basket bath beach bear bed bell bird birthday board boat body book bottle box boy branch bread
breakfast bridge brother bucket building bus butcher butter button cake camera candle captain car card cat
cause century chain chair chance chapter child choice church circle city class clock cloth cloud coast coat
coffee coin column corner country course cow crowd cup curve customer daughter day decade degree desk detail
dinner direction discount doctor dog door dozen drawer dress dust ear earth east edge effect egg engine error
evening event example expert eye fact factory family farm farmer father feather field figure film finger fire
fish flag floor flour flower food foot forest fork frame friend fruit function future game garden gate gift
girl glass glove goat gold grain grass ground group guest half hall hand harbour hat head heart heat hedge
hill history hole holiday home honey horse hospital hour house idea inch ink insect island jacket jar jelly
job journey juice key kitchen kite knee knife ladder lady lake lamp language law leaf leg lesson letter
library line lion list loaf lunch machine market meal meat medicine message metal middle milk mill minute
mirror mistake model moment money month moon morning mother mountain mouse mouth museum music nail neck needle
neighbour nest network news night noise north nose note nothing number nurse object ocean office oil pack page
pair paper parent part party path pattern pen pencil people person phone picture piece pipe place plate pocket
poem police pool position potato pound price prize problem product program queen rain range rate recipe result
rice river road roof room root rope rose row rule sack salad salt sand sauce scale school science sea season
seat seed sense sentence shape sheep shelf ship shirt shoe shopkeeper shoulder side silver sister size skin
sky smoke snow soap soil soldier son song soup south space spoon spring square stage stairs stamp star state
station stone story stranger street string student sugar summer sun table tail tax tea teacher team tent thing
thousand ticket time token tongue tool tooth top total tower town toy track trade tree trip truth uncle valley
vegetable village voice wall war water wave way week weight west wheat wheel wife wind window wing winter
woman wood word world year
"""
)

ADJECTIVES = _words(
    """
able afraid angry asleep average bad beautiful best better big bitter black blue brave brief bright broad
broken brown busy calm careful cheap clever cold common complete cool correct cruel curious dark dead dear
deep different difficult dirty dry early easy empty equal exact expensive fair false famous far fast fat fine
first flat foreign free fresh friendly full funny general gentle glad good great green grey handsome happy
hard healthy heavy high hollow honest hot huge hungry important kind large late lazy light likely little local
lonely long loose loud low lucky many modern narrow natural near neat new nice noisy normal old only open
orange ordinary own patient perfect plain pleasant polite poor possible pretty private proper proud public
pure quick quiet rare raw ready real recent red rich right ripe rough round sad safe salty same secret serious
several sharp short shy sick silent similar simple single slow small smooth soft sour special steep straight
strange strict strong sudden sure sweet tall tender thick thin tidy tight tiny tired total true ugly unknown
useful usual warm weak wet whole wide wild wise wooden wrong yellow young
"""
)

FUNCTION_WORDS = _words(
    """
the a an this that these those some any every each all both either neither no none one two three four five six
seven eight nine ten eleven twelve twenty thirty hundred and or but because although if when while until since
before after as than so not never always often sometimes usually rarely again already still yet soon later now
then here there where why how what which who whose in on at by for from to into onto over under above below
between among through across along around behind beside beyond during without within against about of off out
up down with is are was were be been being has have had having do does did doing will would can could shall
should may might must I you he she it we they me him her us them my your his its our their mine yours ours
theirs myself itself themselves very too quite rather almost enough more most less least much just also even
perhaps maybe please yes well however therefore instead together apart away today tomorrow yesterday twice
once
"""
)

PROSE = """
A shop opens early in the morning, when the streets are still wet and the baker has already been at work for hours.
The first customers want bread; later come those who want fruit, and by noon nobody remembers who was first.
What does it cost? That depends on the season, on the weather in another country, and on how much is left in the box.
The shopkeeper keeps a list. Prices change, so she writes them in pencil, and she never trusts her memory with them.
"If you don't know, look it up," she says. "If you can't reckon it in your head, use the machine. Then say it once."

A language model reads and writes tokens. A token is a piece of text: a word, a part of a word, a digit, a sign.
The same text can be cut into pieces in more than one way, and a model that samples may cut it in a way that nobody
would have chosen. Decode the pieces and you get the text; encode the text and you may get other pieces. Most of the
time it does not matter. When you train on what the model did, it does: the pieces are what it did.

Dear reader, there's little to be learnt from these lines. They're here so that common words get tokens of their own.
It's a habit of the trade: we count the pairs of letters that appear together most often, we join them, and we
count again. After some thousands of rounds the result is a vocabulary. It isn't clever, but it works well enough.

Once upon a time a farmer had three daughters and a field of turnips. The eldest could count, the second could write,
and the youngest asked questions. "How many turnips are there?" she asked. "Nine hundred and twelve," said the eldest.
"I've written it down," said the second. "And what if one of them is a stone?" asked the youngest. They went to look.

The train leaves at seven and arrives at half past nine; a ticket costs fourteen crowns, or twenty-five for two.
We'd better hurry: the station is on the other side of the river, and the bridge has been closed since Tuesday.
In the north the winters are long. People mend their nets, tell old stories, and wait for the ice to break.
First wash the potatoes, then peel them and cut them into small pieces. Boil them in salted water for twenty minutes.
Meanwhile, fry the onions slowly in butter until they're soft and golden. Stir everything together; add pepper.

An experiment should be repeated, by somebody else if possible, with the same numbers at the end. Write down what you
measured, how you measured it, and what you left out. A figure without its unit is a rumour. A table is a promise.
If two instruments disagree, the fault may lie in the first, in the second, or in the way in which they are read.
"""

CODE = """
def add(first: int, second: int) -> int:
    \"\"\"Return the sum of two numbers.\"\"\"
    return first + second

for item in items:
    if item.price is None:
        raise ValueError("no price for this item")
    total += item.price * item.count
print(f"total: {total}")

import json
with open("prices.json", encoding="utf-8") as file:
    prices = json.load(file)
while True:
    try:
        name, value = line.split("=", 1)
    except ValueError:
        continue
class Basket:
    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.items: list[str] = []
"""


def inflections(verb: str) -> list[str]:
    """Regular forms of a verb: right often enough to make a vocabulary from."""
    if verb.endswith("e"):
        return [verb, f"{verb}s", f"{verb}d", f"{verb[:-1]}ing"]
    return [verb, f"{verb}s", f"{verb}ed", f"{verb}ing"]


def filler(seed: int, sentences: int) -> Iterator[str]:
    """Grammatical nonsense over the word lists, the more common words being the more frequent ones."""
    rng = random.Random(seed)

    def noun_phrase() -> str:
        noun = rng.choice(NOUNS)
        noun = f"{noun}s" if rng.random() < 0.3 else noun
        return " ".join([rng.choice(FUNCTION_WORDS[:16]), *rng.choices(ADJECTIVES, k=rng.randint(0, 2)), noun])

    for _ in range(sentences):
        verb = rng.choice(inflections(rng.choice(VERBS)))
        words = [noun_phrase(), *rng.choices(FUNCTION_WORDS, k=rng.randint(0, 2)), verb]
        words += [noun_phrase(), *rng.choices(FUNCTION_WORDS, k=rng.randint(0, 1)), noun_phrase()]
        sentence = " ".join(words)
        yield sentence[0].upper() + sentence[1:] + rng.choice(".....?!;:") + rng.choice(" \n")


def records(seed: int, count: int) -> Iterator[str]:
    """JSON objects with short keys, so that their punctuation gets tokens as in a real vocabulary."""
    rng = random.Random(seed)
    for _ in range(count):
        record: dict[str, object] = {
            rng.choice(NOUNS): rng.choice([rng.randint(0, 999), rng.choice(NOUNS), True, None, []])
        }
        yield json.dumps({"name": rng.choice(NOUNS), "arguments": record}) + "\n"


def corpus(seed: int) -> Iterator[str]:
    """Everything but the conversations, which the caller adds."""
    yield from [PROSE] * 20
    yield from [CODE] * 10
    yield from filler(seed, 20_000)
    yield from records(seed, 1_000)
