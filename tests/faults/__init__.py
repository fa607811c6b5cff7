"""The fault matrix: each test injects one fault, then checks the record against the replies that clients received.

`docs/reliability.md` lists the rows. Everything here goes over real sockets: the official client, the whole gateway,
the vLLM engine, and a planned stand-in for vLLM (`upstream.py`).
"""
