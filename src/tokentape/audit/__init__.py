"""Audits of tokenization: skew, drift, lockfiles, comparison of ids, scoring, probes, token costs of languages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokentape._lazy import lazy_names

if TYPE_CHECKING:
    from tokentape.audit._byte_level import Bounds, Price, Spellings, TransformersModel, bytes_logprob, price
    from tokentape.audit._drift.meter import measure_drift
    from tokentape.audit._drift.report import DriftReport
    from tokentape.audit._drift.rerender import with_objects
    from tokentape.audit._id_rows import Columns, IdRow, Span, iter_rows
    from tokentape.audit._lock import Lock, LockReport, check, make_lock, read_lock, write_lock
    from tokentape.audit._premium import Premium, measure_premium, read_corpus
    from tokentape.audit._probe.running import ProbeResult, ProbeSettings, run_trials
    from tokentape.audit._probe.trials import read_texts, trials
    from tokentape.audit._scoring import ScoreReport, open_and_score, recorded_sessions
    from tokentape.audit._skew.auditor import audit
    from tokentape.audit._skew.backends import Backend, BackendFacts, BackendOptions, Rendering, SkewChat, open_backend
    from tokentape.audit._skew.findings import AuditReport, Skew
    from tokentape.audit._statistics import Numbers, logprob_numbers
    from tokentape.audit._tokendiff.comparing import Comparison, Difference, compare
    from tokentape.audit._tokendiff.retokenizing import pair_ids, retokenized

__all__ = [
    "AuditReport", "Backend", "BackendFacts", "BackendOptions", "Bounds", "Columns", "Comparison", "Difference",
    "DriftReport", "IdRow", "Lock", "LockReport", "Numbers", "Premium", "Price", "ProbeResult", "ProbeSettings",
    "Rendering", "ScoreReport", "Skew", "SkewChat", "Span", "Spellings", "TransformersModel", "audit",
    "bytes_logprob", "check", "compare", "iter_rows", "logprob_numbers", "make_lock", "measure_drift",
    "measure_premium", "open_and_score", "open_backend", "pair_ids", "price", "read_corpus", "read_lock",
    "read_texts", "recorded_sessions", "retokenized", "run_trials", "trials", "with_objects", "write_lock",
]  # fmt: skip

__getattr__ = lazy_names(__name__)
