"""The box's control port (transport/control/), for a program that is no rank of the job."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import json
import os
import socket
import ssl
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from phub import errors

_TIMEOUT_S = 10
_MOST_ANSWER_BYTES = 16 << 20
_BY_NAME = {kind.code: kind for kind in errors.BY_CODE}


def token_from_environment() -> str:
    """PHUB_TOKEN, or the first line of PHUB_TOKEN_FILE; "": neither is set."""
    if token := os.environ.get("PHUB_TOKEN"):
        return token
    path = os.environ.get("PHUB_TOKEN_FILE")
    if not path:
        return ""
    try:
        if Path(path).stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise errors.InvalidError(
                f"PHUB_TOKEN_FILE={path}: others may use it; run chmod 600 on it"
            )
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise errors.InvalidError(f"PHUB_TOKEN_FILE={path}: {error.strerror}") from None
    if not lines or not lines[0]:
        raise errors.InvalidError(f"PHUB_TOKEN_FILE={path}: its first line holds no token")
    return lines[0]


def _trust() -> ssl.SSLContext:
    authorities = os.environ.get("PHUB_CA") or None
    mine, key = os.environ.get("PHUB_CLIENT_CERT"), os.environ.get("PHUB_CLIENT_KEY")
    if bool(mine) != bool(key):
        raise errors.InvalidError(
            "PHUB_CLIENT_CERT and PHUB_CLIENT_KEY go together: a certificate, and its key"
        )
    try:
        context = ssl.create_default_context(cafile=authorities)
        if mine:
            context.load_cert_chain(mine, key)
    except OSError as error:
        given = [f"{name}={os.environ[name]}" for name in _FILES if os.environ.get(name)]
        raise errors.InvalidError(f"{', '.join(given)}: {error}") from None
    return context


_FILES = ("PHUB_CA", "PHUB_CLIENT_CERT", "PHUB_CLIENT_KEY")


class Control:
    """Requests to a box, over one connection. One thread."""

    def __init__(self, server: str, token: str = "") -> None:
        """server: HOST:PORT, or https://HOST:PORT. PHUB_CA … as for every client."""
        self.server, self._token = server, token
        text = server if "://" in server else f"http://{server}"
        parts = urlsplit(text)
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if parts.scheme not in ("http", "https") or not host or not port or parts.path.strip("/"):
            raise errors.InvalidError(
                f"'{server}' does not name a server: host and port are needed"
            )
        self._connection: http.client.HTTPConnection
        if parts.scheme == "https":
            self._connection = http.client.HTTPSConnection(
                host, port, timeout=_TIMEOUT_S, context=_trust()
            )
        else:
            self._connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)

    def get(self, path: str) -> Any:
        """The answer, from JSON. Raises phub.Error, as the box says it."""
        try:
            return self._ask("GET", path)
        except http.client.HTTPException:  # the connection was idle for too long
            self.close()
            return self._ask_once("GET", path)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """As `get`. Over a connection of its own: sent twice, it would be two."""
        self.close()
        return self._ask_once("POST", path, body)

    def close(self) -> None:
        """The next request begins another connection."""
        self._connection.close()

    def _ask_once(self, method: str, path: str, body: Any = None) -> Any:
        try:
            return self._ask(method, path, body)
        except http.client.HTTPException as error:
            self.close()
            raise errors.UnavailableError(
                f"the server at {self.server} broke off: {error!r}"
            ) from None

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        try:
            if self._connection.sock is None:
                self._connection.connect()
            headers = {"Content-Type": "application/json"} if body is not None else {}
            if self._token:
                self._check_way()
                headers["Authorization"] = f"Bearer {self._token}"
            text = None if body is None else json.dumps(body).encode()
            self._connection.request(method, path, text, headers)
            answer = self._connection.getresponse()
            found = answer.read(_MOST_ANSWER_BYTES + 1)
        except http.client.HTTPException:
            raise
        except ssl.SSLCertVerificationError as error:
            self.close()
            raise errors.UnauthorizedError(
                f"{self.server}: its certificate is not trusted: {error.verify_message}; PHUB_CA "
                "names the file with the authority's"
            ) from None
        except OSError as error:
            self.close()
            raise errors.UnavailableError(
                f"no phub server at {self.server}: {error}; start one with 'phub serve' or set "
                "PHUB_SERVER"
            ) from None
        return self._decoded(answer.status, found)

    def _decoded(self, status: int, body: bytes) -> Any:
        if len(body) > _MOST_ANSWER_BYTES:
            self.close()
            raise errors.InternalError(f"{self.server}: an answer of more than 16 MiB")
        try:
            found = json.loads(body)
            if status == http.client.OK:
                return found
            code, why = str(found["code"]), str(found["detail"])
        except (ValueError, TypeError, KeyError):
            raise errors.InternalError(
                f"{self.server}: an answer of status {status} that is not phub's"
            ) from None
        raise _BY_NAME.get(code, errors.InternalError)(why)

    def _check_way(self) -> None:
        """A token crosses a network only over TLS, or where PHUB_INSECURE trusts it."""
        connection = self._connection
        if isinstance(connection, http.client.HTTPSConnection) or connection.sock is None:
            return
        if os.environ.get("PHUB_INSECURE", "") in ("true", "yes", "on", "1"):
            return
        here, there = (_address(of) for of in _ends(connection.sock))
        if here != there and not there.is_loopback:
            self.close()
            raise errors.UnauthorizedError(
                f"a token would go to {self.server} in plain text: use https://, or set "
                "PHUB_INSECURE=true if the network is trusted"
            )


def _ends(connection: socket.socket) -> tuple[str, str]:
    return connection.getsockname()[0], connection.getpeername()[0]


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(text.partition("%")[0])


@dataclass(frozen=True)
class RoundLoss:
    """The loss of a round: the mean of the ranks that reported it."""

    round: int
    branch: int  # that ran
    ranks: int
    loss: float
    name: str = "loss"


class RemoteJob:
    """A job, driven from outside: an admin's token is needed where the box asks for tokens."""

    def __init__(self, control: Control, name: str) -> None:
        self.name, self.control = name, control
        self._path = f"/v1/jobs/{quote(name, safe='')}"
        self._epoch: int | None = None
        self._latest = 0

    def losses(self, since: int) -> list[RoundLoss]:
        """Of all names, of the rounds from `since` on: those that are settled. Ascending.

        Raises RewoundError: the job has gone on from a checkpoint, or is another one.
        """
        page = self.control.get(f"{self._path}/losses/{since}")
        epoch, latest = page.get("epoch", 0), page.get("latest", 0)
        if latest < self._latest or self._epoch not in (None, epoch):
            raise errors.RewoundError(
                f"job '{self.name}' has begun anew, or has gone on from a checkpoint: rounds that "
                "were seen, and what was decided in them, are void"
            )
        self._epoch, self._latest = epoch, latest
        return [
            RoundLoss(
                of["round"],
                of.get("branch", 0),
                of["ranks"],
                float("nan") if of.get("nonfinite") else float(of.get("loss", 0)),
                of.get("name", "loss"),
            )
            for of in page["losses"]
        ]

    def branches(self) -> tuple[list[int], list[tuple[int, int]]]:
        """Those that take room, and (round, branch): from that round on it runs. Rounds ascend."""
        found = self._change("list")
        runs = [(of["round"], of["branch"]) for of in found["runs"]]
        return [of["branch"] for of in found["branches"] if not of.get("killed")], runs

    def room(self, parent: int, most: int, values: Mapping[str, float]) -> int:
        """How many more branches it may have, as far as `most`: so many are made, and go.

        The first with these hyperparameters. Raises InvalidError: the job cannot have them.
        """
        made: list[int] = []
        try:
            while len(made) < most:
                made.append(self.fork(parent, {} if made else values)[0])
        except errors.FullError:
            pass
        finally:
            for branch in made:
                self.discard(branch)
        return len(made)

    def has_gone_on(self) -> bool:
        """After a RewoundError: whether it was a checkpoint, and not the end of the job."""
        try:
            self.branches()
        except errors.RewoundError:
            return True
        except errors.NotFoundError:
            return False
        return False  # a job of this name that is not saved

    def fork(
        self,
        parent: int,
        hyper: Mapping[str, float] | None = None,
        round: int = 0,  # noqa: A002
    ) -> tuple[int, int]:
        """As `Worker.fork`."""
        made = self._change("fork", branch=parent, values=dict(hyper or {}), round=round)
        return made["branch"], made["round"]

    def schedule(self, *turns: int | tuple[int, int], round: int = 0) -> int:  # noqa: A002
        """As `Worker.schedule`."""
        pairs = [turn if isinstance(turn, tuple) else (turn, 0) for turn in turns]
        asked = [{"branch": branch, "rounds": rounds} for branch, rounds in pairs]
        return int(self._change("schedule", turns=asked, round=round)["round"])

    def discard(self, branch: int, round: int = 0) -> int:  # noqa: A002
        """As `Worker.discard`."""
        return int(self._change("discard", branch=branch, round=round)["round"])

    def _change(self, action: str, **more: Any) -> Any:
        asked = {"rank": 0, "incarnation": 0, "epoch": self._epoch or 0, "action": action, **more}
        with self._about_tokens():
            return self.control.post(f"{self._path}/branches", asked)

    @contextlib.contextmanager
    def _about_tokens(self) -> Any:
        try:
            yield
        except errors.UnauthorizedError as error:
            raise errors.UnauthorizedError(
                f"{error} (to drive the branches of job '{self.name}' from outside takes a token "
                "of role admin that covers it: PHUB_TOKEN or PHUB_TOKEN_FILE)"
            ) from None
