"""Write findings for CI systems: JUnit XML, SARIF 2.1.0, GitHub's annotations."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from xml.etree import ElementTree

from tokentape._version import __version__
from tokentape.audit._report.escaping import escape_invisible as shown


@dataclass(frozen=True, slots=True)
class CiFinding:
    rule: str
    level: Literal["error", "warning"]
    title: str
    text: str
    properties: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CiCase:
    """Something that was checked, with what was found."""

    name: str
    findings: Sequence[CiFinding] = ()
    summary: str = ""
    line: int = 1
    """Where it is in the file that was checked."""
    details: Sequence[str] | None = None
    """Lines for JUnit, if not the texts of the findings."""
    skipped: str = ""
    """Why it was not checked."""


def junit(tool: str, cases: Iterable[CiCase]) -> str:
    """Return JUnit XML: a test case per case, failed if it has an error, or skipped, with what was found."""
    suite = ElementTree.Element("testsuite", name=tool)
    tests = failures = skipped = 0
    for one in cases:
        tests += 1
        case = ElementTree.SubElement(suite, "testcase", classname=tool.replace(" ", "."), name=shown(one.name))
        if one.skipped:
            skipped += 1
            ElementTree.SubElement(case, "skipped", message=shown(one.skipped))
        if not one.findings:
            continue
        lines = [shown(line) for line in one.details or [finding.text for finding in one.findings]]
        many = len(one.findings)
        said = one.summary or f"{many} finding{'s' if many > 1 else ''}"
        if any(finding.level == "error" for finding in one.findings):
            failures += 1
            ElementTree.SubElement(case, "failure", message=shown(said), type="tokens").text = "\n".join(lines)
        else:
            ElementTree.SubElement(case, "system-out").text = "\n".join([shown(said), *lines])
    for name, value in (("tests", tests), ("failures", failures), ("errors", 0), ("skipped", skipped)):
        suite.set(name, str(value))
    ElementTree.indent(suite)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(suite, encoding="unicode") + "\n"


def sarif(tool: str, uri: str, rules: Mapping[str, str], cases: Iterable[CiCase]) -> dict[str, Any]:
    """Return a SARIF 2.1.0 log with a result per finding, in the file or directory `uri`; `rules` have meanings."""
    names = list(rules)
    driver = {
        "name": tool,
        "semanticVersion": __version__,
        "rules": [{"id": rule, "shortDescription": {"text": meaning}} for rule, meaning in rules.items()],
    }
    results = [_result(one, finding, uri, names) for one in cases for finding in one.findings]
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}],
    }


def github(path: str, cases: Iterable[CiCase], most: int = 10) -> Iterator[str]:
    """Yield GitHub's workflow commands: an annotation per finding, up to `most` per case."""
    for one in cases:
        for finding in one.findings[:most]:
            place = f"file={_property(path)},line={one.line},title={_property(finding.title)}"
            yield f"::{finding.level} {place}::{_escaped(shown(finding.text))}"


def ci_report(kind: str, tool: str, uri: str, rules: Mapping[str, str], cases: Sequence[CiCase]) -> str:
    """Return cases in a format: `junit`, `sarif` or `github`."""
    match kind:
        case "junit":
            return junit(tool, cases).rstrip("\n")
        case "sarif":
            return json.dumps(sarif(tool, uri, rules, cases))
    return "\n".join(github(uri, cases))


def _result(case: CiCase, finding: CiFinding, uri: str, rules: Sequence[str]) -> dict[str, Any]:
    place = json.dumps([case.name, finding.rule, finding.properties or finding.text], default=str)
    return {
        "ruleId": finding.rule,
        "ruleIndex": rules.index(finding.rule),
        "level": finding.level,
        "message": {"text": shown(f"{case.name}: {finding.text}")},
        "locations": [
            {
                "physicalLocation": {"artifactLocation": {"uri": uri}, "region": {"startLine": case.line}},
                "logicalLocations": [{"name": case.name, "kind": "element"}],
            }
        ],
        "partialFingerprints": {"tokens/v1": hashlib.sha256(place.encode()).hexdigest()},
        "properties": {key: value for key, value in finding.properties.items() if value is not None},
    }


def _escaped(value: str) -> str:
    return value.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(value: str) -> str:
    return _escaped(shown(value)).replace(":", "%3A").replace(",", "%2C")
