"""The job's token: the secret by which launchers, hubs and viewers of one job know each other."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

VARIABLE = "UNICOMM_JOB_TOKEN"
_SHORTEST = 16
_LONGEST_FILE = 4096  # bytes


class TokenError(Exception):
    """A token is no secret, or cannot be read; the message says what to do."""


def check_token(token: str, source: str = VARIABLE) -> str:
    """Returns the token. Raises `TokenError` when it is too short to be a secret."""
    if len(token) < _SHORTEST or not token.isascii():
        raise TokenError(
            f"{source} is too short to be a secret; use {_SHORTEST} or more ASCII characters,"
            " such as those of `openssl rand -hex 16`, the same on all hosts"
        )
    return token


def new_token() -> str:
    return secrets.token_hex(16)


def own_token() -> str:
    """Returns the token in the environment, "" if there is none. Raises `TokenError`."""
    token = os.environ.get(VARIABLE, "")
    return check_token(token) if token else ""


def token_of_file(path: Path) -> str:
    """Returns the token in a file that no other user may read or change. Raises `TokenError`."""
    try:
        # A FIFO must not hold up the launcher.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            info = os.fstat(file.fileno())
            if not stat.S_ISREG(info.st_mode):
                raise TokenError(f"{path} is not a regular file, so not a file with a token")
            if info.st_uid not in (os.getuid(), 0) or info.st_mode & 0o077:
                raise TokenError(
                    f"{path} is not private: others may read or change it, so it holds no secret; make it"
                    f" this user's, with `chmod 600 {path}`, and write a new token into it"
                )
            data = file.read(_LONGEST_FILE)
    except OSError as error:
        raise TokenError(
            f"cannot read the token in {path}: {error.strerror or error}; write one, on each host, with"
            f" `(umask 077; openssl rand -hex 16 > {path})` and the same content"
        ) from None
    try:
        return check_token(data.decode().strip(), f"the token in {path}")
    except UnicodeDecodeError:
        raise TokenError(f"{path} holds no text, so no token: use `openssl rand -hex 16`") from None
