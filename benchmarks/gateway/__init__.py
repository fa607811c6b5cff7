"""Measure what gateways cost: Tokentape and its peers with the same mock vLLM server, in turns.

python -m benchmarks.gateway --help
"""
