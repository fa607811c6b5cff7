"""Write findings for CI systems: JUnit XML, SARIF 2.1.0, GitHub's annotations."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from xml.etree import ElementTree

from tokentape._version import __version__
from tokentape.audit._report.blocks import escape_invisible as shown

_MOST_ANNOTATIONS = 10
"""The largest number of annotations per case."""


@dataclass(frozen=True, slots=True)
class CiFinding:
    rule: str
    level: Literal["error", "warning"]
    title: str
    text: str
    properties: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CiCase:
    """One check with its findings."""

    name: str
    findings: Sequence[CiFinding] = ()
    summary: str = ""
    line: int = 1
    """The case's line in the checked file."""
    details: Sequence[str] | None = None
    """Lines for JUnit; if None, the texts of the findings."""
    skipped: str = ""
    """The reason if the check was skipped."""


def ci_report(
    kind: str,
    tool: str,
    uri: str,
    rules: Mapping[str, str],
    cases: Iterable[CiCase],
    fail_on: Literal["error", "warning"] = "error",
) -> str:
    """Return cases in the format `kind`: `junit`, `sarif` or `github`.

    `uri` is the checked file or directory, `rules` maps each rule to its meaning, and `fail_on` is the lowest level
    that fails a JUnit test case, as it fails the command.
    """
    match kind:
        case "junit":
            return _junit(tool, cases, fail_on)
        case "sarif":
            return json.dumps(_sarif(tool, uri, rules, cases))
    return "\n".join(_github(uri, cases))


def _junit(tool: str, cases: Iterable[CiCase], fail_on: str) -> str:
    """Return JUnit XML with a test case per case, which is failed, skipped or passed, with the case's findings."""
    suite = ElementTree.Element("testsuite", name=tool)
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for one in cases:
        counts["tests"] += 1
        case = ElementTree.SubElement(suite, "testcase", classname=tool.replace(" ", "."), name=shown(one.name))
        if one.skipped:
            counts["skipped"] += 1
            ElementTree.SubElement(case, "skipped", message=shown(one.skipped))
        if not one.findings:
            continue
        lines = [shown(line) for line in one.details or [finding.text for finding in one.findings]]
        many = len(one.findings)
        said = shown(one.summary or f"{many} finding{'s' if many > 1 else ''}")
        if any(finding.level in ("error", fail_on) for finding in one.findings):
            counts["failures"] += 1
            ElementTree.SubElement(case, "failure", message=said, type="tokens").text = "\n".join(lines)
        else:
            ElementTree.SubElement(case, "system-out").text = "\n".join([said, *lines])
    suite.attrib.update({name: str(value) for name, value in counts.items()})
    ElementTree.indent(suite)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(suite, encoding="unicode")}'


def _sarif(tool: str, uri: str, rules: Mapping[str, str], cases: Iterable[CiCase]) -> dict[str, Any]:
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


def _github(path: str, cases: Iterable[CiCase]) -> Iterator[str]:
    for one in cases:
        for finding in one.findings[:_MOST_ANNOTATIONS]:
            place = f"file={_property(path)},line={one.line},title={_property(finding.title)}"
            yield f"::{finding.level} {place}::{_escaped(shown(finding.text))}"


def _escaped(value: str) -> str:
    return value.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(value: str) -> str:
    return _escaped(shown(value)).replace(":", "%3A").replace(",", "%2C")
