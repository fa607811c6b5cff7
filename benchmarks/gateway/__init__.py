"""What a gateway costs: Tokentape and its peers in front of the same stand-in for vLLM, measured in turn.

python -m benchmarks.gateway --help
"""
