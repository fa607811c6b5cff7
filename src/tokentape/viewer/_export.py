"""Export a session or a run as one HTML file that needs no server: the page with the server's answers.

The answers are compressed and base64-encoded, so prompt text can't become markup. The file's content security policy
allows only its own script and style, by hash.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from urllib.parse import quote

from tokentape.errors import InvalidRequest, TemplateRefused
from tokentape.store._listing import Listing
from tokentape.viewer import _views as views
from tokentape.viewer._comparing import comparison
from tokentape.viewer._routes import MAX_COMPARED, MAX_PAGE, Viewer, Visitor, about_of, listed_lines, progress_of
from tokentape.viewer._run import Measures, run_of
from tokentape.viewer._source import SessionView
from tokentape.viewer._views import FOLDER, pack

MAX_BYTES = 64 * 2**20
"""A run's sessions are added, newest first, until the file is about this large."""

_MAX_KEYS = 8
"""The maximum number of metadata keys to group a run by in the file. Keys with the fewest values are kept."""


@dataclass(frozen=True, slots=True)
class Exported:
    """The file, and numbers of sessions."""

    html: bytes
    whole: int
    """Sessions that are included with their tokens."""
    listed: int
    """Sessions that are listed, with or without their tokens."""
    total: int
    """Sessions in the record."""
    unreadable: int
    """Sessions in the run that can't be read."""


def export_page(viewer: Viewer, session_id: str | None = None, max_bytes: int = MAX_BYTES) -> Exported:
    """Return the file of a session, or of the newest sessions. Raises `NotFound` for an unknown session.

    A named session is exported with all its tokens, whatever its size.
    """
    source, measures = viewer.source, Measures(viewer.source, viewer.reader)
    if session_id is not None:
        source.version(session_id)
    listing = Listing(session_ids=None if session_id is None else [session_id], limit=MAX_PAGE)
    page = source.page(listing)
    versions = source.versions(replace(listing, limit=MAX_COMPARED if session_id is None else 1))
    measured, unreadable = measures.measured(versions)
    about = about_of(viewer, Visitor())
    sides = about["against"][: None if session_id else 1]
    about |= {"grows": False, "overview": False, "exported": True, "only_session": session_id, "against": sides}
    lines = listed_lines(source, measures, page.sessions)
    answers = {"about": about, "sessions": {"total": page.total, "sessions": lines}}
    if session_id is None:
        run = progress_of(measured, unreadable, versions) | {"most": MAX_COMPARED, "cache": None}
        sessions = list(measured.values())
        first = run_of(sessions)
        keys: dict[str, int] = first["keys"]
        # Always keep the key that groups the run by default.
        fewest = sorted(keys, key=lambda key: (key != first["group"], keys[key]))[:_MAX_KEYS]
        for group in ["", *fewest]:
            figures = run_of(sessions, group, aborts_recorded=source.grows)
            figures["keys"] = {key: keys[key] for key in sorted(fewest)}
            answers[f"run?{_percent_encoded(group)}" if group else "run"] = run | figures
    texts = {path: _compressed(views.as_json(answer)) for path, answer in answers.items()}
    room = math.inf if session_id is not None else max_bytes - sum(map(len, texts.values()))
    whole = 0
    for summary in page.sessions:
        if session_id is None and summary.info.session_id in unreadable:
            continue
        session_texts = _within(_of_session(viewer, source.load(summary.info.session_id), sides), room)
        if session_texts is None:
            break
        texts |= session_texts
        room -= sum(map(len, session_texts.values()))
        whole += 1
    return Exported(_page(texts), whole, len(page.sessions), page.total, len(unreadable))


def _within(answers: Iterator[tuple[str, bytes]], room: float) -> dict[str, str] | None:
    """Return compressed answers, or None if they take more than `room` bytes."""
    texts: dict[str, str] = {}
    for path, body in answers:
        texts[path] = _compressed(body)
        room -= len(texts[path])
        if room < 0:
            return None
    return texts


def _compressed(body: bytes) -> str:
    return base64.b64encode(zlib.compress(body)).decode()


def _of_session(viewer: Viewer, view: SessionView, sides: list[str]) -> Iterator[tuple[str, bytes]]:
    path = f"sessions/{_percent_encoded(view.info.session_id)}"
    tokenizer = viewer.reader.tokenizer
    yield path, views.as_json(views.tree(view))
    for trajectory in view.trajectories:
        leaf = f"{path}/leaves/{trajectory.leaf}"
        yield leaf, pack(*views.trajectory(view, trajectory, tokenizer))
        for side in sides:
            try:
                yield f"{leaf}/comparison?{side}", comparison(viewer.reader, view, trajectory, side)
            except (InvalidRequest, TemplateRefused):
                # If the template refuses these messages, the page says that the file lacks the comparison.
                continue
    for turn in view.turns:
        recorded = views.alternatives(view, turn.seq, tokenizer)
        if recorded:
            yield f"{path}/turns/{turn.seq}/alternatives", views.as_json({"alternatives": recorded})


def _page(answers: dict[str, str]) -> bytes:
    script, style = _bundle(), (FOLDER / "style.css").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    page = (FOLDER / "index.html").read_text(encoding="utf-8")
    page = re.sub(r"\s*<(link|script)\b[^>]*>(</script>)?", "", page)
    # Paths are percent-encoded (except `'()*!~.-_`) and values are base64, so neither contains `<`.
    data = f'<script type="application/json" id="answers">{json.dumps(answers)}</script>'
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}" /><style>{style}</style>'
    page = page.replace("<title>", f"{head}\n    <title>")
    return page.replace("</body>", f'{data}<script type="module">{script}</script></body>').encode()


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _bundle() -> str:
    """Return the page's modules as one script, in which each module is a function that returns its exports."""
    modules: dict[str, str] = {}

    def add(name: str) -> None:
        text = (FOLDER / name).read_text(encoding="utf-8")
        for imported in re.findall(r'^import .*? from "\./(.*?)";$', text, re.MULTILINE):
            if imported not in modules:
                add(imported)
        text = re.sub(r'^import (\{.*?\}) from "\./(.*?)\.js";$', r"const \1 = $\2;", text, flags=re.MULTILINE)
        exported = re.findall(r"^export (?:async )?(?:function|class|const) (\w+)", text, re.MULTILINE)
        text = re.sub(r"^export ", "", text, flags=re.MULTILINE)
        variable = "$" + name.removesuffix(".js")
        modules[name] = f"const {variable} = (() => {{\n{text}\nreturn {{ {', '.join(exported)} }};\n}})();\n"

    add("app.js")
    return "".join(modules.values())


def _percent_encoded(text: str) -> str:
    """Percent-encode text as the page's encodeURIComponent does."""
    return quote(text, safe="-_.!~*'()", errors="replace")
