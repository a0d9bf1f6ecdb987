"""A process for one exchange by PMIx: it connects to the launcher's server in the place of the rank that
started it, and prints what rank 0 put there.

    python -I -S pmix_client.py LIBRARIES KEY [VALUE]      LIBRARIES: paths to try, with colons between

It prints one line of JSON after `MARK`: the value, or the error. It imports only small modules of the
standard library, so that it starts in some milliseconds.

The library's ABI differs between versions in the structures that carry options, and none of those is used.
Used are only the parts of `pmix_proc_t` (256 characters and 32 bits, since version 2) and `pmix_value_t` (a
16-bit type, and its content at byte 8) that no version has changed, in more memory than any version needs.
"""

import ctypes
import json
import os
import sys

MARK = "unicomm-pmix "
NO_LIBRARY = 77  # exit code: no library could be loaded

_NAME = 256  # bytes of a namespace's name
_GLOBAL = 3  # PMIX_GLOBAL: a value for ranks of this host and of others
_STRING = 3  # PMIX_STRING


def load(paths: list[str]) -> "ctypes.CDLL | None":
    for path in paths:
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    return None


def exchange(pmix: ctypes.CDLL, key: bytes, value: "bytes | None") -> str:
    """Collective: returns the value of rank 0."""
    nothing, none = ctypes.c_void_p(), ctypes.c_size_t(0)

    def call(name: str, *arguments: object) -> None:
        status = getattr(pmix, name)(*arguments)
        if status != 0:
            pmix.PMIx_Error_string.restype = ctypes.c_char_p
            text = pmix.PMIx_Error_string(ctypes.c_int(status)) or b""
            raise RuntimeError(f"{name}: {text.decode(errors='replace')} ({status})")

    me = ctypes.create_string_buffer(4 * _NAME)
    call("PMIx_Init", me, nothing, none)
    try:
        if value is not None:
            held = ctypes.create_string_buffer(value)
            put = ctypes.create_string_buffer(4 * _NAME)
            ctypes.c_uint16.from_buffer(put).value = _STRING
            ctypes.c_void_p.from_buffer(put, 8).value = ctypes.addressof(held)
            call("PMIx_Put", ctypes.c_uint8(_GLOBAL), key, put)
            call("PMIx_Commit")
        call("PMIx_Fence", nothing, none, nothing, none)
        first = ctypes.create_string_buffer(me.raw[:_NAME], 4 * _NAME)  # its rank is 0
        got = ctypes.c_void_p()
        call("PMIx_Get", first, key, nothing, none, ctypes.byref(got))
        if not got.value or ctypes.c_uint16.from_address(got.value).value != _STRING:
            raise RuntimeError("PMIx_Get: the value is no text")
        text = ctypes.c_char_p.from_address(got.value + 8).value or b""
        return text.decode(errors="replace")
    finally:
        pmix.PMIx_Finalize(nothing, none)


def main(paths: str, key: str, value: "str | None" = None) -> int:
    pmix = load(paths.split(":"))
    if pmix is None:
        return NO_LIBRARY
    try:
        answer = {"value": exchange(pmix, key.encode(), None if value is None else value.encode())}
    except Exception as error:
        answer = {"error": str(error)}
    # The library writes to standard output as well.
    os.write(1, f"\n{MARK}{json.dumps(answer)}\n".encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
