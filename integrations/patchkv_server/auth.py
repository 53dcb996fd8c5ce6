"""API keys, and whose they are."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from urllib.parse import urlsplit

from patchkv_agents.errors import InputError
from patchkv_server.errors import ApiError

LOCAL = "local"
"""The tenant of requests without key and user."""
OPERATOR = "operator"
"""The tenant whose keys show the figures and threads of all tenants."""


class ApiKeys:
    """The keys that a server accepts. Without any, every request is accepted.

    Args:
        keys: `key`, or `name:key`; keys of one name are one tenant's. Neither a name nor a key
            has a colon; a key consists of ASCII characters without spaces, as headers carry them.

    Raises:
        InputError: a key is too short to be one, has other characters, or is given twice.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._tenants: dict[bytes, str] = {}
        for line in keys:
            name, _, key = line.strip().rpartition(":")
            if ":" in name:
                raise InputError(
                    "an API key has several colons: write 'key' or 'name:key', without further ones"
                )
            if len(key) < 8:
                raise InputError("an API key has fewer than 8 characters: choose a longer one")
            if not all("!" <= character <= "~" for character in key):
                raise InputError(
                    "an API key has a space or a character that is not ASCII: choose another one"
                )
            if key.encode() in self._tenants:
                raise InputError("an API key is given twice: each needs a key of its own")
            digest = blake2b(key.encode(), digest_size=6).hexdigest()
            self._tenants[key.encode()] = name or f"key-{digest}"

    @classmethod
    def read(cls, keys: Iterable[str], file: Path | None) -> ApiKeys:
        """Keys given directly, and those of a file: one a line, `#` begins a comment.

        Raises:
            InputError: the file cannot be read or has no keys; or see `ApiKeys`.
        """
        lines = list(keys)
        if file is not None:
            try:
                text = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise InputError(f"the file of API keys cannot be read: {error}") from None
            found = [line.strip() for line in text.splitlines()]
            found = [line for line in found if line and not line.startswith("#")]
            if not found:
                raise InputError(f"{file} has no API keys: write one a line")
            lines += found
        return cls(lines)

    @property
    def tenants(self) -> frozenset[str]:
        """The names of those that have keys."""
        return frozenset(self._tenants.values())

    def viewer(self, headers: Mapping[str, str]) -> str | None:
        """The tenant whose threads and figures a request may see; None sees all.

        Raises:
            ApiError: as `tenant`.
        """
        tenant = self.tenant(headers)
        return tenant if self and tenant != OPERATOR else None

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def tenant(self, headers: Mapping[str, str], user: str | None = None) -> str:
        """Whose request this is.

        Args:
            headers: of the request, with lower-case names.
            user: who the client says it is; counts only where there are no keys.

        Raises:
            ApiError: 401, the key is missing or wrong; 403, the request was made to another
                host name than this machine's own, as by a web page that stands for it, or by a
                web page of another machine.
        """
        if not self._tenants:
            if not is_loopback(_host_name(headers.get("host", ""))):
                raise ApiError(
                    403,
                    "without API keys only requests to localhost are answered: start the server "
                    "with --api-key",
                    code="host_not_allowed",
                )
            if _is_foreign_page(headers.get("origin", "")):
                raise ApiError(
                    403,
                    "without API keys no web page of another machine is answered: start the server "
                    "with --api-key",
                    code="origin_not_allowed",
                )
            return f"user-{user}" if user else LOCAL
        scheme, _, key = headers.get("authorization", "").partition(" ")
        key = key if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        given = key.strip().encode()
        found = None
        for known, tenant in self._tenants.items():  # all of them, so that time tells nothing
            if hmac.compare_digest(known, given):
                found = tenant
        if found is None:
            raise ApiError(
                401,
                "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return found


def _host_name(header: str) -> str:
    """The name in a Host header; empty if there is none."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:  # an address in brackets that is none
        return ""


def _is_foreign_page(origin: str) -> bool:
    """Whether a browser says that a page from elsewhere asks; desktop programs say other things."""
    scheme, _, rest = origin.partition("://")
    return scheme.lower() in ("http", "https") and not is_loopback(_host_name(rest))


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
