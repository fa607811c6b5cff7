"""Run the gateway on Ray Serve, and process large sets of files with Ray Data. See docs/how-to/ray.md.

Needs the extra `ray`. Ray is imported when one of these functions is called.
"""

from tokentape.ray._data import audit_corpus, drift, export
from tokentape.ray._serving import app, gateway_app

__all__ = ["app", "audit_corpus", "drift", "export", "gateway_app"]
