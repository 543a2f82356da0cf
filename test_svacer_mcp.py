#!/usr/bin/env python3
"""Tests of svacer_mcp, with a strict fake Svacer server on a real socket and its demo data.

Run with pytest. As a script, `test_svacer_mcp.py serve` keeps the fake server up on a port.
"""
from __future__ import annotations

import argparse
import base64
import functools
import gzip
import http.client
import io
import itertools
import json
import math
import os
import re
import select
import socket
import socketserver
import ssl
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

import pytest

import svacer_mcp

Marker = dict[str, Any]
Args = Mapping[str, str]

# ---- Demo data -----------------------------------------------------------------------------------

BASH = "91630e84-db2f-4d8c-8716-68b7fdf17a66"
BASH_MASTER = "77f66b9e-0453-4ae9-a187-88950b4c4bc4"
CRITICAL = "a3f21c90-1d4e-4b82-9f63-7c8e5d2a1b09"  # bash's one confirmed critical marker
MKTEMP = "e05bb35b-a95e-4eb2-85ae-3101b788f07d"  # the first marker of bash's latest snapshot
PAHO_NEW = "b42cb563-86f4-4f96-900a-7782163327c9"
PAHO_OLD = "72b3df7b-c15a-4e3d-8f92-a041dc6e5b87"
LINUX_TOOLS = "c4f8a2d1-3b7e-4f90-82ac-1d5e8f2b6c04"


def uid(*parts: object) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_URL, "/".join(map(str, parts))))


BASH_LATEST = uid("bash", "latest")
COREUTILS = "d3a17f52" + uid("coreutils")[8:]
EXECUTE_CMD = "/.build/execute_cmd.c"
GROUPS = {(LINUX_TOOLS, "Linux Tools"): {BASH: "bash", COREUTILS: "coreutils"}}


@dataclass
class Snapshot:
    name: str
    markers: Iterable[Marker] = ()
    time: str = "2021-12-14T10:00:00Z"
    properties: Any = None
    id: str = ""
    sources: dict[str, str] = field(default_factory=dict)


@dataclass
class Branch:
    """A branch and the project it belongs to; ids that are not given depend on names and places."""
    project: str
    snapshots: Sequence[Snapshot]
    about: dict[str, Any] = field(default_factory=lambda: {"created_by": "admin"})
    name: str = "master"
    project_id: str = ""
    id: str = ""

    def __post_init__(self) -> None:
        self.project_id = self.project_id or uid(self.project)
        self.id = self.id or uid(self.project, self.name)
        for place, each in enumerate(self.snapshots):
            each.id = each.id or uid(self.project, self.name, place)
            if not isinstance(each.markers, Synthetic):
                each.markers = [{"id": uid(each.id, n), **m} for n, m in enumerate(each.markers)]


def marker(checker: str, file: str, line: int, msg: str, **more: Any) -> Marker:
    """All that a server may send of a marker, but for its id."""
    found = uid(checker, file, more.get("function"), msg)
    return {
        "invariant": found.replace("-", ""), "warnClass": checker, "file": file, "line": line,
        "msg": msg, "tool": "SVACE", "mtid": found[:8], "lang": "C", "checker_severity": "Major",
        "checker_labels": [], "traces": [{"file": file, "line": line, "msg": "It is found here."}],
        "checkerInfo": {"description": f"What {checker} looks for.", "cwe": ["CWE-476"]}, **more,
    }


FILES = ("src/main.c", "src/util.c", "src/net/socket.c", "src/a+b[1].c", "src/КАПЧА.c")
MESSAGES = {
    "PROC_USE": "Use of a vulnerable function, call {n}.",
    "UNREACHABLE_CODE": "The statement {n} cannot be reached.",
    "DEREF_AFTER_NULL": "Pointer 'p{n}' is dereferenced after it was compared with NULL.",
    "NULL_AFTER_DEREF": "Pointer 'p{n}' is compared with NULL after it was dereferenced.",
    "MEMORY_LEAK": "Утечка памяти: 'p{n}' не освобождается при выходе из функции.",
}
OTHERS = (
    "BUFFER_OVERFLOW.EX", "CHECK_AFTER_OVERFLOW", "DEAD_STORE", "DEREF_OF_NULL.RET", "HANDLE_LEAK",
    "DIVISION_BY_ZERO", "INFINITE_LOOP", "INTEGER_OVERFLOW", "MEMORY_LEAK.EX", "FREE_OF_ALIAS",
    "NO_CAST.INTEGER_OVERFLOW", "OVERFLOW_AFTER_CHECK.EX", "PASSED_TO_PROC_AFTER_FREE",
    "PROC_USE.RAND", "SIGNED_TO_BIGGER_UNSIGNED", "TAINTED_INT.LOOP", "UNCHECKED_FUNC_RES.STAT",
    "UNINIT.LOCAL_VAR", "USE_AFTER_FREE",
)
UNREVIEWED: tuple[Marker, ...] = (  # the ways in which servers say that there is no review
    {"review": None}, {}, {"review": {}}, {"review": {"status": "", "severity": "", "action": ""}},
    {"review": {"status": "Undecided", "severity": "Unspecified", "action": "Undecided"}},
)


def finding(n: int, checker: str = "", shift: int = 0) -> Marker:
    """The n-th made-up marker; `shift` moves it to another line."""
    checker = checker or OTHERS[n % len(OTHERS)]
    text = MESSAGES.get(checker.partition(".")[0], "Suspicious value of 'v{n}'.").format(n=n)
    function = {"function": f"do_step_{n % 89}"} if n % 17 else {}
    return marker(checker, f"/.build/{FILES[n % len(FILES)]}", 40 + n * 7 % 3000 + shift, text,
                  **function, **UNREVIEWED[n // 3 % len(UNREVIEWED)])


VULNERABLE = (  # sub-class, file, line, function called, function that calls it, advice
    (".TEMP", "lib/sh/tmpfile.c", 160, "mktemp", "sh_mktmpname", "A race, use 'mkstemp'."),
    (".GETENV", "lib/readline/shell.c", 151, "getenv", "sh_get_env_value", "It can be replaced."),
    ("", "shell.c", 415, "getenv", "main", "The value can be replaced."),
    ("", "lib/readline/complete.c", 1516, "getenv", "find_word", "The value can be replaced."),
    (".STRCAT", "lib/sh/eaccess.c", 115, "strcat", "sh_stat", "Use 'strncat'."),
    (".STRCPY", "lib/glob/glob.c", 402, "strcpy", "glob_vector", "Use 'strncpy'."),
)
BASH_CHECKERS = {  # how many markers there are besides those above, and the review of the first
    "PROC_USE.VULNERABLE": (335, {}),
    "UNUSED_FUNC_RES.REWRITE.MINOR": (44, {}),
    "UNREACHABLE_CODE": (28, {"status": "Won't fix", "severity": "Major", "action": "Ignore"}),
    "DEREF_AFTER_NULL.EX": (27, {"status": "Unclear"}),
    "NULL_AFTER_DEREF": (27, {"status": "False Positive", "severity": "", "action": "Undecided"}),
}


def bash_markers() -> list[Marker]:
    rows = []
    for kind, file, line, called, function, advice in VULNERABLE:
        place = f"{PurePosixPath(file).name}:{line}"
        text = f"Use of vulnerable function '{called}' at {place}. {advice}"
        rows.append(marker(f"PROC_USE.VULNERABLE{kind}", f"/.build/{file}", line, text,
                           function=function, review=None))
    rows[0]["id"] = MKTEMP
    for checker, (count, review) in BASH_CHECKERS.items():
        rows += [finding(n, checker) for n in range(count)]
        rows[-count]["review"] = review
    when = "2021-12-13T14:00:00Z"
    rows.append(marker(
        "DEREF_AFTER_NULL.LOOP", EXECUTE_CMD, 3327,
        "Possible null pointer dereference of 'l' after loop exit.",
        id=CRITICAL, function="select_query",
        review={"status": "Confirmed", "severity": "Critical"},
        review_history=[{"status": "Confirmed", "changed_by": "admin", "changed_at": when}],
        traces=[{"file": EXECUTE_CMD, "line": 3320,
                 "msg": "Loop starts here; 'l' may exhaust the list."}],
        comments=[{"text": "Проверено вручную", "author": "admin", "time": when}]))
    return rows + [finding(n) for n in range(771 - len(rows))]


def execute_cmd_c() -> str:
    lines = [f"/* line {n} */" for n in range(1, 6083)]
    lines[0] = "/* Выполнение команд */"
    lines[3324] = " for (l = list; l && --reply; l = l->next)"
    lines[3325:3327] = "\t;", " return (l->word->word);"
    return "\n".join(lines) + "\n"


@functools.cache
def demo() -> list[Branch]:
    """The documentation's projects, shared by all tests. Snapshots are not sorted by time."""
    def few(name: str, count: int, *more: Any) -> Snapshot:
        return Snapshot(name, map(finding, range(count)), *more)

    bash = [
        few("initial", 40, "2021-12-13T13:22:58.100201Z"),
        Snapshot("e20758f0 - Mon, 13 Dec 2021 13_23_41  0300.snap", bash_markers(),
                 "2021-12-13T13:23:41.508117Z", id=BASH_LATEST,
                 sources={EXECUTE_CMD: execute_cmd_c()})]
    openssl = [
        few(f"2020-04-30 {at}", count, f"2020-04-30T{at}:07.25Z")
        for at, count in (("05:08", 1252), ("05:49", 1252), ("04:22", 1252), ("05:29", 1252),
                          ("03:57", 1240), ("04:48", 1252))]
    # Findings 0-12 are missing, 13-111 modified, 112-296 matched, 297-308 new. A diff counts
    # each of them once, though the snapshots hold some twice.
    old = [*range(297), *range(112, 121)]
    new = [*map(functools.partial(finding, shift=3), range(13, 112)),
           *map(finding, [*range(112, 309), 112])]
    paho = [
        Snapshot("Snapshot 2020-03-20 11:42:07 +0300", map(finding, old),
                 "2020-03-20T11:42:07.120934Z", id=PAHO_OLD),
        Snapshot("Snapshot 2020-03-25 09:09:41 +0300", new, "2020-03-25T09:09:41.837296Z",
                 id=PAHO_NEW),
        few("Snapshot 2020-03-12 17:30:55 +0300", 310, "2020-03-12T17:30:55.002Z")]
    ref = {"name": "CI_COMMIT_REF_NAME", "value": "deadbeef"}  # looks like a hash, names a branch
    coturn = [
        few("release 4.6", 320, "2022-01-11T08:00:00Z",
            [ref, {"name": "commit_sha", "value": "fedcba9876543210fedcba9876543210fedcba98"}]),
        few("release 4.5", 300, "2022-01-10T08:00:00Z", [ref])]
    zstd = [
        few("first", 410, "2021-12-14T10:00:00Z", {
            "CI_COMMIT_REF_NAME": "deadbeef",
            "git_commit": "0123456789abcdef0123456789abcdef01234567"}),
        few("second", 405, "2021-12-14T10:00:00.5Z")]  # later, but not if compared as text
    odd = marker("PROC_USE.VULNERABLEX", "/.build/src/aab1.c", 7, "It is not a sub-class.",
                 review={"severity": "Major", "status": ""})
    darpa = [Snapshot("nightly (1) +x", [odd, *map(finding, range(64))], "2022-02-01T00:00:00Z"),
             few("empty", 0, "2022-02-02T00:00:00Z"),
             few("nightly (2) +x", 60, "2022-02-01T00:00:00Z")]
    return [
        Branch("bash", bash, project_id=BASH, id=BASH_MASTER), Branch("openssl", openssl),
        Branch("paho.mqtt.c", paho),
        Branch("coturn", coturn, {"created_by": {"string": "", "valid": False}}),
        Branch("zstd", zstd, {"created_by": {"string": "admin", "valid": True}}),
        Branch("darpa", darpa, {})]


@dataclass(frozen=True)
class Synthetic:
    """Markers that are made as they are read, so that a million of them need no memory.

    Snapshots with neighbouring seeds share 99 of 100 findings, of which some have moved.
    """
    seed: int
    count: int

    def __iter__(self) -> Iterator[Marker]:
        kinds = itertools.cycle(("PROC_USE.VULNERABLE", *OTHERS))
        for n in range(self.count):
            number = n + self.seed * (self.count // 100)
            # A multiple of the golden ratio: as hard to compress as a real id.
            name = f"{number * 0x9E3779B97F4A7C15F39CC0605CEDC835 % 2**128:032x}"
            file = f"/.build/src/module{number % 97}/file{number % 1013}.c"
            line = 1 + number % 5000 + self.seed * (number % 7 == 0)
            yield {
                "id": f"{self.seed:08x}-{name[:4]}-4{name[4:7]}-8{name[7:10]}-{name[10:22]}",
                "invariant": name, "warnClass": next(kinds), "file": file, "line": line,
                "msg": f"Value {number} of ordinary length is used at line {line} before a check "
                       "of its range, which may lead to an access outside of the array given.",
                "tool": "SVACE", "function": f"function_{number % 701}", "mtid": name[:8],
                "review": None if number % 50 else {"status": "Confirmed", "severity": "Minor"},
                "lang": "C", "checker_severity": "Major", "checker_labels": [],
                "traces": [{"file": file, "line": line + k, "msg": f"Step {k}."} for k in range(3)],
                "checkerInfo": {"description": "What it looks for.", "cwe": ["CWE-476"]},
            }


def synthetic(project: str, snapshots: int, markers: int) -> Branch:
    """`huge`, `many` or another project with snapshots a day apart."""
    start = datetime(2022, 1, 1)
    return Branch(project, [Snapshot(f"{project} {n}", Synthetic(n, markers),
                                     f"{(start + timedelta(n)).isoformat()}Z")
                            for n in range(snapshots)])


# ---- The fake server: what it answers ------------------------------------------------------------

ON_REQUEST = {"traces": "traces", "checker_info": "checkerInfo",
              "review_history": "review_history", "comment_history": "comments"}
MARKER_QUERY = "filters custom_filter " + " ".join(f"{flag}=true|false" for flag in ON_REQUEST)
ROUTES = {  # path: method, handler, parameters or keys of the body (*: required; =: what fits)
    "login": ("POST", "log_in", "login* password* auth_type=svacer|ldap server"),
    "projects": ("GET", "projects", ""),
    "snapshots": ("GET", "snapshots", "filters"),
    "projects/ID/branch/ID/snapshots": ("GET", "branch_snapshots", ""),
    "projects/ID/branch/ID/snapshots/ID/fullmarkers": ("GET", "full_markers", MARKER_QUERY),
    "markers": ("GET", "markers", MARKER_QUERY),
    "diff": ("GET", "diff", "snapshot_v1* snapshot_v2 level=[012] checker_info=true|false"),
    "advanced_file_preview": ("GET", "preview", "file* snapshot* line*=[1-9][0-9]{,8} "
                              "before=[0-9]{1,9} after=[0-9]{1,9} output*=json"),
    "admin/server/project-groups": ("POST", "group", "action*=get project_group_name_or_id*"),
    "admin/server/containers": ("POST", "containers", "action*=list type*=project parent*"),
}
FILTERS = {"project": {"id"}, "branch": {"id"}, "snapshot": {"id", "name"},
           "marker": {"file", "checker", "review", "severity"}}
LOOKS_AT: dict[str, Callable[[Marker], str | None]] = {  # what a filter on markers looks at
    "file": lambda row: row["file"],
    "checker": lambda row: row["warnClass"],
    "review": lambda row: (row.get("review") or {}).get("status"),
    "severity": lambda row: row["checker_severity"],
}
LOOKS_AT["custom"] = LOOKS_AT["review"]
CUSTOM_FILTERS = dict.fromkeys(("Only confirmed", uid("Only confirmed")), re.compile("^Confirmed$"))
# Look-arounds and back-references: Python has them, a server's engine for users' patterns has not.
NOT_RE2 = re.compile(r"(?<!\\)(?:\\\\)*(?:\\[1-9Z]|\(\?(?:<?[=!]|[>(]|P=))")


class Refused(Exception):
    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


@dataclass
class Request:
    method: str
    path: str
    query: str
    body: bytes
    headers: dict[str, str]

    def given(self) -> dict[str, Any]:
        """The query's parameters; the keys of the body if it is a POST."""
        posted = self.method == "POST"
        try:
            pairs = parse_qsl(self.query, keep_blank_values=True, strict_parsing=bool(self.query),
                              errors="strict")
            given = json.loads(self.body) if posted else dict(pairs)
        except ValueError as e:
            raise Refused(400, f"bad query or body: {e}") from None
        if not isinstance(given, dict) or len(pairs) != (0 if posted else len(given)):
            raise Refused(400, "not an object, or a parameter that is given twice")
        if self.body and not self.headers.get("content-type", "").startswith("application/json"):
            raise Refused(415, "the body has to be application/json")
        return given

    def arguments(self, takes: str) -> dict[str, str]:
        """What is given, checked against what the path takes."""
        given = self.given()
        rest = dict(given)
        for name, required, fits in re.findall(r"(\w+)(\*?)=?(\S*)", takes):
            value = rest.pop(name, "" if required else None)
            if value is None:
                continue
            fits = fits or (".+" if required else ".*")
            if not isinstance(value, str) or not re.fullmatch(fits, value, re.DOTALL):
                raise Refused(400, f"bad or missing {name}: {value}")
        if rest:
            raise Refused(400, f"unknown parameters: {rest}")
        return given


def unpacked(text: str) -> Any:
    """Filters: base64 (standard alphabet) of JSON."""
    try:
        return json.loads(base64.b64decode(text, validate=True))
    except ValueError as e:
        raise Refused(400, f"filters: not base64 of JSON: {e}") from None


def pattern(text: Any) -> re.Pattern[str]:
    try:
        if NOT_RE2.search(text):
            raise TypeError
        return re.compile(text)
    except (TypeError, re.error):
        raise Refused(400, f"filters: not a regular expression: {text}") from None


def read_filters(args: Args) -> dict[str, dict[str, Any]]:
    """All parts of the filters, ids as they are and the rest as regular expressions."""
    given = unpacked(args["filters"]) if args.get("filters") else {}
    if not isinstance(given, dict):
        raise Refused(400, "filters: not an object")
    for part, values in given.items():
        if not isinstance(values, dict) or not values.keys() <= FILTERS.get(part, set()):
            raise Refused(400, f"filters: unknown key in {part}: {values}")
    return {part: {name: value if name == "id" else pattern(value)
                   for name, value in given.get(part, {}).items()} for part in FILTERS}


def shown(rows: Iterable[Marker], args: Args) -> Iterator[Marker]:
    """Markers without the keys that were not asked for."""
    hidden = {key for flag, key in ON_REQUEST.items() if args.get(flag) != "true"}
    return ({k: v for k, v in row.items() if k not in hidden} for row in rows)


def select_markers(snapshot: Snapshot, patterns: Mapping[str, re.Pattern[str]],
                   args: Args) -> Iterator[Marker]:
    if custom := args.get("custom_filter"):
        if custom not in CUSTOM_FILTERS:
            raise Refused(400, f"unknown custom filter: {custom}")
        patterns = {**patterns, "custom": CUSTOM_FILTERS[custom]}

    def fits(row: Marker) -> bool:
        values = ((regex, LOOKS_AT[name](row)) for name, regex in patterns.items())
        return all(value and regex.search(value) for regex, value in values)

    return shown(filter(fits, snapshot.markers), args)


def jwt(**payload: Any) -> str:
    parts = dumps({"alg": "HS256", "typ": "JWT"}), dumps(payload), os.urandom(32)
    return ".".join(base64.urlsafe_b64encode(p).rstrip(b"=").decode() for p in parts)


def dumps(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def pieces(value: Any) -> Iterator[bytes]:
    """Compact JSON; iterators (of markers) are read one by one, so that a million fit."""
    if isinstance(value, dict):
        for n, (key, item) in enumerate(value.items()):
            yield b"%b%b:" % (b"," if n else b"{", dumps(key))
            yield from pieces(item)
        yield b"}" if value else b"{}"
    elif isinstance(value, (list, Iterator)):
        yield b"["
        for n, item in enumerate(value):
            yield b"," if n else b""
            yield from pieces(item) if isinstance(value, list) else (dumps(item),)
        yield b"]"
    else:
        yield dumps(value)


@dataclass
class Api:
    """The part of Svacer's public REST API that svacer_mcp uses, without the HTTP around it."""
    branches: list[Branch]
    groups: Mapping[tuple[str, str], dict[str, str]] = field(default_factory=lambda: GROUPS)
    login: str = "admin"
    password: str = "admin"
    ttl: float = 3600  # seconds that a token works
    make_token: Callable[[float], str] = lambda expires: jwt(sub="admin", exp=int(expires))
    ldap: str = ""  # the LDAP server that a login has to name
    empty_is_204: bool = False
    url: str = ""

    def __post_init__(self) -> None:
        self.tokens: dict[str, float] = {}
        self.places = {s.id: (b, s) for b in self.branches for s in b.snapshots}

    def respond(self, request: Request) -> Any:
        for path, (method, handler, takes) in ROUTES.items():
            # Segments are matched before they are decoded: `..` and %2F lead nowhere.
            if found := re.fullmatch(path.replace("ID", "([^/]+)"), request.path):
                if request.method != method:
                    raise Refused(405, f"{request.method} is not allowed here")
                ids = map(unquote, found.groups())
                return getattr(self, handler)(request.arguments(takes), *ids)
        raise Refused(404, f"no such path: {request.path}")

    def authorize(self, header: str) -> None:
        scheme, _, token = header.partition(" ")
        if scheme != "Bearer" or self.tokens.get(token, 0) < time.time():
            raise Refused(401, "the token is missing, expired or revoked")

    def log_in(self, args: Args) -> Any:
        kind = args.get("auth_type", "svacer"), args.get("server", "")
        if kind != (("ldap", self.ldap) if self.ldap else ("svacer", "")) or (
                args["login"], args["password"]) != (self.login, self.password):
            raise Refused(401, "wrong login or password")
        expires = time.time() + self.ttl
        token = self.make_token(expires)
        self.tokens[token] = expires
        return {"token": token}

    def projects(self, args: Args) -> Any:
        rows: dict[str, Any] = {}
        for b in self.branches:
            about = {"id": b.project_id, "name": b.project, "time": "2021-12-13T13:22:42.122456Z"}
            row = rows.setdefault(b.project_id, {"project": {**about, **b.about}, "branches": []})
            row["branches"].append(
                {"id": b.id, "name": b.name, "time": "2021-12-13T13:22:42.394812Z"})
        return list(rows.values())

    def chosen(self, filters: dict[str, Any]) -> Iterator[tuple[Branch, list[Snapshot]]]:
        """Where the filters on project, branch and snapshot lead."""
        project, branch, snapshot = (filters[part] for part in ("project", "branch", "snapshot"))
        for b in self.branches:
            if project.get("id", b.project_id) == b.project_id and branch.get("id", b.id) == b.id:
                yield b, [s for s in b.snapshots if snapshot.get("id", s.id) == s.id
                          and ("name" not in snapshot or snapshot["name"].search(s.name))]

    def row(self, b: Branch, s: Snapshot) -> dict[str, Any]:
        link = f"{self.url}/mode/review/project/{b.project_id}/branch/{b.id}/snapshot/{s.id}"
        details = {"analysis-info": "Svace 3.4", "custom_properties": s.properties}
        return {"id": s.id, "name": s.name, "import_time": s.time, "details": details, "link": link}

    def snapshots(self, args: Args) -> Any:
        return [{"project_id": b.project_id, "branch_id": b.id,
                 "snapshots": [self.row(b, s) for s in found]}
                for b, found in self.chosen(read_filters(args))]

    def branch_snapshots(self, args: Args, *ids: str) -> Any:
        for b in self.branches:
            if (b.project_id, b.id) == ids:
                return [self.row(b, s) for s in b.snapshots]
        raise Refused(404, "branch not found")

    def markers(self, args: Args) -> Any:
        asked = read_filters(args)
        return [{"project_id": b.project_id, "branch_id": b.id, "snapshot_id": s.id,
                 "markers": select_markers(s, asked["marker"], args)}
                for b, found in self.chosen(asked) for s in found]

    def full_markers(self, args: Args, *ids: str) -> Any:
        b, s = self.place(ids[-1])
        if (b.project_id, b.id, s.id) != ids:
            raise Refused(404, f"the branch has no snapshot {s.id}")
        return select_markers(s, read_filters(args)["marker"], args)

    def place(self, snapshot_id: str) -> tuple[Branch, Snapshot]:
        if snapshot_id not in self.places:
            raise Refused(404, f"snapshot not found: {snapshot_id}")
        return self.places[snapshot_id]

    def diff(self, args: Args) -> Any:
        b, base = self.place(args["snapshot_v1"])
        if args.get("snapshot_v2"):
            head_b, head = self.place(args["snapshot_v2"])
        else:
            head_b, head = b, base
            older = [s for s in b.snapshots if s.time.rstrip("Z") < head.time.rstrip("Z")]
            if not older:
                raise Refused(404, "there is no snapshot before this one")
            base = max(older, key=lambda s: s.time.rstrip("Z"))
        old, new = ({row["invariant"]: row for row in shown(s.markers, args)} for s in (base, head))
        sorts = {
            "new": [new[key] for key in new if key not in old],
            "missing": [old[key] for key in old if key not in new],
            "modified": [new[k] for k in new if k in old and new[k]["line"] != old[k]["line"]],
            "matched": [new[k] for k in new if k in old and new[k]["line"] == old[k]["line"]]}
        stats = {"context1": {"projectName": b.project, "snapshotName": base.name},
                 "context2": {"projectName": head_b.project, "snapshotName": head.name},
                 "scope": ["NEW", "MISSING", "MATCHED", "MODIFIED"],
                 **{name: len(rows) for name, rows in sorts.items()}}
        level = args.get("level", "0")
        return {"stats": stats} if level == "0" else {"stats": stats, "markers": {
            f"{name}_markers": iter(rows) if level == "2" else [row["id"] for row in rows]
            for name, rows in sorts.items()}}

    def preview(self, args: Args) -> Any:
        _, s = self.place(args["snapshot"])
        if args["file"] not in s.sources:
            raise Refused(404, f"file not found: {args['file']}")
        line, before, after = (int(args.get(name, "0")) for name in ("line", "before", "after"))
        lines = io.StringIO(s.sources[args["file"]]).readlines()  # splitlines() splits at ^L too
        content = "".join(lines[max(0, line - before - 1):line + after])
        return {"line": line, "content": content, "total_lines": len(lines)}

    def group(self, args: Args) -> Any:
        for key in self.groups:
            if args["project_group_name_or_id"] in key:
                return {"project_group_id": key[0], "project_group_name": key[1]}
        raise Refused(404, "project group not found")

    def containers(self, args: Args) -> Any:
        for (group_id, _), projects in self.groups.items():
            if args["parent"] == group_id:
                return {"Containers": [{"id": id, "name": name, "type": "project"}
                                       for id, name in projects.items()]}
        raise Refused(404, "parent not found")


# ---- The fake server: how it answers, and misbehaves ---------------------------------------------

@dataclass
class Fault:
    """How answers to the requests whose path matches go wrong."""
    path: str = ""
    times: float = math.inf
    delay: float = 0  # seconds before anything else
    status: int | None = None  # this status, body and headers instead of the real ones
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None  # close after so many bytes of the body
    no_length: bool = False  # no Content-Length: closing ends the body
    chunked: bool = False
    piece: int = 1 << 18  # bytes of the body that are sent at once
    drip: float = 0  # seconds between those
    drip_head: float = 0  # seconds between the bytes of a header that never ends
    refuse: bool = False  # close without an answer
    rst: bool = False  # close with RST, not FIN (with cut, refuse or raw)
    raw: bytes = b""  # all that is sent


def gzipped(parts: Iterable[bytes]) -> bytes:
    packer = zlib.compressobj(1, wbits=31)
    return b"".join(map(packer.compress, parts)) + packer.flush()


def bomb(megabytes: int, unit: bytes = b"A", head: bytes = b'[{"msg":"',
         tail: bytes = b'"}]') -> Iterator[bytes]:
    """Valid JSON of that size that gzip makes small, for `fault(gzip=...)`."""
    block = unit * ((1 << 20) // len(unit))
    return itertools.chain((head,), itertools.repeat(block, megabytes), (tail,))


class FakeSvacer(ThreadingHTTPServer):
    """A Svacer on a real socket: `with FakeSvacer() as fake:` serves at fake.url.

    `fake.log` holds a dict for each request in the order of arrival; its status is 0 until the
    answer starts, and -1 if the client hung up. `fake.peak` is the most that ran at once.
    """
    daemon_threads = True
    block_on_close = False
    request_queue_size = 256
    server_bind = socketserver.TCPServer.server_bind  # HTTPServer's asks DNS for the host's name

    def __init__(self, data: list[Branch] | None = None, *, host: str = "127.0.0.1", port: int = 0,
                 prefix: str = "", ssl_context: ssl.SSLContext | None = None,
                 use_gzip: bool = True, **api: Any):
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), Handler)
        if ssl_context:  # the handshake is left to the connection's thread
            self.socket = ssl_context.wrap_socket(
                self.socket, server_side=True, do_handshake_on_connect=False)
        name = f"[{host}]" if ":" in host else host
        self.server_port = int(self.server_address[1])
        self.url = f"http{'s' * bool(ssl_context)}://{name}:{self.server_port}{prefix}"
        self.api = Api(demo() if data is None else data, url=self.url, **api)
        self.root, self.use_gzip, self.closed = f"{prefix}/api/public/", use_gzip, False
        self.lock = threading.Lock()
        self.log: list[dict[str, Any]] = []
        self.faults: list[Fault] = []
        self.running: set[int] = set()  # the ids of log entries
        self.peak = 0
        self.kept: dict[object, bytes] = {}

    def __enter__(self) -> FakeSvacer:
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True
        self.shutdown()
        self.server_close()

    def fault(self, path: str = "", times: float = math.inf, *, json: Any = ...,
              gzip: bytes | Iterable[bytes] | None = None, body: bytes | str | None = None,
              content_type: str = "application/json", **what: Any) -> None:
        """Misbehaves as Fault tells; the first fault that matches and has times left acts.

        json and gzip are other ways to give the body: a value, and what is to be compressed.
        """
        headers = {"Content-Type": content_type, **what.pop("headers", {})}
        if json is not ...:
            body = dumps(json)
        elif gzip is not None:
            body = gzipped([gzip] if isinstance(gzip, bytes) else gzip)
            headers["Content-Encoding"] = "gzip"
        elif body is None and what.get("status", 0) >= 300:
            body = dumps({"message": f"status {what['status']}"})
        data = body.encode() if isinstance(body, str) else body
        with self.lock:
            self.faults.append(Fault(path, times, body=data, headers=headers, **what))

    def clear(self) -> None:
        """Forgets the log and the faults."""
        with self.lock:
            self.log.clear()
            self.faults.clear()
            self.peak = 0

    def revoke(self) -> None:
        """No token given so far works any longer."""
        self.api.tokens.clear()

    def arrived(self, request: Request) -> tuple[dict[str, Any], Fault]:
        entry: dict[str, Any] = {
            "method": request.method, "path": request.path, "query": {}, "filters": None,
            "body": None, "status": 0, "headers": request.headers}
        try:
            entry["body" if request.method == "POST" else "query"] = request.given()
            entry["filters"] = unpacked(entry["query"]["filters"])
        except (Refused, KeyError):
            pass  # the answer will tell
        with self.lock:
            self.log.append(entry)
            self.running.add(id(entry))
            self.peak = max(self.peak, len(self.running))
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.path, request.path):
                    fault.times -= 1
                    return entry, fault
        return entry, Fault()

    def outcome(self, request: Request, fault: Fault) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of an answer."""
        headers = {"Content-Type": "application/json", **fault.headers}
        if fault.status is not None or fault.body is not None:
            return fault.status or 200, headers, fault.body or b""
        try:
            data = self.real_body(request)
        except Refused as e:
            return e.status, headers, dumps({"message": str(e)})
        if data == b"[]" and self.api.empty_is_204:
            return 204, headers, b""
        if self.use_gzip and "gzip" in request.headers.get("accept-encoding", ""):
            headers["Content-Encoding"] = "gzip"
            data = self.once(request, True, lambda: gzip.compress(data, 1))
        return 200, headers, data

    def real_body(self, request: Request) -> bytes:
        def make() -> bytes:
            buffer = io.BytesIO()
            buffer.writelines(pieces(self.api.respond(request)))
            return buffer.getvalue()

        if not request.path.startswith(self.root):
            raise Refused(404, f"page not found: {request.path}")
        request.path = request.path[len(self.root):]
        if request.path != "login":
            self.api.authorize(request.headers.get("authorization", ""))
        return self.once(request, False, make)

    def once(self, request: Request, packed: bool, make: Callable[[], bytes]) -> bytes:
        """A large body is made only once, so that measurements time the client."""
        key = (request.method, request.path, request.query, packed)
        if key in self.kept:
            return self.kept[key]
        data = make()
        if len(data) > 5_000 and request.method == "GET":
            self.kept[key] = data
        return data

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # clients may hang up as they like
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True
    server: FakeSvacer

    def log_message(self, *_: object) -> None:
        pass

    def handle_request(self) -> None:
        # Not self.path, where leading slashes are merged. A proxy gets the whole URL.
        target = re.sub("^https?://[^/]*", "", self.requestline.split()[1])
        path, _, query = target.partition("?")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.command, path, query, body, headers)
        entry, fault = self.server.arrived(request)
        try:
            self.pause(fault.delay)
            if fault.refuse or fault.raw or fault.drip_head:
                self.break_off(fault)
            else:
                self.answer(entry, fault, *self.server.outcome(request, fault))
        except OSError:
            entry["status"] = -1
            self.close_connection = True
        finally:
            self.server.running.discard(id(entry))

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_request

    def pause(self, seconds: float) -> None:
        """Waits, unless the client hangs up or the server is closed: then an OSError."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if select.select([self.connection], [], [], min(left, 0.2))[0]:
                # The plain socket's recv, because a TLS socket has no MSG_PEEK.
                if not socket.socket.recv(self.connection, 1, socket.MSG_PEEK):
                    raise ConnectionAbortedError
                time.sleep(min(left, 0.02))
            if self.server.closed:
                raise ConnectionAbortedError

    def answer(self, entry: dict[str, Any], fault: Fault, status: int, headers: dict[str, str],
               body: bytes) -> None:
        entry["status"] = status
        self.send_response(status)
        if fault.chunked:
            headers["Transfer-Encoding"] = "chunked"
        elif not fault.no_length and status not in (204, 304):
            headers["Content-Length"] = str(len(body))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        held: bytes | memoryview = b""  # one behind: the request has left before its client knows
        for piece in framed(body, fault):
            self.wfile.write(held)
            held = piece
            if fault.drip:
                self.wfile.flush()
                self.pause(fault.drip)
        self.server.running.discard(id(entry))
        self.wfile.write(held)
        self.wfile.flush()
        if fault.no_length or fault.cut is not None:
            self.hang_up(fault)

    def break_off(self, fault: Fault) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Endless: " if fault.drip_head else fault.raw)
        while fault.drip_head:
            self.wfile.write(b"a")
            self.wfile.flush()
            self.pause(fault.drip_head)
        self.wfile.flush()
        self.hang_up(fault)

    def hang_up(self, fault: Fault) -> None:
        self.close_connection = True
        if fault.rst:  # closed here, before the base class sends FIN
            linger = struct.pack("hh" if os.name == "nt" else "ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            socket.close(self.connection.detach())


def framed(body: bytes, fault: Fault) -> Iterator[bytes | memoryview]:
    """The body as it goes over the wire."""
    view = memoryview(body)[:fault.cut]
    for at in range(0, len(view), fault.piece):
        piece = view[at:at + fault.piece]
        yield b"%x\r\n%b\r\n" % (len(piece), bytes(piece)) if fault.chunked else piece
    if fault.chunked and fault.cut is None:
        yield b"0\r\n\r\n"


# ---- Tests of the fake server --------------------------------------------------------------------

class Caller:
    """Asks a fake server with urllib, for the tests that need no svacer_mcp."""

    def __init__(self, fake: FakeSvacer):
        self.url, self.token = f"{fake.url}/api/public/", ""
        self.token = self("login", {"login": "admin", "password": "admin"})[1].get("token", "")

    def __call__(self, path: str, post: Any = None, method: str | None = None, *,
                 filters: Any = None, **query: object) -> tuple[int, Any]:
        if filters is not None:
            raw = filters if isinstance(filters, bytes) else base64.b64encode(dumps(filters))
            query["filters"] = raw.decode()
        url = f"{self.url}{path}?{urlencode(query)}" if query else self.url + path
        data = post if isinstance(post, (bytes, type(None))) else dumps(post)
        request = urllib.request.Request(url, data, method=method, headers={
            "Authorization": f"Bearer {self.token}", "Content-Type": "application/json",
            "Accept-Encoding": "gzip"})
        try:
            reply = urllib.request.urlopen(request, timeout=10)
        except urllib.error.HTTPError as e:
            reply = e
        with reply:
            text = reply.read()
            if reply.headers.get("Content-Encoding") == "gzip":
                text = gzip.decompress(text)
            return reply.status, json.loads(text) if text else None


@pytest.fixture
def fake() -> Iterator[FakeSvacer]:
    with FakeSvacer() as server:
        yield server


@pytest.fixture
def caller(fake: FakeSvacer) -> Caller:
    return Caller(fake)


FULL_BASH = f"projects/{BASH}/branch/{BASH_MASTER}/snapshots/{BASH_LATEST}/fullmarkers"
GROUP = "admin/server/project-groups"
SOURCE = {"snapshot": BASH_LATEST, "file": EXECUTE_CMD, "output": "json"}


def test_bash_has_the_documented_statistics(caller: Caller) -> None:
    _, rows = caller(FULL_BASH)
    reviews = [row.get("review") or {} for row in rows]
    assert Counter(r.get("severity") or "Unspecified" for r in reviews) == {
        "Critical": 1, "Major": 1, "Unspecified": 769}
    assert Counter(r.get("status") or "Undecided" for r in reviews) == {
        "Undecided": 767, "Confirmed": 1, "False Positive": 1, "Unclear": 1, "Won't fix": 1}
    *top, sixth = Counter(row["warnClass"] for row in rows).most_common(6)
    assert top == [("PROC_USE.VULNERABLE", 337), ("UNUSED_FUNC_RES.REWRITE.MINOR", 44),
                   ("UNREACHABLE_CODE", 28), ("DEREF_AFTER_NULL.EX", 27), ("NULL_AFTER_DEREF", 27)]
    assert sixth[1] < 27
    assert len({row["id"] for row in rows}) == 771


def test_a_checker_is_found_with_its_sub_classes(caller: Caller) -> None:
    _, [found] = caller("markers", filters={
        "project": {"id": BASH}, "branch": {"id": BASH_MASTER}, "snapshot": {"id": BASH_LATEST},
        "marker": {"checker": r"^PROC_USE\.VULNERABLE(\.|$)"}})
    assert len(found["markers"]) == 341
    assert [f"{m['file']}:{m['line']}" for m in found["markers"][:5]] == [
        "/.build/lib/sh/tmpfile.c:160", "/.build/lib/readline/shell.c:151", "/.build/shell.c:415",
        "/.build/lib/readline/complete.c:1516", "/.build/lib/sh/eaccess.c:115"]
    assert caller("markers", filters={"snapshot": {"id": uid("nowhere")}}) == (200, [])


def test_details_of_a_marker_come_when_asked_for(caller: Caller) -> None:
    _, [short] = caller(FULL_BASH, filters={"marker": {"review": "^Confirmed$"}})
    flags = dict.fromkeys(ON_REQUEST, "true")
    _, [whole] = caller(FULL_BASH, custom_filter="Only confirmed", **flags)
    assert (short["id"], whole["traces"][0]["line"]) == (CRITICAL, 3320)
    assert whole.keys() - short.keys() == set(ON_REQUEST.values())


def test_snapshots_have_the_documented_sizes(caller: Caller) -> None:
    for project, sizes in {"paho.mqtt.c": [297, 306, 310], "openssl": [1240] + [1252] * 5}.items():
        _, rows = caller("markers", filters={"project": {"id": uid(project)}})
        assert sorted(len(row["markers"]) for row in rows) == sizes
        assert len({row["snapshot_id"] for row in rows}) == len(sizes)


@pytest.mark.parametrize("head", [{}, {"snapshot_v2": PAHO_NEW}], ids=["previous", "named"])
def test_the_diff_of_paho_adds_up(caller: Caller, head: dict[str, str]) -> None:
    asked = {"snapshot_v1": PAHO_OLD if head else PAHO_NEW, **head}
    counts = {"new": 12, "missing": 13, "modified": 99, "matched": 185}
    _, diff = caller("diff", **asked, level=2)
    assert {name: diff["stats"][name] for name in counts} == counts
    assert {name: len(diff["markers"][f"{name}_markers"]) for name in counts} == counts
    assert caller("diff", **asked) == (200, {"stats": diff["stats"]})


LOGIN = {"login": "admin", "password": "admin"}


@pytest.mark.parametrize(("status", "path", "asked"), [
    (401, "login", {"post": {**LOGIN, "password": "wrong"}}),
    (401, "login", {"post": {**LOGIN, "auth_type": "ldap", "server": "corp"}}),
    (400, "login", {"post": {"login": "admin"}}),
    (400, "login", {"post": {**LOGIN, "remember": "yes"}}),
    (400, "login", {"post": b"login=admin"}),
    (400, "login?page=1", {"post": LOGIN}),
    (400, "projects?page", {}),
    (400, "snapshots?filters=e30=&filters=e30=", {}),
    (405, "login", {}),
    (405, "projects", {"method": "DELETE"}),
    (400, "projects", {"page": 1}),
    (404, "project", {}),
    (404, "snapshots/../projects", {}),
    (404, f"/projects/{BASH}/branch/{BASH_MASTER}/snapshots", {}),
    (404, f"projects/{BASH}%2Fbranch/{BASH_MASTER}/snapshots", {}),
    (404, f"projects/{BASH}/branch/{BASH}/snapshots", {}),
    (404, FULL_BASH.replace(BASH_LATEST, ".."), {}),
    (404, FULL_BASH.replace(BASH_LATEST, PAHO_NEW), {}),
    (400, FULL_BASH, {"traces": "yes"}),
    (400, FULL_BASH, {"custom_filter": "Nobody's"}),
    (400, FULL_BASH, {"filters": b"no base64!"}),
    (400, FULL_BASH, {"filters": base64.b64encode(b"no JSON")}),
    (400, FULL_BASH, {"filters": ["no object"]}),
    (400, FULL_BASH, {"filters": {"marker": {"line": "1"}}}),
    (400, FULL_BASH, {"filters": {"marker": {"file": "("}}}),
    (400, FULL_BASH, {"filters": {"marker": {"file": "(?!a)"}}}),
    (200, FULL_BASH, {"filters": {"marker": {"file": r"\(\?!a\)"}}}),
    (404, "diff", {"snapshot_v1": uid("nowhere")}),
    (400, "diff", {"snapshot_v1": PAHO_NEW, "level": 3}),
    (400, "diff", {"level": 0}),
    (404, "advanced_file_preview", {**SOURCE, "file": "/etc/passwd", "line": 1}),
    (400, "advanced_file_preview", {**SOURCE, "line": -1}),
    (400, GROUP, {"post": {"action": "get"}}),
    (404, GROUP, {"post": {"action": "get", "project_group_name_or_id": "x"}}),
])
def test_what_a_server_refuses_is_refused(
        caller: Caller, status: int, path: str, asked: dict[str, Any]) -> None:
    got, answer = caller(path, **asked)
    assert got == status, answer
    assert status == 200 or answer["message"]


def test_tokens_run_out_and_are_revoked() -> None:
    with FakeSvacer(ttl=-1) as fake:
        assert Caller(fake)("projects")[0] == 401
    with FakeSvacer(make_token=lambda expires: "canary", prefix="/svacer") as fake:
        caller = Caller(fake)
        assert (caller.token, caller("projects")[0], caller(FULL_BASH)[0]) == ("canary", 200, 200)
        fake.revoke()
        assert (caller("projects")[0], caller(FULL_BASH)[0]) == (401, 401)
        assert [(e["path"], e["status"]) for e in fake.log[-2:]] == [
            ("/svacer/api/public/projects", 401), (f"/svacer/api/public/{FULL_BASH}", 401)]


def test_faults_act_one_after_another(fake: FakeSvacer, caller: Caller) -> None:
    right = caller("projects")
    fake.fault("projects$", times=1, status=502)
    fake.fault("projects$", times=1, json={"odd": None})
    fake.fault("projects$", times=1, chunked=True, piece=7)
    fake.fault("projects$", times=1, gzip=bomb(1, b" ", b"[", b"]"), no_length=True)
    assert [caller("projects") for _ in range(5)] == [
        (502, {"message": "status 502"}), (200, {"odd": None}), right, (200, []), right]


@pytest.mark.parametrize(("how", "error"), [
    ({"refuse": True}, http.client.RemoteDisconnected),
    ({"refuse": True, "rst": True}, ConnectionResetError),
    ({"raw": b"SSH-2.0-OpenSSH_9.2\r\n"}, http.client.BadStatusLine),
    ({"cut": 100}, http.client.IncompleteRead),
    ({"cut": 100, "rst": True}, ConnectionResetError),
    ({"cut": 100, "chunked": True}, http.client.IncompleteRead),
    ({"cut": 100, "no_length": True}, EOFError),
], ids=str)
def test_broken_answers_are_broken(
        fake: FakeSvacer, caller: Caller, how: dict[str, Any], error: type[Exception]) -> None:
    fake.fault("projects", **how)
    with pytest.raises(error):
        caller("projects")


@pytest.mark.parametrize("how", [{"delay": 30}, {"drip": 0.01, "piece": 1}, {"drip_head": 0.01}],
                         ids=str)
def test_a_client_that_hangs_up_is_noticed(
        fake: FakeSvacer, caller: Caller, how: dict[str, Any]) -> None:
    fake.fault("projects", **how)
    with socket.create_connection(("127.0.0.1", fake.server_port)) as client:
        client.sendall(b"GET /api/public/projects HTTP/1.1\r\nAuthorization: Bearer %b\r\n\r\n"
                       % caller.token.encode())
        until(lambda: fake.running)
    until(lambda: not fake.running)
    assert (fake.log[-1]["status"], fake.peak) == (-1, 1)


def until(condition: Callable[[], Any], seconds: float = 5) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


# ---- svacer_mcp as its clients see it ------------------------------------------------------------

SERVER = Path(__file__).with_name("svacer_mcp.py")
TOKEN = "a-token-for-tests"


def environment(fake: FakeSvacer | str, **settings: object) -> dict[str, str]:
    """The environment of a server process: this one's, and only these SVACER_ variables."""
    url = fake if isinstance(fake, str) else fake.url
    given = {"SVACER_URL": url, "SVACER_LOG_LEVEL": "ERROR", "PYTHONDONTWRITEBYTECODE": "1",
             **settings}
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("SVACER_")}
    return {**inherited, **{name: str(value) for name, value in given.items()}}


class Failed(Exception):
    """A tool call whose result is an error; `error` is what the model reads."""

    def __init__(self, error: dict[str, Any]):
        super().__init__(error)
        self.error = error


class Client:
    """A session of the SDK's client; its calls return what a model would read, decoded."""

    def __init__(self, session: Any):
        self.session = session

    async def text(self, tool: str, args: Mapping[str, Any], **more: Any) -> tuple[str, bool]:
        result = await self.session.call_tool(tool, dict(args), **more)
        dumped = result.model_dump(mode="json", by_alias=True, exclude_none=True)
        [block] = dumped["content"]
        assert block["type"] == "text" and "structuredContent" not in dumped
        return block["text"], dumped["isError"]

    async def call(self, tool: str, **args: Any) -> Any:
        text, failed = await self.text(tool, args)
        answer = json.loads(text)
        assert failed == (isinstance(answer, dict) and "error" in answer), text
        if failed:
            raise Failed(answer["error"])
        return answer

    async def failure(self, tool: str, **args: Any) -> dict[str, Any]:
        with pytest.raises(Failed) as caught:
            await self.call(tool, **args)
        return caught.value.error


@asynccontextmanager
async def stdio_client(env: Mapping[str, str], *options: str, **more: Any) -> AsyncIterator[Client]:
    """A client that has started the server as a child process."""
    from mcp import ClientSession, StdioServerParameters
    from mcp.client.stdio import stdio_client as connect

    command = StdioServerParameters(
        command=sys.executable, args=[str(SERVER), *options], env=dict(env), **more)
    async with connect(command) as (read, write), ClientSession(read, write) as session:
        await session.initialize()
        yield Client(session)


@asynccontextmanager
async def http_client(url: str, token: str = TOKEN) -> AsyncIterator[Client]:
    """A client that is connected to a server over Streamable HTTP."""
    from mcp import ClientSession
    from mcp.client.streamable_http import streamable_http_client as connect

    try:
        import httpx2 as httpx  # the SDK's since 2.x
    except ModuleNotFoundError:
        import httpx
    headers = {"Authorization": f"Bearer {token}"}
    async with (
        httpx.AsyncClient(headers=headers, timeout=60) as web,
        connect(f"{url}/mcp", http_client=web) as (read, write, *_),
        ClientSession(read, write) as session,
    ):
        await session.initialize()
        yield Client(session)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class HttpServer:
    """A server process that speaks HTTP: `with HttpServer(fake) as server:` at server.url."""

    def __init__(self, fake: FakeSvacer | str, **settings: object):
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.env = environment(fake, **{
            "SVACER_TRANSPORT": "http", "SVACER_HTTP_PORT": port, "SVACER_MCP_TOKEN": TOKEN,
            **settings})

    def __enter__(self) -> HttpServer:
        self.process = subprocess.Popen(
            [sys.executable, str(SERVER)], env=self.env, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        until(self.healthy, 30)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.stdout, self.stderr = self.process.communicate()

    def healthy(self) -> bool:
        assert self.process.poll() is None, self.process.communicate()
        with suppress(OSError):
            return self.request("GET", "/health")[0] == 200
        return False

    def request(self, method: str, path: str = "/mcp", body: bytes | str | None = None,
                token: str | None = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers in lower case and body of one plain HTTP request."""
        address = urlsplit(self.url)
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=30)
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        if body is not None:
            headers = {"Content-Type": "application/json",
                       "Accept": "application/json, text/event-stream", **headers}
        with closing(connection):
            connection.request(method, path, body, headers)
            reply = connection.getresponse()
            return (reply.status, {k.lower(): v for k, v in reply.getheaders()}, reply.read())


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def demo_server() -> Iterator[HttpServer]:
    """A server over HTTP before a fake that no test makes misbehave."""
    with FakeSvacer() as fake, HttpServer(fake) as server:
        yield server


@pytest.fixture(params=["stdio", "http"])
def connect(request: pytest.FixtureRequest, demo_server: HttpServer) -> Callable[[], Any]:
    """Makes clients over the one transport, then over the other."""
    if request.param == "http":
        return lambda: http_client(demo_server.url)
    return lambda: stdio_client(environment(demo_server.env["SVACER_URL"]))


def in_process(fake: FakeSvacer | str, **settings: object) -> svacer_mcp.Svacer:
    given = {k: v for k, v in environment(fake, **settings).items() if k.startswith("SVACER_")}
    return svacer_mcp.Svacer(svacer_mcp.load_settings(given, os.devnull))


def ask(svacer: svacer_mcp.Svacer, tool: str, **args: Any) -> Any:
    """One tool call in this process, without an MCP client; an error is raised as Failed."""
    text, failed = svacer_mcp.answer(svacer_mcp.Call(svacer), tool, args)
    answer = json.loads(text)
    if failed:
        raise Failed(answer["error"])
    return answer


def refusal(svacer: svacer_mcp.Svacer, tool: str, **args: Any) -> dict[str, Any]:
    with pytest.raises(Failed) as caught:
        ask(svacer, tool, **args)
    return caught.value.error


# ---- Command line --------------------------------------------------------------------------------

def serve(args: argparse.Namespace) -> int:
    data = [*demo()]
    if args.huge:
        data.append(synthetic("huge", 2, args.huge))
    if args.many:
        data.append(synthetic("many", args.many, 300))
    try:
        fake = FakeSvacer(data, port=args.port)
    except OSError as e:
        print(f"Port {args.port} cannot be used: {e.strerror}", file=sys.stderr)
        return 1
    print(f"{fake.url}\nlogin: {fake.api.login}, password: {fake.api.password}\nprojects:",
          ", ".join(branch.project for branch in data), flush=True)
    with suppress(KeyboardInterrupt):
        fake.serve_forever()
    fake.server_close()
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Things to try by hand; the tests need pytest.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    serving = commands.add_parser("serve", help="keep the fake Svacer server up until Ctrl+C")
    serving.add_argument("--port", type=int, default=8090)
    serving.add_argument("--huge", type=int, default=0, metavar="N",
                         help="add project huge: two snapshots of N markers")
    serving.add_argument("--many", type=int, default=0, metavar="N",
                         help="add project many: N snapshots of 300 markers")
    serving.set_defaults(run=serve)

    args = parser.parse_args(argv)
    return int(args.run(args))


if __name__ == "__main__":
    raise SystemExit(main())
