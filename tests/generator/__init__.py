"""Generate chat templates, tokenizers and conversations; judge the product by an oracle that shares no code with it.

    python -m tests.generator --templates 1000 --seed 2 --out found.jsonl      # goes on where it was stopped
    python -m tests.generator --templates 50 --seed 1 --causes                 # reduce what is of no known class
    python -m tests.generator --case 1:17                                      # one case: its template and findings
    python -m tests.generator --case 1:17 --only 'html=tags'                   # with its other options at defaults

A *case* is one template with one tokenizer, drawn from a seed and an index (`options`). Three of four templates are
composed (`compose`), the fourth is a real one with some changes (`mutate`): one of the repository's, with even seeds
also one from beside it (`TOKENTAPE_TOKENIZERS`, default ../shared/tokenizers). Its tokenizer is trained for it
(`vocabularies`), and the conversations repeat strings that the template looks for (`conversations`). The product
(`product`) is then held against transformers' rendering and plain `tokenizers` encodings (`oracle`, `replies`) by the
`judge`, which reports claims that are false:

- prompt ids, bridge ids, wrong bridge: not what the template writes
- false local: the certificate says that history does not matter, and it does
- needless fork, needless contextual: it says that history matters, and none tried does
- false append-only: ids change that it says are kept
- false refusal, not certified: transformers renders it, and the new messages reach the model
- exception in parser, false claim of parsing, reply depends on how it is cut
- stop within turn: a token is taken for a stop that the template itself writes within a turn
- injection: callers' text yields control tokens
- message lost, wrong bridge after a truncated reply

Each kind of finding is *reduced* to the fewest options that show it (`causes`). The classes known today are in
known_failures.json; each is a strict expected failure (`test_known_failures`, `make test-slow`): when a change mends
one, its test fails, and the entry is to be deleted. A finding is of a known class if it is of its kind and its case has
the class's options. One that is of none fails the run over 50 templates: mend it, or list it with `--update-known`.
Products with a planted fault each (`planted`) show that the oracle can fail.
"""
