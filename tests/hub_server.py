"""A local hub: the part of the Hugging Face hub's HTTP interface that pulling and pushing use, with faults on demand.

Two servers stand behind it, as on the real one: the hub itself, and the store of large files that it redirects to,
which is another origin and must never see a token. It shares no code with lmpack.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

from huggingface_hub import close_session, constants

from tests.hub_repository import Branch, Repo, tree_entry, upload_mode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import pytest

PAGE_NUM_FILES = 50


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with a request for a path, if anything; those of one path are used up in order."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    cut_after: int | None = None  # bytes of the body, then the connection ends
    flip: int | None = None  # the byte of the file that comes inverted
    no_ranges: bool = False
    then: Callable[[], object] | None = None  # called when the bytes before the cut are out


@dataclass(frozen=True, slots=True)
class Request:
    """One request as it came."""

    server: str  # "hub" or "store"
    method: str
    path: str
    range: str | None
    has_token: bool


class HubServer:
    """The hub, while its context lasts."""

    def __init__(self, token: str = "hf_secret") -> None:
        self.token = token  # the only one it knows
        self.repos: dict[str, Repo] = {}
        self.blobs: dict[str, bytes] = {}  # sha256 -> what was uploaded
        self.faults: dict[str, list[Fault]] = {}
        self.requests: list[Request] = []
        self.withheld: set[str] = set()  # headers that its answers about files lack
        self.next_page: Callable[[int], str] | None = None  # what it says of the page that comes next
        self.lock = threading.Lock()
        self._hub = _start(self, _HubHandler)
        self._store = _start(self, _StoreHandler)

    @property
    def url(self) -> str:
        """The endpoint."""
        return f"http://127.0.0.1:{self._hub.server_port}"

    @property
    def store_url(self) -> str:
        """Where large files are."""
        return f"http://127.0.0.1:{self._store.server_port}"

    def close(self) -> None:
        for server in (self._hub, self._store):
            server.shutdown()
            server.server_close()

    def add(self, repo_id: str, files: dict[str, bytes], **settings: Any) -> Repo:
        """Make a repository with one branch, main."""
        repo = self.repos[repo_id] = Repo({}, **settings)
        self.set_branch(repo_id, "main", files)
        return repo

    def set_branch(self, repo_id: str, branch: str, files: dict[str, bytes]) -> None:
        """Let a branch of a repository hold these files."""
        self.repos[repo_id].branches[branch] = Branch.of(files)
        for raw in files.values():
            self.blobs[hashlib.sha256(raw).hexdigest()] = raw

    def fail(self, path: str, *faults: Fault) -> None:
        """Let the next requests for bytes of the file, or of the API path, go wrong."""
        self.faults.setdefault(path, []).extend(faults)

    def take_fault(self, path: str) -> Fault | None:
        with self.lock:
            waiting = self.faults.get(path)
            fault = waiting.pop(0) if waiting else Fault()
        return None if fault == Fault() else fault

    def asked(self, word: str, method: str = "GET") -> list[Request]:
        """The requests of a method whose path has the word."""
        return [request for request in self.requests if request.method == method and word in request.path]


@contextmanager
def hub_server(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[HubServer]:
    """Run a hub, and let huggingface_hub know of no other one; its cache is folder / "cache", nobody is logged in."""
    server = HubServer()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    for name, value in {
        "HF_HUB_CACHE": str(folder / "cache"),
        "HF_HUB_DISABLE_TELEMETRY": True,  # or it asks for more than we do
        "HF_HUB_DISABLE_XET": False,  # as users have it; this hub speaks no Xet, and every question for it is a 404
        "HF_HUB_OFFLINE": False,
        "HF_TOKEN_PATH": str(folder / "no-token"),
    }.items():
        monkeypatch.setattr(constants, name, value)
    try:
        yield server
    finally:
        close_session()
        server.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    hub: HubServer


def _start(hub: HubServer, handler: type[BaseHTTPRequestHandler]) -> _Server:
    server = _Server(("127.0.0.1", 0), handler)
    server.hub = hub
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    return server


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two packets
    name: ClassVar[str]
    server: _Server

    @property
    def hub(self) -> HubServer:
        return self.server.hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def note(self) -> None:
        token = self.headers.get("Authorization") == f"Bearer {self.hub.token}"
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(Request(self.name, self.command, path, self.headers.get("Range"), token))

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for key, value in headers.items():
            if key not in self.hub.withheld:
                self.send_header(key.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer_json(self, document: object, status: int = 200, **headers: str) -> None:
        self.answer(status, json.dumps(document).encode(), Content_Type="application/json", **headers)

    def refuse(self, status: int, code: str | None, message: str) -> None:
        headers = {"X_Error_Message": message} | ({"X_Error_Code": code} if code else {})
        self.answer_json({"error": message}, status, **headers)

    def answer_bytes(self, raw: bytes, fault: Fault | None, **headers: str) -> None:
        """Answer with a file or the range that is asked for."""
        fault = fault or Fault()
        if fault.status != 200:
            self.answer(fault.status, b"", **{key.replace("-", "_"): v for key, v in fault.headers.items()})
            return
        if fault.flip is not None:
            at = fault.flip
            raw = raw[:at] + bytes([raw[at] ^ 0xFF]) + raw[at + 1 :]
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked and not fault.no_ranges:
            start = int(asked[1])
            stop = min(int(asked[2] or len(raw)) + 1, len(raw))
            headers["Content_Range"] = f"bytes {start}-{stop - 1}/{len(raw)}"
            status, body = 206, raw[start:stop]
        else:
            status, body = 200, raw
        if fault.cut_after is None:
            self.answer(status, body, **headers)
            return
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: fault.cut_after])
        self.wfile.flush()
        if fault.then is not None:
            fault.then()
        self.close_connection = True


class _StoreHandler(_Handler):
    name = "store"

    def do_GET(self) -> None:
        self.note()
        if "Authorization" in self.headers or "signature" not in self.path:
            self.refuse(400, None, "signed addresses take no token")
            return
        url = urlsplit(self.path)
        raw = self.hub.blobs[url.path.rpartition("/")[2]]
        self.answer_bytes(raw, self.hub.take_fault(parse_qs(url.query)["file"][0]))

    def do_PUT(self) -> None:
        self.note()
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        oid = self.path.rpartition("/")[2]
        if fault := self.hub.take_fault("upload"):
            self.answer_bytes(b"", fault)
        elif hashlib.sha256(raw).hexdigest() != oid:
            self.refuse(400, None, "wrong bytes")
        else:
            self.hub.blobs[oid] = raw
            self.answer(200, b"")


class _HubHandler(_Handler):
    name = "hub"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.note()
        path = unquote(urlsplit(self.path).path)
        if fault := self.hub.take_fault(path):
            self.answer_bytes(b"{}", fault)
        elif match := re.fullmatch(r"/api/models/(\w[\w.-]*/[\w.-]+)(?:/revision/(.+))?", path):
            if found := self.find(match[1], match[2] or "main"):
                self.answer_info(match[1], *found)
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", path):
            if found := self.find(match[1], match[2]):
                self.answer_tree(found[1].files)
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            if found := self.find(match[1], match[2], reads=True):
                self.answer_file(found[1], match[3])
        else:
            self.refuse(404, None, "no such page")

    def find(self, repo_id: str, revision: str, *, reads: bool = False) -> tuple[Repo, Branch] | None:
        """Look up a repository's files at a revision; answer why not when they may not be seen."""
        repo = self.hub.repos.get(repo_id)
        has_token = self.headers.get("Authorization") == f"Bearer {self.hub.token}"
        if "Authorization" in self.headers and not has_token:
            self.refuse(401, None, f"Invalid credentials: {self.headers['Authorization']}")
        elif repo is None or (repo.private and not has_token):
            self.refuse(404 if has_token else 401, "RepoNotFound", "Repository not found")
        elif repo.gated and reads and not has_token:
            self.refuse(401, "GatedRepo", f"Access to model {repo_id} is restricted")
        else:
            known = repo.branches | {branch.commit: branch for branch in repo.branches.values()}
            if revision in known:
                return repo, known[revision]
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return None

    def answer_info(self, repo_id: str, repo: Repo, branch: Branch) -> None:
        self.answer_json(
            {
                "_id": "0",
                "id": repo_id,
                "sha": branch.commit,
                "private": repo.private,
                "gated": "auto" if repo.gated else False,
                "siblings": [{"rfilename": name} for name in branch.files],
                "cardData": {"license": repo.license} if repo.license else None,
            }
        )

    def answer_tree(self, files: dict[str, bytes]) -> None:
        query = parse_qs(urlsplit(self.path).query)
        start = int(query.get("cursor", ["0"])[0])
        entries = [{"type": "directory", "path": "folder", "oid": "0" * 40, "size": 0}]
        entries += [tree_entry(name, raw) for name, raw in sorted(files.items())]
        following = start + PAGE_NUM_FILES
        links: dict[str, Any] = {}
        if following < len(entries) or self.hub.next_page is not None:
            address = f"{self.hub.url}{urlsplit(self.path).path}?recursive=true&cursor={following}"
            if self.hub.next_page is not None:
                address = self.hub.next_page(start)
            links["Link"] = f'<{address}>; rel="next"'
        self.answer_json(entries[start:following], **links)

    def answer_file(self, branch: Branch, name: str) -> None:
        if name not in branch.files:
            self.refuse(404, "EntryNotFound", f"{name} does not exist")
            return
        raw = branch.files[name]
        entry = tree_entry(name, raw)
        if "lfs" not in entry:
            etag = f'"{entry["oid"]}"'
            self.answer_bytes(raw, self.hub.take_fault(name), ETag=etag, X_Repo_Commit=branch.commit)
            return
        oid = entry["lfs"]["oid"]
        self.answer(
            302,
            b"",
            Location=f"{self.hub.store_url}/{oid}?signature=1&file={name}",
            X_Repo_Commit=branch.commit,
            X_Linked_Size=str(len(raw)),
            X_Linked_ETag=f'"{oid}"',
            X_Xet_Hash=oid,
            X_Xet_Refresh_Route=f"{self.hub.url}/api/models/xet-read-token",
            ETag='"of-the-redirect"',
        )

    def do_POST(self) -> None:
        self.note()
        raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = unquote(urlsplit(self.path).path)
        if self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self.refuse(401, None, "Invalid username or password.")
        elif fault := self.hub.take_fault(path):
            self.answer_bytes(b"{}", fault)
        elif path == "/api/repos/create":
            self.create_repo(json.loads(raw))
        elif path == "/api/validate-yaml":
            self.answer_json({"errors": [], "warnings": []})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/branch/(.+)", path):
            repo = self.hub.repos[match[1]]
            if match[2] in repo.branches:
                self.refuse(409, None, "Reference already exists")
            else:
                repo.branches[match[2]] = repo.branches["main"]
                self.answer_json({})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/(.+)", path):
            if found := self.find(match[1], match[2]):
                self.answer_json(
                    {"files": [upload_mode(file, found[1].files) for file in json.loads(raw)["files"]]}
                )
        elif re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            self.answer_json(
                {"transfer": "basic", "objects": [self.batch(o) for o in json.loads(raw)["objects"]]}
            )
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/(.+)", path):
            self.commit(match[1], match[2], [json.loads(line) for line in raw.splitlines()])
        else:
            self.refuse(404, None, "no such page")

    def create_repo(self, wanted: dict[str, Any]) -> None:
        repo_id = f"{wanted['organization']}/{wanted['name']}"
        if wanted["organization"] == "somebody-else":
            self.refuse(403, None, "You don't have the rights to create a model under the namespace")
            return
        if repo_id in self.hub.repos:
            self.answer_json({"error": "exists", "url": f"{self.hub.url}/{repo_id}"}, 409)
            return
        self.hub.add(
            repo_id, {".gitattributes": b"*.bin lfs\n"}, private=wanted.get("visibility") == "private"
        )
        self.answer_json({"url": f"{self.hub.url}/{repo_id}", "name": repo_id})

    def batch(self, wanted: dict[str, Any]) -> dict[str, Any]:
        known = {"oid": wanted["oid"], "size": wanted["size"]}
        if fault := self.hub.take_fault("batch"):
            return known | {"error": {"code": fault.status, "message": "no room"}}
        if wanted["oid"] in self.hub.blobs:
            return known
        upload = {"href": f"{self.hub.store_url}/upload/{wanted['oid']}", "header": {}}
        return known | {"actions": {"upload": upload}}

    def commit(self, repo_id: str, branch: str, lines: list[dict[str, Any]]) -> None:
        repo = self.hub.repos[repo_id]
        files = dict(repo.branches[branch].files)
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
            else:
                repo.messages.append(value["summary"])
        repo.branches[branch] = Branch.of(files)
        oid = repo.branches[branch].commit
        self.answer_json(
            {"success": True, "commitOid": oid, "commitUrl": f"{self.hub.url}/{repo_id}/commit/{oid}"}
        )
