"""HubClient: requests to a Hugging Face hub; waits out what passes, and says in one line what does not.

Tokens, the endpoint and the session are huggingface_hub's, so HF_TOKEN, `hf auth login`, HF_ENDPOINT and
HF_HUB_OFFLINE mean here what they mean everywhere.
"""

from __future__ import annotations

import os
import re
import socket
from contextlib import contextmanager, suppress
from threading import Event
from typing import TYPE_CHECKING, Any, TypeVar

import httpx2
from huggingface_hub import HfApi, constants, get_session, get_token, hf_raise_for_status
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RevisionNotFoundError,
)

from lmpack import __version__
from lmpack.errors import HubError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

MAX_FAILURES = 6  # in a row; a try that brought bytes starts the count again
NOTICED_S = 10.0  # a silence that one wonders about
MAX_WAIT_S = 600.0  # the hub's rate limits start anew every five minutes
TIMEOUT_S = 30.0  # of silence, not of the whole transfer
RANGE_NBYTES = (
    1 << 30
)  # of one request: the signed addresses that the hub redirects to expire within the hour
_PASSING = (408, 429, 500, 502, 503, 504)
_RATE_LIMIT_RESET = re.compile(r";\s*r\s*=\s*0\s*;\s*t\s*=\s*(\d{1,6})")  # RateLimit: "api";r=0;t=55


class HubClient:
    """Asks one hub, with one token; may be used from many threads."""

    def __init__(
        self,
        *,
        token: str | None = None,
        wait: Callable[[float], object] | None = None,
        notice: Callable[[str], object] = lambda _: None,
    ) -> None:
        """Take the token given, or the one huggingface_hub finds; `wait` passes seconds between two tries.

        `notice` is told when they are many, from any thread.
        """
        self.endpoint = os.environ.get("HF_ENDPOINT", constants.ENDPOINT).rstrip("/")
        if not self.endpoint.startswith(("https://", "http://")):
            raise UsageError(f"HF_ENDPOINT is {self.endpoint!r:.100}, expected https://...")
        implicit = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
        self.token = token or implicit
        self.api = HfApi(
            endpoint=self.endpoint,
            token=self.token or False,
            library_name="lmpack",
            library_version=__version__,
        )
        self._headers = {"User-Agent": f"lmpack/{__version__}"}
        if self.token:
            self._headers["Authorization"] = f"Bearer {self.token}"
        self._stopped = Event()
        self._sockets: set[socket.socket] = set()  # of the streams that run
        self._wait = wait or self._stopped.wait
        self._notice = notice
        self._has_answered = False

    def stop(self) -> None:
        """Make every stream that runs in another thread end with HubError now, and every one that comes after."""
        self._stopped.set()
        for one in self._sockets.copy():
            with suppress(OSError):  # it ended by itself meanwhile
                socket.socket.shutdown(one, socket.SHUT_RDWR)

    def retry(self, where: str, request: Callable[[], T], *, most: int = MAX_FAILURES) -> T:
        """Return what request() does, asked again while its failure may pass; raises HubError that names where.

        A request is given up after `most` failures.
        """
        failures = 0
        while True:
            try:
                found = request()
            except (httpx2.HTTPError, OfflineModeIsEnabled) as error:
                failures += 1
                self._pause(error, failures, where, most)
            else:
                self._has_answered = True
                return found

    def get_json(self, url: str, where: str) -> tuple[Any, str | None]:
        """Return a JSON answer, and the address of its next page when there is one."""

        headers = dict(self._headers)
        if not url.startswith(f"{self.endpoint}/"):  # a hub's next page may be another server's
            headers.pop("Authorization", None)

        def ask() -> httpx2.Response:
            response = get_session().get(url, headers=headers, timeout=TIMEOUT_S)
            hf_raise_for_status(response)
            return response

        response = self.retry(where, ask)
        try:
            found = response.json()
        except ValueError as error:
            raise HubError(
                f"{where}: {self.endpoint} answered with something that is no JSON; is it a hub?"
            ) from error
        following = response.links.get("next", {}).get("url")
        return found, following

    def stream(self, url: str, where: str, start: int, stop: int) -> Iterator[bytes]:
        """Yield bytes [start, stop) of a file in order; a connection that breaks is taken up where it broke."""
        position, failures = start, 0
        while position < stop:
            before = position
            end = min(stop, position + RANGE_NBYTES)
            headers = self._headers | {"Range": f"bytes={position}-{end - 1}", "Accept-Encoding": "identity"}
            try:
                with (
                    get_session().stream("GET", url, headers=headers, timeout=TIMEOUT_S) as response,
                    self._running(response),
                ):
                    hf_raise_for_status(response)
                    self._has_answered = True
                    _check_range(response, position, where)
                    for chunk in response.iter_raw():
                        self.check_stopped(where)
                        taken = chunk[: end - position]
                        position += len(taken)
                        failures = 0
                        yield taken
                        if len(taken) < len(chunk):  # more than was asked for; else the connection stays good
                            break
            except (httpx2.HTTPError, OfflineModeIsEnabled) as error:
                failures += 1
                self._pause(error, failures, where)
            else:
                if position == before:
                    failures += 1
                    self._pause(httpx2.RemoteProtocolError("an empty answer"), failures, where)

    def _pause(
        self,
        error: httpx2.HTTPError | OfflineModeIsEnabled,
        failures: int,
        where: str,
        most: int = MAX_FAILURES,
    ) -> None:
        """Wait before the next try, or raise HubError when another would not help."""
        self.check_stopped(where)
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        may_pass = status in _PASSING or isinstance(error, httpx2.TransportError)
        is_offline = isinstance(error, httpx2.ConnectError) and not self._has_answered
        if not may_pass or is_offline or failures >= most:
            raise HubError(self.hide_token(f"{where}: {self._explain(error)}")) from error
        wait_s = _wait_s(error, failures)
        if wait_s >= NOTICED_S:
            self._notice(
                f"{where}: {self.endpoint} answered {status}; asking again in {wait_s:.0f} s, as it wants"
            )
        self._wait(wait_s)
        self.check_stopped(where)

    @contextmanager
    def _running(self, response: httpx2.Response) -> Iterator[None]:
        """Let stop() end what waits for this answer's bytes."""
        connection: socket.socket = response.extensions["network_stream"].get_extra_info("socket")
        self._sockets.add(connection)
        try:
            yield
        finally:
            self._sockets.discard(connection)

    def check_stopped(self, where: str) -> None:
        """Raise HubError when stop() was called: for threads that are busy with something else than the hub."""
        if self._stopped.is_set():
            raise HubError(f"{where}: interrupted")

    def hide_token(self, text: str) -> str:
        """Return a message that others wrote without our token."""
        return text.replace(self.token, "***") if self.token else text

    def _explain(self, error: httpx2.HTTPError | OfflineModeIsEnabled) -> str:
        login = "set HF_TOKEN, or run: hf auth login"
        if isinstance(error, OfflineModeIsEnabled):
            return "HF_HUB_OFFLINE is set, so nothing is asked; unset it"
        if isinstance(error, httpx2.ConnectError):
            return (
                f"{self.endpoint} cannot be reached ({error}); check the network, the proxy and HF_ENDPOINT"
            )
        if not isinstance(error, HfHubHTTPError):
            kind = type(error).__name__
            return f"{self.endpoint} broke off again and again ({kind}: {error}); run it again to go on"
        status = error.response.status_code
        said = " ".join((error.server_message or "").split())[:200]
        if isinstance(error, GatedRepoError):
            how = "your token has no access yet" if self.token else f"then {login}"
            return f"is gated: accept its terms on {self.endpoint}, {how}"
        if isinstance(error, RevisionNotFoundError):
            return "no such revision; name a branch, a tag or a commit of the repository"
        if isinstance(error, RemoteEntryNotFoundError):
            return "no such file in the repository"
        if status == 404 and self._has_answered:
            return "is no longer there (404); run it again"
        if status in (401, 404):
            private = "your token may not see it, or is not valid" if self.token else login
            return f"no such repository on {self.endpoint}; if it is private: {private}"
        if status == 403:
            return f"{self.endpoint} forbids it ({said or 'no reason given'}); use a token that may do this"
        if status in _PASSING:
            return f"{self.endpoint} answered {status} again and again; try again later"
        return f"{self.endpoint} answered {status} ({said or 'no reason given'})"


def _wait_s(error: httpx2.HTTPError | OfflineModeIsEnabled, failures: int) -> float:
    """Return what the hub asks for, else 0, 1, 2, 4, 8 seconds."""
    if isinstance(error, HfHubHTTPError):
        headers = error.response.headers
        asked = headers.get("Retry-After", "")
        if asked.isdecimal() and len(asked) < 7:
            return min(float(asked), MAX_WAIT_S)
        if reset := _RATE_LIMIT_RESET.search(headers.get("RateLimit", "")):
            return min(float(reset[1]), MAX_WAIT_S)
    return float(2 ** (failures - 2)) if failures > 1 else 0.0


def _check_range(response: httpx2.Response, start: int, where: str) -> None:
    """Raise HubError when an answer does not begin with the byte that was asked for."""
    found = response.headers.get("Content-Range", "bytes 0-" if response.status_code == 200 else "none")
    if not found.startswith(f"bytes {start}-"):
        raise HubError(
            f"{where}: asked for bytes from {start} on, the answer has {found!r:.60}; a proxy or mirror that "
            "cannot do ranges stands between: use another HF_ENDPOINT"
        )
